"""How long a sweep will take, by the forecasts of its trials.

Which trials go on is not known before, so a round takes the mean over all of them, times their number.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raygpt.errors import RaygptError
from raygpt.planning.corpus import Corpus
from raygpt.planning.forecast import Forecast, forecast
from raygpt.planning.target import HERE, Target, parse_target
from raygpt.resources import resources_of_worker
from raygpt.sweep.grid import Sweep
from raygpt.training.ray.scaling import is_our_own

START_S = 15.0  # of a run on a cluster that is up: its workers, compiling, the first batch


def forecasts(sweep: Sweep, target: Target, corpus: Corpus) -> dict[str, Forecast]:
    """Of each trial, on a target that it has for itself."""
    return {name: forecast(recipe, target, corpus) for name, recipe in sweep.recipes.items()}


def seconds_here(sweep: Sweep, corpus: Corpus, at_once: int) -> float | None:
    """On the machine of this process; None if the sweep runs on a cluster of other nodes, whose speed is not known, or
    cannot be planned: its trials say why."""
    if not is_our_own():
        return None
    machine, cluster = parse_target(HERE), sweep.base.cluster
    if machine.device.platform != "cpu":
        devices = cluster.max_workers * resources_of_worker(cluster, machine.device.platform, ()).get("GPU", 1)
        machine = replace(machine, count=max(1, min(int(devices), machine.count)))
    try:
        return sweep_seconds(sweep, forecasts(sweep, machine, corpus), at_once)
    except RaygptError:
        return None


def sweep_seconds(sweep: Sweep, trials: Mapping[str, Forecast], at_once: int) -> float:
    """Seconds from the first trial to the answer, with so many runs at a time."""
    total, done = 0.0, 0.0
    for one in sweep.rounds:
        at_start = 0 if done else 1  # validations: a run before its first step, a fork before and after its cooling
        each = _mean(trials, one.trunk - done, at_start) + _mean(trials, one.cooling, 2)
        total += math.ceil(one.trials / at_once) * each
        done = one.trunk
    evaluations = sum(plan.evaluations for plan in trials.values()) / len(trials)
    return total + math.ceil(sweep.finalists / at_once) * _mean(trials, 1 - done, evaluations)


def _mean(trials: Mapping[str, Forecast], share: float, evaluations: float) -> float:
    """Seconds of a run over a share of its steps."""
    seconds = [
        share * plan.recipe.steps * plan.time.total + evaluations * plan.evaluation_s for plan in trials.values()
    ]
    return START_S + sum(seconds) / len(seconds)


def as_dict(sweep: Sweep, seconds: float, cost: float | None) -> dict[str, Any]:
    """What a sweep will take, as JSON values."""
    return {
        "keys": {axis.key: list(axis.values) for axis in sweep.axes},
        "trials": len(sweep.trials),
        "to_the_end": sweep.finalists,
        "tokens": round(sweep.share * sweep.grid_tokens),
        "grid_tokens": sweep.grid_tokens,
        "run_s": seconds,
        "cost": cost,
    }
