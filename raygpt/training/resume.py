"""Whether a recipe goes on with the run that lies in its folder, and what a new one starts from."""

from typing import Any

import numpy as np

from raygpt import storage
from raygpt.config import May, Model, Recipe, keys_that
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.recipes.explain import flat
from raygpt.runs import RECIPE, checkpoints
from raygpt.runs.checkpoints import Checkpoint

# Of keys that may change, some change the numbers: another arithmetic rounds otherwise (cluster, compile, remat,
# accumulation, deterministic), and on_nan and on_spike leave steps out. The batches stay.
FREE = keys_that(May.CHANGE)
LENGTHS = ("training.steps", "training.epochs")  # a run may go on for longer


def check(run_folder: str, recipe: Recipe, force: bool) -> int:
    """The step that the run goes on after, 0 for a new one; refuses what would not be the same run."""
    uri = storage.join(run_folder, RECIPE)
    if not storage.exists(uri):
        return 0
    before = _values(load_recipe(uri))
    after = _values(recipe)
    changed = [key for key in after if after[key] != before.get(key) and not key.startswith(FREE)]
    changed = [key for key in changed if not (key in LENGTHS and _is_more(after[key], before[key]))]
    if changed and not force:
        differences = ", ".join(f"{key}: {before.get(key)} → {after[key]}" for key in changed)
        raise RaygptError(
            f"{run_folder} is a run of another recipe ({differences}); set run.name to begin a new one, "
            "or add --force to go on with this one all the same"
        )
    checkpoint = checkpoints.find_newest(run_folder)
    return checkpoint.step if checkpoint else 0


def check_text(run_folder: str, after: int, tokenizer: str, data: list[str], force: bool) -> None:
    """Refuse to go on with a text that has changed under its name: the batches would be others. By fingerprints."""
    if not after or force:
        return
    known = checkpoints.facts(Checkpoint(after, checkpoints.folder_of(run_folder, after)))
    if (known["tokenizer"], known["data"]) != (tokenizer, data):
        what = "its text" if known["data"] != data else "its tokenizer"
        raise RaygptError(
            f"{run_folder}: {what} is not what it was trained on up to step {after}; bring that back, set run.name to "
            "begin a new run, or add --force to go on all the same"
        )


def changed_rate(run_folder: str, after: int, recipe: Recipe) -> str | None:
    """What to say where another length moves the learning rate of a run's next step; None where it stays."""
    if not after:
        return None
    known = checkpoints.facts(Checkpoint(after, checkpoints.folder_of(run_folder, after)))["recipe"]
    before, now = known["training"]["steps"], recipe.steps
    old, new = (f"{float(recipe.schedule.fraction(after, steps, np)):.2f}" for steps in (before, now))
    if old == new:
        return None
    return (
        f"training.steps: {now} instead of {before} stretch the {recipe.schedule.kind} schedule, and the learning rate "
        f"goes at once from {old} to {new} of its highest; to go on at another, begin a new run with run.start_from"
    )


def fork(recipe: Recipe, home: str, tokenizer: str, after: int = 0) -> Checkpoint | None:
    """The checkpoint that `run.start_from` names; refuses one whose model or tokenizer is another.

    A run that has begun needs it only if all its own turn out to be damaged, so it may be gone by then.
    """
    if recipe.run.start_from is None:
        return None
    try:
        return _named(recipe, recipe.run.start_from, home, tokenizer)
    except RaygptError:
        if after:
            return None
        raise


def _named(recipe: Recipe, start_from: str, home: str, tokenizer: str) -> Checkpoint:
    name, _, step = start_from.partition("@")
    if step and not step.isdecimal():
        raise RaygptError(
            f"run.start_from: {step!r} is no step; write RUN or RUN@STEP, e.g. run.start_from: {name}@1000"
        )
    folder = storage.absolute(name) if "/" in name else storage.join(home, name)
    if not storage.exists(storage.join(folder, RECIPE)):
        raise RaygptError(f"run.start_from: there is no run {name!r} in {home}; write the name of one, or its path")
    checkpoint = checkpoints.find(folder, int(step) if step else None)
    facts = checkpoints.facts(checkpoint)
    models = (
        recipe.model,
        Model.model_validate(facts["recipe"]["model"]),
    )  # keys that are newer than a run have defaults
    ours, theirs = (flat({"model": model.model_dump(mode="json")}) for model in models)
    keys = [key for key in ours if key not in keys_that(May.DIFFER)]
    different = ", ".join(f"{key}: {theirs[key]} → {ours[key]}" for key in keys if ours[key] != theirs[key])
    if facts["tokenizer"] != tokenizer:
        different = "its tokenizer" if not different else f"{different}, its tokenizer"
    if different:
        raise RaygptError(
            f"run.start_from: {name} has another model ({different}); write the same, or start without it"
        )
    if checkpoint.step >= recipe.steps:
        raise RaygptError(
            f"training.steps: {recipe.steps} are done already at step {checkpoint.step} of {name}; write more"
        )
    return checkpoint


def _is_more(after: float | None, before: float | None) -> bool:
    return after is not None and before is not None and after > before


def _values(recipe: Recipe) -> dict[str, Any]:
    return flat(recipe.to_dict())
