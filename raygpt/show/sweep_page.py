"""The page of a sweep: the answer, a panel for each key, all keys side by side, and every loss."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from raygpt.formatting import number_text
from raygpt.show import chart
from raygpt.show.page import document, table, tiles
from raygpt.sweep.optimum import Compared, Optimum, place
from raygpt.sweep.values import Axis, number_of

if TYPE_CHECKING:
    from raygpt.sweep.grid import Sweep, SweepAnswer

CURVE_POINTS = 41
ROOM = 0.06  # left and right of the values


def sweep_page(sweep: "Sweep", answer: "SweepAnswer") -> str:
    """The whole page."""
    body = [
        f'<header><div><h1>{escape(str(sweep.base.run.name))}</h1><p class="soft">{escape(_about(sweep, answer))}</p>'
        "</div></header><main>",
        _tiles(answer),
        '<div class="bar"><h2>Loss by key</h2></div>',
        _legend(sweep),
        f'<div class="charts">{"".join(_panel(axis, sweep, answer) for axis in sweep.axes)}</div>',
        *(_parallel(sweep, answer) if len(sweep.axes) > 1 else ()),
        *_effects(answer),
        *_trials(sweep, answer),
        "</main>",
    ]
    return document(str(sweep.base.run.name), body)


def _about(sweep: "Sweep", answer: "SweepAnswer") -> str:
    early = f"the best {len(answer.finals)} were trained to the end" if sweep.rounds else "all were trained to the end"
    return (
        f"{len(sweep.trials)} trials of {', '.join(axis.key for axis in sweep.axes)}; {early}, "
        f"with {answer.tokens / answer.grid_tokens:.1%} of the whole grid's tokens."
    )


def _tiles(answer: "SweepAnswer") -> str:
    figures = [("best validation loss", f"{answer.loss:.4f}")]
    figures += [(f"best {escape(key)}", escape(value)) for key, value in answer.best.values.items()]
    figures += [(f"fitted {escape(one.key)}{_interval(one)}", f"{one.value:.3g}") for one in answer.fit.optima]
    return tiles(figures)


def _interval(optimum: Optimum) -> str:
    return "" if optimum.low is None else f", {optimum.low:.3g} to {optimum.high:.3g}"


def _legend(sweep: "Sweep") -> str:
    names = [
        f'<span><i class="dot" style="background:var(--c{n})"></i>{escape(name)}</span>'
        for n, name in enumerate(round_names(sweep))
    ]
    return f'<div class="legend">{"".join(names)}<span class="soft">faint: the fitted parabola</span></div>'


def round_names(sweep: "Sweep") -> list[str]:
    """What is compared in each round."""
    cooled = [f"cooled down at {one.trunk + one.cooling:.0%} of the steps" for one in sweep.rounds]
    return [*cooled, "at the end"]


def _panel(axis: Axis, sweep: "Sweep", answer: "SweepAnswer") -> str:
    """The lowest loss with each value of a key, in a colour for each round, and the parabola through the last ones."""
    where = places(axis)
    curves = []
    for number, name in enumerate(round_names(sweep)):
        lowest: dict[float, float] = {}
        for one in answer.compared:
            if one.round == number and math.isfinite(one.loss):
                at = where[one.values[axis.key]]
                lowest[at] = min(one.loss, lowest.get(at, math.inf))
        curves.append(chart.Curve(name, sorted(lowest.items()), number, number, has_dots=True))
    optimum = next((one for one in answer.fit.optima if one.key == axis.key), None)
    left, right = min(where.values()), max(where.values())
    if optimum:
        curves.append(_parabola(optimum, answer, left, right, len(sweep.rounds)))
    heights = [y for curve in curves for _, y in curve.points if y is not None and y <= _top(answer)]
    low, high = min(heights), max(heights)
    room_x, room_y = ROOM * (right - left), ROOM * (high - low or 1)
    frame = chart.Frame(left - room_x, right + room_x, low - room_y, high + room_y)
    shown = [chart.Curve(c.name, _inside(c.points, frame), c.run, c.colour, c.is_faint, c.has_dots) for c in curves]
    marks = [chart.Mark(place(axis, optimum.value), f"fitted optimum {optimum.value:.3g}")] if optimum else []
    ticks = [(at, value) for value, at in where.items()]
    drawn = chart.plot(axis.key, axis.key, frame, [c for c in shown if c.points], marks, "", ticks)
    kind = "wide" if len(sweep.axes) == 1 else ""
    return f'<div class="chart card {kind}"><h3>{escape(axis.key)}</h3>\n{drawn}\n</div>'


def _top(answer: "SweepAnswer") -> float:
    """Losses above are not drawn: trials far off would flatten the others."""
    losses = sorted(one.loss for one in answer.compared if math.isfinite(one.loss))
    return losses[0] + 3 * (losses[len(losses) // 2] - losses[0]) + 1e-9


def _inside(points: Sequence[chart.Point], frame: chart.Frame) -> list[chart.Point]:
    return [(x, y) for x, y in points if y is not None and frame.low <= y <= frame.high]


def places(axis: Axis) -> dict[str, float]:
    """Where each value is on the x axis: numbers by their size, other values in their order."""
    numbers = {value: number_of(value) for value in axis.values}
    if None in numbers.values():
        return {value: float(n) for n, value in enumerate(axis.values)}
    return {value: place(axis, number) for value, number in numbers.items() if number is not None}


def _parabola(optimum: Optimum, answer: "SweepAnswer", left: float, right: float, number: int) -> chart.Curve:
    """Through the best loss at the end, with the fitted vertex and curvature."""
    vertex, curvature = optimum.curve
    at = float(answer.best.values[optimum.key])
    level = answer.loss - curvature * ((math.log10(at) if optimum.is_log else at) - vertex) ** 2
    xs = [left + (right - left) * n / (CURVE_POINTS - 1) for n in range(CURVE_POINTS)]
    points = [(x, level + curvature * (x - vertex) ** 2) for x in xs]
    return chart.Curve("fitted", points, number, number, is_faint=True)


def _parallel(sweep: "Sweep", answer: "SweepAnswer") -> Iterator[str]:
    """A line for each trial through its values and its loss in the first round; the best quarter in colour."""
    first = [one for one in answer.compared if one.round == 0 and math.isfinite(one.loss)]
    losses = sorted(one.loss for one in first)
    low, high = losses[0], losses[-1]
    axes: list[tuple[str, Sequence[chart.Tick]]] = []
    for axis in sweep.axes:
        where = _shares(axis)
        axes.append((axis.key, [(at, value) for value, at in where.items()]))
    axes.append(("loss", [(0.0, f"{low:.4f}"), (1.0, f"{high:.4f}")]))
    curves = [
        _line(one, sweep, (one.loss - low) / ((high - low) or 1), one.loss <= losses[len(losses) // 4]) for one in first
    ]
    yield "<h2>All keys</h2>"
    yield f'<div class="chart card wide">\n{chart.parallel("All keys", axes, curves)}\n</div>'


def _line(one: Compared, sweep: "Sweep", height: float, is_good: bool) -> chart.Curve:
    values: list[float] = [_shares(axis)[one.values[axis.key]] for axis in sweep.axes]
    points = [(float(n), at) for n, at in enumerate([*values, height])]
    return chart.Curve(one.trial, points, colour=0 if is_good else 5, is_faint=not is_good)


def _shares(axis: Axis) -> dict[str, float]:
    """The places of the values, from 0 to 1."""
    where = places(axis)
    low, high = min(where.values()), max(where.values())
    return {value: (at - low) / (high - low) for value, at in where.items()}


def _effects(answer: "SweepAnswer") -> Iterator[str]:
    rows = [
        [
            f"<code>{escape(one.key)}</code>",
            f"{one.loss:.4f}",
            escape(one.best),
            {True: "yes", False: "not clearly", None: "too few trials to know"}[one.is_clear],
        ]
        for one in answer.fit.effects
    ]
    yield "<h2>Which keys mattered</h2>"
    head = ("key", "loss between its best and worst value, first round", "best value there", "more than noise")
    yield table(head, rows, numbers=[1])


def _trials(sweep: "Sweep", answer: "SweepAnswer") -> Iterator[str]:
    by = {(one.trial, one.round): one.loss for one in answer.compared}
    numbers = range(len(sweep.rounds) + 1)
    rows = []
    for trial in sweep.trials:
        losses = [by.get((trial.name, number)) for number in numbers]
        shown = ["diverged" if loss == math.inf else number_text(loss, ".4f") for loss in losses]
        rows.append([escape(trial.name), *shown])
    yield "<h2>Trials</h2>"
    yield table(("trial", *round_names(sweep)), rows, numbers=[n + 1 for n in numbers])
