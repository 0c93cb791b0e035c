"""How long a sweep will take, by the forecasts of its trials.

Which trials go on is not known before, so a round takes the mean over all of them, times their number.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.planning.corpus import Corpus
from raygpt.planning.forecast import Forecast, forecast
from raygpt.planning.loss import Laws
from raygpt.planning.target import HERE, Target, parse_target
from raygpt.resources import resources_of_worker
from raygpt.sweep.grid import Sweep

START_S = 15.0  # of a run on a cluster that is up: its workers, compiling, the first batch


def forecasts(sweep: Sweep, target: Target, corpus: Corpus) -> dict[str, Forecast]:
    """Of each trial, on a target that it has for itself. Its loss is what the sweep is for, so no law is asked."""
    return {name: forecast(recipe, target, corpus, laws=Laws()) for name, recipe in sweep.recipes.items()}


def seconds_here(sweep: Sweep, corpus: Corpus, at_once: int) -> float | None:
    """On the machine of this process; None if the sweep runs on a cluster of other nodes, whose speed is not known, or
    cannot be planned: its trials say why."""
    from raygpt.training.ray.scaling import is_our_own  # here: a plan needs no Ray

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
    total, done = 0.0, dict.fromkeys(trials, 0)
    for one in sweep.rounds:
        ends = {name: one.steps(plan.recipe) for name, plan in trials.items()}
        trunks = [START_S + plan.seconds(done[name], ends[name][0]) for name, plan in trials.items()]
        forks = [START_S + _cooling_s(plan, *ends[name]) for name, plan in trials.items()]
        total += math.ceil(one.trials / at_once) * (fmean(trunks) + fmean(forks))
        done = {name: step for name, (step, _) in ends.items()}
    rest = [START_S + plan.seconds(done[name], plan.recipe.steps) for name, plan in trials.items()]
    return total + math.ceil(sweep.finalists / at_once) * fmean(rest)


def _cooling_s(plan: Forecast, step: int, last: int) -> float:
    """Of a fork, which is validated before and after its cooling."""
    return (last - step) * plan.time.total + 2 * plan.evaluation_s


def notes_of(trials: Mapping[str, Forecast]) -> list[str]:
    """The first trial that does not fit, and the notes of all, each once."""
    large = [
        f"{name} does not fit: {size(plan.memory.total)} of {size(plan.devices.memory_bytes)} on each device"
        for name, plan in trials.items()
        if not plan.fits
    ]
    return list(dict.fromkeys([*large[:1], *(note for plan in trials.values() for note in plan.notes)]))


def as_dict(
    sweep: Sweep, trials: Mapping[str, Forecast], target: Target, seconds: float, cost: float | None
) -> dict[str, Any]:
    """What a sweep will take, as JSON values."""
    return {
        "target": str(target),
        "fits": all(plan.fits for plan in trials.values()),
        "keys": {axis.key: list(axis.values) for axis in sweep.axes},
        "trials": len(sweep.trials),
        "to_the_end": sweep.finalists,
        "tokens": round(sweep.share * sweep.grid_tokens),
        "grid_tokens": sweep.grid_tokens,
        "run_s": seconds,
        "cost": cost,
        "notes": notes_of(trials),
    }
