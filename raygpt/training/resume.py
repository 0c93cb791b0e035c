"""Checks whether a recipe may resume the run in its folder, and finds the checkpoint that a fork starts from."""

from typing import Any

import numpy as np

from raygpt import storage
from raygpt.config import May, Model, Recipe, Schedule, keys_with
from raygpt.errors import RaygptError
from raygpt.recipes import read_recipe
from raygpt.recipes.explain import flat
from raygpt.runs import RECIPE, checkpoints, free_name, has_taken_steps, split_step
from raygpt.runs.checkpoints import Checkpoint

# Some of the keys that may change do change the numbers: cluster, compile, remat, accumulation and deterministic change
# the rounding, and on_nan and on_spike skip steps. The batches stay the same.
FREE = keys_with(May.CHANGE)
LENGTHS = ("training.steps", "training.epochs")  # a run may be lengthened
WARMUP = "schedule.warmup_steps"  # and its warm-up with it: that of a shortened recipe was shorter


def check(run_folder: str, recipe: Recipe, force: bool) -> int:
    """The step to resume after, 0 for a new run; refuses a recipe that would not be the same run.

    A run that has taken no step, e.g. because its first recipe had a mistake, is a new one.
    """
    if not _is_begun(run_folder):
        return 0
    changed = changes(run_folder, recipe)
    if changed and not force:
        raise RaygptError(
            f"{run_folder} is a run of another recipe ({changed}); write run.name={free_name(run_folder)} to begin "
            "a new one, or add --force to go on with this one all the same"
        )
    checkpoint = checkpoints.find_newest(run_folder)
    return checkpoint.step if checkpoint else 0


def changes(run_folder: str, recipe: Recipe) -> str:
    """The keys that make a recipe another run than the one in the folder, with both values; empty if none does."""
    if not _is_begun(run_folder):
        return ""
    before = _values(read_recipe(storage.join(run_folder, RECIPE)))
    after = _values(recipe)
    changed = [key for key in after if after[key] != before.get(key) and not key.startswith(FREE)]
    lengthened = [key for key in changed if key in LENGTHS and _is_more(after[key], before[key])]
    if lengthened and _is_more(after[WARMUP], before[WARMUP]):
        lengthened.append(WARMUP)
    return ", ".join(f"{key}: {before.get(key)} → {after[key]}" for key in changed if key not in lengthened)


def _is_begun(run_folder: str) -> bool:
    return storage.exists(storage.join(run_folder, RECIPE)) and has_taken_steps(run_folder)


def check_text(run_folder: str, after: int, tokenizer: str, data: list[str], force: bool) -> None:
    """Refuse to resume if the fingerprints of the tokenizer or the data have changed: the batches would differ."""
    if not after or force:
        return
    known = checkpoints.facts(Checkpoint(after, checkpoints.folder_of(run_folder, after)))
    if (known["tokenizer"], known["data"]) != (tokenizer, data):
        what = "its text" if known["data"] != data else "its tokenizer"
        raise RaygptError(
            f"{run_folder}: {what} is not what it was trained on up to step {after}; bring that back, write "
            f"run.name={free_name(run_folder)} to begin a new run, or add --force to go on all the same"
        )


def changed_rate(run_folder: str, after: int, recipe: Recipe) -> str | None:
    """A warning if a changed length or schedule makes the learning rate of the next step jump; None if it does not."""
    if not after:
        return None
    known = checkpoints.facts(Checkpoint(after, checkpoints.folder_of(run_folder, after)))["recipe"]
    before, now = known["training"]["steps"], recipe.steps
    schedules = ((Schedule.model_validate(known["schedule"]), before), (recipe.schedule, now))
    old, new = (f"{float(schedule.fraction(after, steps, np)):.2f}" for schedule, steps in schedules)
    if old == new:
        return None
    what = f"training.steps: {now} instead of {before} stretch" if now != before else "schedule: a changed one replaces"
    return (
        f"{what} the {known['schedule']['kind']} schedule, and the learning rate "
        f"goes at once from {old} to {new} of its highest; to go on at another, begin a new run with run.start_from"
    )


def check_fork(recipe: Recipe, home: str) -> None:
    """Refuse a `run.start_from` that is no run, before the corpus is prepared."""
    if recipe.run.start_from is not None:
        _run_of(recipe.run.start_from, home)


def fork(recipe: Recipe, home: str, tokenizer: str, after: int = 0) -> Checkpoint | None:
    """The checkpoint that `run.start_from` names; refuses one with a different model or tokenizer.

    A run with checkpoints of its own needs it only if all of those are damaged, so it may have been deleted.
    """
    if recipe.run.start_from is None:
        return None
    try:
        return _named(recipe, recipe.run.start_from, home, tokenizer)
    except RaygptError:
        if after:
            return None
        raise


def _run_of(start_from: str, home: str) -> tuple[str, str, int | None]:
    """The name, the folder and the step that `run.start_from` names; the newest step if none."""
    name, step = split_step(start_from)
    folder = storage.absolute(name) if "/" in name else storage.join(home, name)
    if not storage.exists(storage.join(folder, RECIPE)):
        raise RaygptError(
            f"run.start_from: there is no run {name!r} in {home}; write the name of one or its path, and "
            "@STEP after it for one of its steps"
        )
    return name, folder, step


def _named(recipe: Recipe, start_from: str, home: str, tokenizer: str) -> Checkpoint:
    name, folder, step = _run_of(start_from, home)
    checkpoint = checkpoints.find(folder, step)
    facts = checkpoints.facts(checkpoint)
    saved = Model.model_validate(facts["recipe"]["model"])  # keys that are newer than that run have defaults
    models = (recipe.model, saved)
    ours, theirs = (flat({"model": model.without_derived().model_dump(mode="json")}) for model in models)
    keys = [key for key in ours if key not in keys_with(May.DIFFER)]
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
