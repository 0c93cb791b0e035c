"""The curves of runs, from their metrics: loss, learning rate, speed and others over steps, tokens or time."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from raygpt.runs import OpenRun, metrics
from raygpt.runs.metrics import Line
from raygpt.show.chart import Curve, Mark, Point

POINTS = 300  # of a curve, which is drawn in up to twelve views; a chart is about 1,000 pixels wide
LOSSES = ("training", "validation")  # their names, and of a single run also their colours, 0 and 1


def loss_curves(runs: Sequence[OpenRun], axis: str) -> list[Curve]:
    """Training and validation loss of each run: in two colours where there is one run, else in a colour per run."""
    curves, is_alone = [], len(runs) == 1
    for number, run in enumerate(runs):
        train, val = (_points(run, metric, axis) for metric in ("loss", "val_loss"))
        name = "" if is_alone else f"{run.name} "
        curves.append(Curve(f"{name}{LOSSES[0]}", train, number, number, is_faint=not is_alone))
        curves.append(Curve(f"{name}{LOSSES[1]}", val, number, 1 if is_alone else number, has_dots=True))
    return [curve for curve in curves if curve.has_values]


def metric_curves(runs: Sequence[OpenRun], metric: str, axis: str, factor: float = 1.0) -> list[Curve]:
    """One metric of each run that logged it, times a factor."""
    curves = [Curve(run.name, _points(run, metric, axis, factor), number, number) for number, run in enumerate(runs)]
    return [curve for curve in curves if curve.has_values]


def restart_marks(runs: Sequence[OpenRun], axis: str) -> list[Mark]:
    """Where the runs were restarted."""
    return [
        Mark(x, f"{run.name} was restarted after step {line['step']:,}", number)
        for number, run in enumerate(runs)
        for line in metrics.restarts(run.metrics)
        if (x := _place_on(axis, run)(line)) is not None
    ]


def thinned(lines: Sequence[Line], metric: str, count: int = POINTS) -> Sequence[Line]:
    """At most about `count` lines: from each stretch the lowest and the highest value, so that spikes stay."""
    if len(lines) <= count:
        return lines
    size = 2 * len(lines) / count
    kept = {0, len(lines) - 1}
    for stretch in range(count // 2):
        rows = range(int(stretch * size), min(len(lines), int((stretch + 1) * size)))
        values = {row: value for row in rows if (value := _number(lines[row][metric])) is not None}
        kept |= {min(values, key=values.__getitem__), max(values, key=values.__getitem__)} if values else set()
    return [lines[row] for row in sorted(kept)]


def _points(run: OpenRun, metric: str, axis: str, factor: float = 1.0) -> list[Point]:
    """(x, value) of lines that have the metric; the value is None where it is not a number."""
    place = _place_on(axis, run)
    lines = thinned([line for line in run.metrics if metric in line], metric)
    placed = ((place(line), _number(line[metric])) for line in lines)
    return [(x, None if y is None else factor * y) for x, y in placed if x is not None]


def _place_on(axis: str, run: OpenRun) -> Callable[[Line], float | None]:
    """A function that gives a line's position on the axis; a line without a time has none on the time axis."""
    if axis == "time":
        start = next((line["time"] for line in run.metrics if "time" in line), 0.0)
        return lambda line: round(line["time"] - start, 1) if "time" in line else None
    factor = run.recipe.training.batch_tokens if axis == "tokens" else 1
    return lambda line: line["step"] * factor


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
