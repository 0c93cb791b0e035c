"""Compares a run whose workers are killed again and again with an undisturbed one: bit-identical losses and state.

from raygpt.testing.chaos import chaos

print(chaos("tiny", kills=3, seed=0, home="runs", **{"cluster.workers": 2, "training.steps": 60}))
"""

import os
import random
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

import raygpt
from raygpt import storage
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.engines import read_plain_state
from raygpt.recipes import load_recipe, read_recipe
from raygpt.runs import RECIPE, checkpoints, metrics
from raygpt.testing.faults import VARIABLE, Strike, from_environment
from raygpt.training.ray.launch import Result


@dataclass(frozen=True)
class Chaos:
    """The result of the comparison."""

    faults: list[str]  # that were requested
    struck: list[str]  # those that happened, in order; fewer if the run ended before
    struck_at: list[int]  # the step of each: a fault in a skipped save happens in the next
    steps_repeated: list[int]  # because of each
    restarts: int  # fewer if a fault happened before the workers had restarted after another
    is_identical: bool  # losses of every step, parameters and optimizer at the end
    undisturbed_s: float
    disturbed_s: float


def chaos(recipe: str, *, kills: int, seed: int, home: str, **overrides: Any) -> Chaos:
    """Train a recipe undisturbed, then with SIGKILLs of random workers at random steps, some during a save."""
    faults = choose_kills(load_recipe(recipe, overrides), kills, seed)
    return disturb(recipe, faults, home=home, **overrides)


def disturb(recipe: str, faults: list[str], *, home: str, **overrides: Any) -> Chaos:
    """Train a recipe undisturbed, then with these faults (see faults.py), each of which ends a worker."""
    straight, undisturbed_s = _timed(recipe, "undisturbed", home, overrides)
    with patch.dict(os.environ, {VARIABLE: " ".join(faults)}):
        killed, disturbed_s = _timed(recipe, "disturbed", home, overrides)
        strikes = from_environment(killed.path).struck()
    restarts = metrics.restarts(metrics.read(killed.path))
    return Chaos(
        faults,
        struck=[faults[strike.number] for strike in strikes],
        struck_at=[strike.step for strike in strikes],
        steps_repeated=[steps_repeated(strike, restarts) for strike in strikes],
        restarts=len(restarts),
        is_identical=losses(straight.path) == losses(killed.path) and _is_same_state(straight, killed),
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
    )


def choose_kills(recipe: Recipe, kills: int, seed: int) -> list[str]:
    """Ascending, distinct steps and a rank for each; every third while a checkpoint is written.

    Not during the last two checkpoints: if a save is skipped, there must be a later one for the kill.
    """
    chance = random.Random(seed)
    every, steps = int(recipe.training.checkpoint_every), recipe.steps
    saves = chance.sample(range(every, steps - every, every), kills // 3)
    others = chance.sample([step for step in range(2, steps) if step % every], kills - len(saves))
    chosen = sorted([(step, ":save") for step in saves] + [(step, "") for step in others])
    return [f"kill@{step}:{chance.randrange(recipe.cluster.max_workers)}{when}" for step, when in chosen]


def steps_repeated(strike: Strike, restarts: list[dict[str, Any]]) -> int:
    """How many steps were repeated because of a fault, from the restart lines of the metrics.

    The first restart after it counts, also for a second fault before that restart. A restart after a step that the
    fault had not reached belongs to another fault: this one came before anything was logged; its restart has no line.
    """
    after = next((line["step"] for line in restarts if line["time"] > strike.time), 0)
    return strike.reached - (after if after <= strike.reached else 0)


def losses(run_folder: str) -> list[tuple[int, float]]:
    """Step and loss of every step that was logged, in the order of the file."""
    return [(line["step"], line["loss"]) for line in metrics.read(run_folder) if "loss" in line]


def _timed(recipe: str, name: str, home: str, overrides: dict[str, Any]) -> tuple[Result, float]:
    started = time.monotonic()
    result = raygpt.train(recipe, **overrides, **{"run.storage": home, "run.name": name})
    if result.error:
        raise result.error
    return result, time.monotonic() - started


def _is_same_state(*runs: Result) -> bool:
    one, other = (read_state(run.path) for run in runs)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def read_state(run_folder: str) -> dict[str, Any]:
    """Parameters and optimizer of a run's last checkpoint."""
    checkpoint = checkpoints.find(run_folder, None)
    facts = checkpoints.facts(checkpoint)
    model = read_recipe(storage.join(run_folder, RECIPE)).model
    with checkpoints.fetched_to_node(checkpoint) as folder:
        state = read_plain_state(facts["engine"], folder, model, tokenizers.load(run_folder).vocab)
    kinds = {"parameters": state.parameters, **state.slots}
    return {f"{kind}/{name}": array for kind, arrays in kinds.items() for name, array in arrays.items()}
