"""The page of a scaling law: the rungs and the law over size and over tokens, and the loss that it predicts."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from raygpt.show import chart
from raygpt.show.page import document, table, tiles

if TYPE_CHECKING:
    from raygpt.sweep.scaling import Ladder, ScalingAnswer

CURVE_POINTS = 41
ROOM = 0.04


def scaling_page(ladder: "Ladder", answer: "ScalingAnswer") -> str:
    """The whole page."""
    loss, name = answer.loss, str(ladder.recipe.run.name)
    figures = [
        ("predicted validation loss", f"{loss.loss:.4f}"),
        ("four runs of five", f"{loss.low:.4f} to {loss.high:.4f}"),
        ("parameters in blocks", chart.short(ladder.parameters)),
        ("tokens", chart.short(ladder.tokens)),
        ("of the run's compute", f"{ladder.share:.1%}"),
    ]
    body = [
        f'<header><div><h1>{escape(name)}</h1><p class="soft">{escape(law_text(answer))}</p></div></header><main>',
        tiles(figures),
        '<div class="bar"><h2>Loss</h2></div>',
        '<div class="charts">',
        _panel("by tokens, a colour for each size", "tokens", "parameters", ladder, answer),
        _panel("by parameters, a colour for each length", "parameters", "tokens", ladder, answer),
        "</div>",
        "<h2>Rungs</h2>",
        table(("run", "parameters", "tokens", "loss", "by the law", "difference"), _rows(ladder, answer), range(1, 6)),
        "</main>",
    ]
    return document(name, body)


def law_text(answer: "ScalingAnswer") -> str:
    """L(N, D) = 1.2 + ((8 / N^0.09)^2.5 + (19 / (D - 4e4)^0.15)^2.5)^(1/2.5)"""
    terms = answer.law.terms
    tokens = f"(D - {terms['S']:.3g})" if terms["S"] >= 1 else "D"
    return (
        f"L(N, D) = {terms['E']:.3g} + (({terms['A']:.4g} / N^{terms['a']:.3f})^{terms['p']:g} + "
        f"({terms['B']:.4g} / {tokens}^{terms['b']:.3f})^{terms['p']:g})^(1/{terms['p']:g}), "
        f"fitted to {len(answer.law.rungs)} runs, whose noise is taken as {answer.law.noise:.1%}"
    )


def _panel(title: str, x: str, other: str, ladder: "Ladder", answer: "ScalingAnswer") -> str:
    """Losses over one of size and tokens on a log scale: rungs as points, the law as lines, the run at the right."""
    values = sorted({getattr(one, other) for one in answer.law.rungs})
    goal = {"parameters": float(ladder.parameters), "tokens": float(ladder.tokens)}
    left = math.log10(min(getattr(one, x) for one in answer.law.rungs))
    right = math.log10(goal[x])
    curves = []
    for number, value in enumerate([*values, goal[other]]):
        law = _law_curve(answer, x, other, value, left, right)
        points = [(math.log10(getattr(one, x)), one.loss) for one in answer.law.rungs if getattr(one, other) == value]
        name = f"{chart.short(value)} {other}"
        curves.append(chart.Curve(f"{name}, by the law", law, number, number, is_faint=True))
        curves.append(chart.Curve(name, sorted(points), number, number, has_dots=True))
    curves.append(_interval(answer, right, len(values)))
    heights = [y for curve in curves for _, y in curve.points if y is not None]
    low, high = min(heights), max(heights)
    room_x, room_y = ROOM * (right - left), ROOM * (high - low)
    frame = chart.Frame(left - room_x, right + room_x, low - room_y, high + room_y)
    drawn = chart.plot(title, x, frame, [curve for curve in curves if curve.points], (), "", log_ticks(left, right))
    names = [f"{chart.short(value)} {other}" for value in values] + [f"the run's {chart.short(goal[other])}"]
    legend = "".join(
        f'<span><i class="dot" style="background:var(--c{n % chart.COLOURS})"></i>{name}</span>'
        for n, name in enumerate(names)
    )
    return f'<div class="chart card wide"><h3>{escape(title)}</h3><div class="legend">{legend}</div>\n{drawn}\n</div>'


def _law_curve(
    answer: "ScalingAnswer", x: str, other: str, value: float, left: float, right: float
) -> list[chart.Point]:
    places = [left + (right - left) * n / (CURVE_POINTS - 1) for n in range(CURVE_POINTS)]
    pairs = [{x: 10.0**place, other: value} for place in places]
    return [(place, answer.law.loss(**pair)) for place, pair in zip(places, pairs, strict=True)]


def _interval(answer: "ScalingAnswer", at: float, number: int) -> chart.Curve:
    """From the lowest to the highest loss that is expected of the run."""
    loss = answer.loss
    points: list[chart.Point] = [(at, loss.low), (at, loss.loss), (at, loss.high)]
    return chart.Curve("the run, four of five", points, number, number, has_dots=True)


def log_ticks(left: float, right: float) -> list[chart.Tick]:
    """1, 2 and 5 times powers of ten, or less, on an axis of logarithms."""
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        decades = range(math.floor(left), math.ceil(right) + 1)
        found = [math.log10(n * 10.0**decade) for decade in decades for n in multiples]
        inside = [at for at in found if left <= at <= right]
        if len(inside) >= 3:
            break
    return [(at, chart.short(round(10**at, 6))) for at in inside]


def _rows(ladder: "Ladder", answer: "ScalingAnswer") -> Iterator[Sequence[str]]:
    measured = {one.run: one for one in (*answer.law.rungs, *answer.early)}
    for one in (measured[rung.name] for rung in ladder.rungs):
        law = answer.law.loss(one.parameters, one.tokens)
        compared = ["hardly begun", "left out"] if one in answer.early else [f"{law:.4f}", f"{one.loss / law - 1:+.2%}"]
        yield [escape(one.run), f"{one.parameters:,}", f"{one.tokens:,}", f"{one.loss:.4f}", *compared]
