"""A run's losses as a picture: an SVG that needs nothing to draw it and nothing to show it.

python -m raygpt.show.curve RUN OUT.svg
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from raygpt.runs import open_run
from raygpt.runs.metrics import Line

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 52, 16, 34, 40


def losses(lines: Sequence[Line]) -> tuple[Points, Points]:
    """(step, loss) of the training batches, and of the validations, out of what a run has logged.

    A loss that is no number, of a step that was left out, is none to draw.
    """
    train, val = (
        [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]
        for name in ("loss", "val_loss")
    )
    return train, val


def draw(title: str, train: Points, val: Points) -> str:
    """Both curves over the steps. Grey, blue and orange are seen on light and on dark pages."""
    last = max(step for step, _ in [*train, *val])
    ticks = _ticks(min(y for _, y in [*train, *val]), max(y for _, y in [*train, *val]))

    def place(step: float, loss: float) -> tuple[float, float]:
        share = (loss - ticks[0]) / (ticks[-1] - ticks[0])
        return LEFT + step / last * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    grid = [_tick_line(place(0, tick)[1], f"{tick:g}") for tick in ticks]
    steps = [
        _label(place(last * n / 4, 0)[0], HEIGHT - BOTTOM + 18, f"{last * n / 4:,.0f}", "middle") for n in range(5)
    ]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#e8590c"/>' for x, y in (place(*point) for point in val)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            f'font-size="12" fill="#868e96"><title>{title}</title>',
            _label(LEFT, 18, title, "start"),
            *grid,
            *steps,
            _label((WIDTH + LEFT) / 2, HEIGHT - 6, "step", "middle"),
            _line([place(*point) for point in train], "#4c8dff", 1.5),
            _line([place(*point) for point in val], "#e8590c", 2),
            *dots,
            _label(WIDTH - RIGHT, 18, "training loss (blue), validation loss (orange)", "end"),
            "</svg>\n",
        ]
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around what is to be shown, four to nine of them."""
    size = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(step for step in (size / 5, size / 2, size, 2 * size) if (high - low) / step <= 7)
    first, final = math.floor(low / step), math.ceil(high / step)
    return [round(step * n, 10) for n in range(first, max(final, first + 1) + 1)]


def _tick_line(y: float, text: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#868e96" stroke-opacity="0.25"/>'
    return line + _label(LEFT - 8, y + 4, text, "end")


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _line(points: Points, colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


if __name__ == "__main__":
    run, out = sys.argv[1:]
    Path(out).write_text(draw(Path(run).name, *losses(open_run(run).metrics)))
