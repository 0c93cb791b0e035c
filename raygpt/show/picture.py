"""The curves of runs as a PNG, for a README or a message.

By matplotlib, an extra: what draws text and lines well onto pixels is not for us to write, and a page needs none of it.
"""

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from raygpt.errors import RaygptError
from raygpt.runs import OpenRun
from raygpt.show import normal
from raygpt.show.series import Series, restarts, thinned, train_series, val_series

# Okabe and Ito's colours, as on the page
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b1568f", "#b07800", "#4b4f56")
INK, SOFT, GRID = "#1d2228", "#5d6772", "#edeff1"
SMALL = (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_s", "tokens per second"))


def draw(runs: Sequence[OpenRun]) -> bytes:
    """Loss over the steps, and below it learning rate, gradient norm and speed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RaygptError("a PNG needs the extra png: pip install 'raygpt[png]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.edgecolor": GRID, "text.color": INK, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 5.6), layout="constrained", facecolor="white")
        rows = figure.subplot_mosaic([["loss"] * 3, [key for key, _ in SMALL]], height_ratios=[2.1, 1])
        _losses(rows["loss"], runs)
        for key, label in SMALL:
            _metric(rows[key], runs, key, label)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=160)
    return png.getvalue()


def _losses(axes: Any, runs: Sequence[OpenRun]) -> None:
    is_one = len(runs) == 1
    for number, run in enumerate(runs):
        train, val = thinned(train_series(run)), val_series(run)
        own, other = _colour(number), _colour(1 if is_one else number)
        name = "training" if is_one else None
        axes.plot(*_pairs(train, "loss"), color=own, linewidth=1.2, alpha=1 if is_one else 0.45, label=name)
        label = "validation" if is_one else run.name
        axes.plot(*_pairs(val, "loss"), color=other, linewidth=1.6, marker="o", markersize=3.5, label=label)
        for step in restarts(run)["step"]:
            axes.axvline(step, color=SOFT, linewidth=0.8, linestyle=":")
    _shade(axes, runs)
    _dress(axes, runs[0].name if is_one else "loss", "step")
    axes.legend(frameon=False, labelcolor=INK)


def _shade(axes: Any, runs: Sequence[OpenRun]) -> None:
    """The band of the validation loss, where all runs are of one recipe that has a reference."""
    verdicts = [normal.judge(run) for run in runs]
    band = verdicts[0].val
    if band and len({verdict.recipe for verdict in verdicts}) == 1:
        label = f"expected of {verdicts[0].recipe}"
        axes.fill_between(band.steps, band.low, band.high, color="#8a94a0", alpha=0.2, linewidth=0, label=label)


def _metric(axes: Any, runs: Sequence[OpenRun], key: str, label: str) -> None:
    for number, run in enumerate(runs):
        axes.plot(*_pairs(thinned(train_series(run)), key), color=_colour(number), linewidth=1.2)
    axes.set_ylim(bottom=0)
    _dress(axes, label)


def _dress(axes: Any, title: str, below: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK)
    axes.set_xlabel(below, color=SOFT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _pairs(series: Series, key: str) -> tuple[list[float], list[float]]:
    known = [(x, y) for x, y in zip(series["step"], series[key], strict=True) if x is not None and y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
