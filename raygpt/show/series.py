"""A run's metrics as the columns that pages and pictures are drawn from."""

import math
from typing import Any

from raygpt.runs import OpenRun, metrics

COLUMNS = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "data_wait_s")
POINTS = 1000  # of a curve on a page: as many as it has pixels across

Column = list[float | None]
Series = dict[str, Column]


def train_series(run: OpenRun) -> Series:
    """step, tokens, time (seconds since the first line) and each metric, a value for each logged step."""
    lines = [line for line in run.metrics if "loss" in line]
    return {**_axes(run, lines), **{name: [_number(line.get(name)) for line in lines] for name in COLUMNS}}


def val_series(run: OpenRun) -> Series:
    """The same for validations, whose only metric is the loss."""
    lines = [line for line in run.metrics if "val_loss" in line]
    return {**_axes(run, lines), "loss": [_number(line["val_loss"]) for line in lines]}


def restarts(run: OpenRun) -> Series:
    """Where the run was started anew."""
    return _axes(run, metrics.restarts(run.metrics))


def thinned(series: Series, points: int = POINTS) -> Series:
    """At most about `points` of a long run: from each stretch the lowest and the highest loss, so that spikes stay."""
    count = len(series["step"])
    if count <= points:
        return series
    size = 2 * count / points
    kept = {0, count - 1}
    for stretch in range(points // 2):
        rows = range(int(stretch * size), min(count, int((stretch + 1) * size)))
        losses = {row: loss for row in rows if (loss := series["loss"][row]) is not None}
        kept |= {min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)} if losses else set()
    return {name: [column[row] for row in sorted(kept)] for name, column in series.items()}


def compact(series: Series) -> Series:
    """For a page: five digits of what is measured, times to 0.1 s, and no tokens, which follow from the steps."""
    digits = dict.fromkeys(COLUMNS, 5)
    return {
        name: [_short(x, digits.get(name)) if name != "step" else x for x in column]
        for name, column in series.items()
        if name != "tokens"
    }


def _short(value: float | None, digits: int | None) -> float | None:
    if value is None:
        return None
    return float(f"{value:.{digits}g}") if digits else round(value, 1)


def _axes(run: OpenRun, lines: list[dict[str, Any]]) -> Series:
    batch = run.recipe.training.batch_tokens
    steps: Column = [line["step"] for line in lines]
    begin = next((line["time"] for line in run.metrics if "time" in line), None)
    times: Column = [None if begin is None else _number(line.get("time"), begin) for line in lines]
    return {"step": steps, "tokens": [step * batch for step in steps if step is not None], "time": times}


def _number(value: Any, base: float = 0.0) -> float | None:
    """None for what is missing or is not a number."""
    return value - base if isinstance(value, int | float) and math.isfinite(value) else None
