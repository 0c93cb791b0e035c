"""Which trials of a sweep are trained to the end: early stopping that knows the schedule.

A loss in the middle of a run says little: a high rate looks bad until it falls, and then overtakes. So trials are
compared as if each had ended: from the checkpoint of step `trunk` a fork takes `cooling` more steps in which the rate
falls to where the schedule ends. The fork is only looked at; a trial that goes on resumes its own run.

    round 1   every trial   a tenth of its steps, cooled down over half as many again
    round 2   the best half three tenths, cooled down over a third as many
    the end   the best quarter

That is 47.5 % of the tokens of training every trial to the end. The best rate of a short run is a little higher than
that of a long one, by about the power 0.3 of the length: less than one step of a grid of doubled rates, so half of the
trials, then a quarter, leave room for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raygpt.config import Recipe

FRACTIONS = ((0.1, 0.05), (0.3, 0.1))  # of a trial's steps: the trunk, and the cooling after it
FEWEST_COOLING = 5  # steps: fewer show nothing
MOST_TOKENS = 0.5  # of the tokens of the whole grid
RATES = ("learning_rate", "embedding_rate", "head_rate", "gain_rate")  # which the schedule scales; AdamW has the first


@dataclass(frozen=True)
class Round:
    """A comparison: of how many trials, after which fractions of their steps, and how many of them go on."""

    trials: int
    trunk: float
    cooling: float
    kept: int

    def steps(self, recipe: Recipe) -> tuple[int, int]:
        """The step at which a trial is forked, and the last step of the fork."""
        trunk = round(self.trunk * recipe.steps)
        return trunk, trunk + round(self.cooling * recipe.steps)


def rounds_of(recipes: Sequence[Recipe]) -> list[Round]:
    """The rounds before the end; none where they would cost more than half of the grid, or the runs are too short."""
    count = len(recipes)
    plans = (
        (FRACTIONS, (count // 2, count // 4)),
        (FRACTIONS[:1], (count // 2,)),  # three trials
        (FRACTIONS[1:], (count // 7,)),  # a warm-up that is longer than the first round
    )
    for fractions, kept in plans:
        rounds, trials = [], count
        for (trunk, cooling), going_on in zip(fractions, kept, strict=True):
            rounds.append(Round(trials=trials, trunk=trunk, cooling=cooling, kept=going_on))
            trials = going_on
        is_possible = all(_can_cool(recipe, *each) for recipe in recipes for each in fractions)
        if is_possible and all(kept) and share(rounds, count) <= MOST_TOKENS:
            return rounds
    return []


def share(rounds: Sequence[Round], count: int) -> float:
    """The tokens of a sweep as a fraction of those of its whole grid."""
    spent, done = 0.0, 0.0
    for one in rounds:
        spent += one.trials * (one.trunk - done + one.cooling)
        done = one.trunk
    finalists = rounds[-1].kept if rounds else count
    return (spent + finalists * (1 - done)) / count


def _can_cool(recipe: Recipe, trunk: float, cooling: float) -> bool:
    """Whether the rate has risen by the fork, and there are steps enough to see it fall."""
    steps = recipe.steps
    return round(trunk * steps) >= recipe.schedule.warmup_steps and round(cooling * steps) >= FEWEST_COOLING


def best(losses: Mapping[str, float], count: int) -> list[str]:
    """The trials with the lowest losses, the best first; those that diverged are never among them."""
    finite = [name for name, loss in losses.items() if math.isfinite(loss)]
    return sorted(finite, key=lambda name: losses[name])[:count]


def cooled(recipe: Recipe, name: str, step: int, last: int) -> Recipe:
    """The fork of a trial at a step: from there its rates fall to where its schedule ends, at step `last`. A constant
    rate stays."""
    schedule, optimizer = recipe.schedule, recipe.optimizer
    now = float(schedule.fraction(step, recipe.steps, np))
    rates = RATES if optimizer.kind == "muon" else RATES[:1]
    scaled = {key: now * getattr(optimizer, key) for key in rates if key not in optimizer.idle_keys(recipe.model)}
    shape = {"kind": "wsd", "decay_share": (last - step) / last, "end": min(1.0, schedule.end / now)}
    run = {"name": name, "start_from": f"{recipe.run.name}@{step}"}
    return Recipe.model_validate(
        dict(recipe)
        | {
            "optimizer": optimizer.model_copy(update=scaled),
            "schedule": schedule.model_copy(update={} if schedule.kind == "constant" else shape),
            "training": recipe.training.model_copy(update={"steps": last}),
            "run": recipe.run.model_copy(update=run),
        }
    )
