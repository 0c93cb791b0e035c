"""Charts as SVG. All charts are drawn here: those of the report page, of a README and of a model card.

Curves are paths in data coordinates, e.g. (step, loss). The viewBox of an inner <svg> stretches them over the plot, and
labels are placed by percent. So a chart fits any width without being drawn again, and the page's script reads the
values under the pointer from the paths.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

AXES = ("step", "tokens", "time")
COLOURS = 6
DASHES = ("", "6 3", "2 3")  # of runs 1 to 6, 7 to 12, 13 to 18, which share the colours
DOTS = 60  # a curve with more points than this has no dots
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 52, 24, 34, 40  # of a picture and its margins, in pixels
BAR_HEIGHT = 24  # with the gap below it
# A picture does not know the colour of the page around it: these are visible on light and on dark pages.
PICTURE_COLOURS = ("#4c8dff", "#e8590c", "#12b886", "#cc5de8", "#c99700", "#868e96")

Point = tuple[float, float | None]  # without a value the curve has a gap
Tick = tuple[float, str]


@dataclass(frozen=True)
class Curve:
    """A curve of run number `run`."""

    name: str
    points: Sequence[Point]
    run: int = 0
    colour: int = 0
    is_faint: bool = False
    has_dots: bool = False

    @property
    def has_values(self) -> bool:
        return any(y is not None for _, y in self.points)


@dataclass(frozen=True)
class Mark:
    """A vertical line at x."""

    x: float
    title: str
    run: int = 0


@dataclass(frozen=True)
class Frame:
    """What the axes span. On a log scale, `low` and `high` are logarithms."""

    left: float
    right: float
    low: float
    high: float
    is_log: bool = False

    @property
    def units(self) -> tuple[float, float]:
        """Powers of ten in which both axes are a few hundred long: where one has 200 steps and the other 0.02, browsers
        draw some curves with the wrong width, or not at all."""
        return _unit(self.right - self.left), _unit(self.high - self.low)

    def height(self, point: Point) -> float | None:
        """A point's value, or the logarithm of it; None where there is nothing to draw."""
        return _height(point, self.left, self.is_log)

    def x(self, x: float) -> str:
        return f"{100 * (x - self.left) / (self.right - self.left):.2f}%"

    def y(self, height: float) -> str:
        return f"{100 * (self.high - height) / (self.high - self.low):.2f}%"


def _unit(length: float) -> float:
    return float(f"1e{math.floor(math.log10(length)) - 2}")


def _height(point: Point, left: float, is_log: bool) -> float | None:
    x, y = point
    if y is None or x < left or (is_log and y <= 0):
        return None
    return math.log10(y) if is_log else y


def frame_of(curves: Sequence[Curve], is_log: bool = False, is_late: bool = False, from_zero: bool = False) -> Frame:
    """Axes that hold all curves, or with `is_late` all but the first tenth of the x axis."""
    points = [point for curve in curves for point in curve.points]
    right = max(*(x for x, _ in points), 1e-9)
    left = right / 10 if is_late else 0.0
    heights = [height for point in points if (height := _height(point, left, is_log)) is not None]
    low, high = min(heights, default=1.0), max(heights, default=1.0)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    room = 0.04 * (high - low)
    return Frame(left, right, low if from_zero and low == 0 else low - room, high + room, is_log)


def plot(
    title: str,
    axis: str,
    frame: Frame,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    attributes: str = "",
    ticks: Sequence[Tick] | None = None,
) -> str:
    """An <svg> of grid, curves and marks, of any size; the labels lie around it. `ticks` are those of an x axis that is
    neither steps, tokens nor time."""
    inside = [mark for mark in marks if frame.left <= mark.x <= frame.right]
    return "\n".join(
        [
            f'<svg class="plot" overflow="visible" role="img" aria-label="{escape(title)} by {axis}"{attributes}>',
            *_grid(frame, x_ticks(frame, axis) if ticks is None else ticks),
            *_curves(frame, curves),
            *(_dots(curve, frame) for curve in curves if _is_dotted(curve, frame)),
            *(_mark(mark, frame) for mark in inside),
            "</svg>",
        ]
    )


def picture(
    title: str, legend: Sequence[str], curves: Sequence[Curve], marks: Sequence[Mark] = (), axis: str = "step"
) -> str:
    """An SVG file that needs nothing else: curves over one of AXES, a title, and what each colour stands for."""
    colours = "".join(f"--c{n}:{colour};" for n, colour in enumerate(PICTURE_COLOURS))
    size = f' x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    names = "\N{EM SPACE}".join(
        f'<tspan style="fill:var(--c{n % COLOURS})">{escape(name)}</tspan>' for n, name in enumerate(legend)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>svg {{ {colours} --soft:#868e96; --line:#868e96; --grid:#868e9640; }}\n{style()}</style>\n"
        f'<text x="{LEFT}" y="18">{escape(title)}</text>\n'
        f'<text x="{WIDTH - RIGHT}" y="18" text-anchor="end">{names}</text>\n'
        f"{plot(title, axis, frame_of(curves), curves, marks, size)}\n"
        f'<text x="{(WIDTH + LEFT - RIGHT) / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">{axis}</text>\n</svg>\n'
    )


@dataclass(frozen=True)
class Bar:
    """A value by name, and as text."""

    name: str
    value: float
    text: str


def bar_rows(bars: Sequence[Bar], colours: int = COLOURS) -> str:
    """An <svg> with a bar for each value, the longest over most of the width; in so many colours in turn."""
    most = max(bar.value for bar in bars)
    lines = [
        f'<text x="0" y="{BAR_HEIGHT * n + 15}">{escape(bar.name)}</text>'
        f'<rect x="18%" y="{BAR_HEIGHT * n + 3}" width="{60 * bar.value / most:.2f}%" height="{BAR_HEIGHT - 8}" rx="2" '
        f'style="fill:var(--c{n % colours})"/>'
        f'<text x="{19 + 60 * bar.value / most:.2f}%" y="{BAR_HEIGHT * n + 15}">{escape(bar.text)}</text>'
        for n, bar in enumerate(bars)
    ]
    return f'<svg class="bars" width="100%" height="{BAR_HEIGHT * len(bars)}">{"".join(lines)}</svg>'


def bar_picture(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """An SVG file that needs nothing else: groups of bars below each other, each with its title."""
    colours = "".join(f"--c{n}:{colour};" for n, colour in enumerate(PICTURE_COLOURS))
    body, top = [f'<text x="{LEFT}" y="18">{escape(title)}</text>'], TOP
    for name, bars in groups:
        body.append(f'<text x="{LEFT}" y="{top + 16}" font-weight="bold">{escape(name)}</text>')
        body.append(f'<svg x="{LEFT}" y="{top + 26}" width="{WIDTH - LEFT - RIGHT}">{bar_rows(bars)}</svg>')
        top += 44 + BAR_HEIGHT * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" '
        f'font-size="13">\n<title>{escape(title)}</title>\n'
        f"<style>svg {{ {colours} }} text {{ fill:#868e96 }}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def parallel(title: str, axes: Sequence[tuple[str, Sequence[Tick]]], curves: Sequence[Curve]) -> str:
    """An <svg> with a vertical axis for each key, one beside the other, and a line through all of them for each trial.
    Heights are from 0 to 1 on every axis."""
    frame = Frame(0, len(axes) - 1, 0, 1)
    lines, labels = [], []
    for n, (name, ticks) in enumerate(axes):
        x, side = frame.x(n), 'dx="-6" text-anchor="end"' if n == len(axes) - 1 else 'dx="6"'
        lines.append(f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="100%"/>')
        lines.append(f'<text x="{x}" y="100%" dy="17" text-anchor="middle">{escape(name)}</text>')
        labels += [f'<text x="{x}" y="{frame.y(at)}" dy="-4" {side}>{escape(label)}</text>' for at, label in ticks]
    return "\n".join(
        [
            f'<svg class="plot" overflow="visible" role="img" aria-label="{escape(title)}">',
            *lines,
            *_curves(frame, curves),
            *labels,
            "</svg>",
        ]
    )


def style() -> str:
    """The CSS of a chart, which takes its colours from the variables of the page around it."""
    return (resources.files("raygpt") / "show" / "assets" / "chart.css").read_text("utf-8")


# The parts of a plot


def _grid(frame: Frame, ticks: Sequence[Tick]) -> Iterator[str]:
    for height, label in y_ticks(frame):
        y = frame.y(height)
        yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="-8" y="{y}" dy="4" text-anchor="end">{label}</text>'
    yield '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'
    for tick, label in ticks:
        yield f'<text x="{frame.x(tick)}" y="100%" dy="17" text-anchor="middle">{escape(label)}</text>'


def _curves(frame: Frame, curves: Sequence[Curve]) -> Iterator[str]:
    wide, tall = frame.units
    box = f"{frame.left / wide:g} {-frame.high / tall:g} {(frame.right - frame.left) / wide:g} "
    box += f"{(frame.high - frame.low) / tall:g}"
    yield f'<svg class="curves" viewBox="{box}" data-units="{wide:g} {tall:g}" preserveAspectRatio="none" '
    yield 'width="100%" height="100%" overflow="visible"><g transform="scale(1,-1)">'
    yield from (_path(curve, frame) for curve in curves)
    yield "</g></svg>"


def _path(curve: Curve, frame: Frame) -> str:
    drawn, is_gap, (wide, tall) = [], True, frame.units
    for point in curve.points:
        height = frame.height(point)
        if height is not None:
            drawn.append(f"{'M' if is_gap else 'L'}{_compact(point[0] / wide)},{height / tall:.6g}")
        is_gap = height is None
    # A browser paints nothing for a single point, and may leave out the curves around it: it is a dot instead.
    kind = "curve single" if len(drawn) == 1 else "curve faint" if curve.is_faint else "curve"
    dash = DASHES[curve.run // COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    about = f'class="{kind}" data-run="{curve.run}" data-name="{escape(curve.name)}" {_colour(curve)}{dashed}'
    return f'<path {about} d="{"".join(drawn)}"/>'


def _is_dotted(curve: Curve, frame: Frame) -> bool:
    is_single = sum(frame.height(point) is not None for point in curve.points) == 1
    return is_single or (curve.has_dots and len(curve.points) <= DOTS)


def _dots(curve: Curve, frame: Frame) -> str:
    dots = [
        f'<circle cx="{frame.x(point[0])}" cy="{frame.y(height)}" r="3.2"/>'
        for point in curve.points
        if (height := frame.height(point)) is not None
    ]
    return f'<g class="dots" data-run="{curve.run}" {_colour(curve)}>{"".join(dots)}</g>'


def _mark(mark: Mark, frame: Frame) -> str:
    x = frame.x(mark.x)
    return (
        f'<g class="restart" data-run="{mark.run}"><title>{escape(mark.title)}</title>'
        f'<line x1="{x}" x2="{x}" y1="0" y2="100%"/><text x="{x}" y="0" dy="-1" text-anchor="middle">▾</text></g>'
    )


def _colour(curve: Curve) -> str:
    return f'style="--colour:var(--c{curve.colour % COLOURS})"'


# Ticks and their labels


def y_ticks(frame: Frame) -> list[Tick]:
    """Round numbers on the y axis: heights and labels."""
    if not frame.is_log:
        return [(tick, short(tick)) for tick in ticks(frame.low, frame.high, 5)]
    low, high = 10**frame.low, 10**frame.high
    decades = range(math.floor(frame.low), math.ceil(frame.high) + 1)
    found = [tick for decade in decades for n in (1, 2, 3, 5) if low <= (tick := n * 10.0**decade) <= high]
    return [(math.log10(tick), short(tick)) for tick in (found if len(found) > 2 else ticks(low, high, 5))]


def x_ticks(frame: Frame, axis: str) -> list[Tick]:
    """Round numbers on the x axis and their labels; a time is in the unit that suits its length."""
    if axis == "step":
        return [(tick, f"{tick:,.0f}") for tick in ticks(frame.left, frame.right, 4) if tick == round(tick)]
    if axis == "tokens":
        return [(tick, short(tick)) for tick in ticks(frame.left, frame.right, 4)]
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next((unit, length) for unit, length in units if frame.right >= 2 * length or length == 1)
    return [(tick * length, f"{tick:g} {unit}") for tick in ticks(frame.left / length, frame.right / length, 4)]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between low and high, at most 1.4 × `about` of them and one more."""
    rough = 0.7 * (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    gap = next(n * size for n in (1, 2, 5, 10) if n * size >= rough)
    return [float(f"{n * gap:.10g}") for n in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def short(value: float) -> str:
    """Four digits: 819.2 k, 1.5 G, 3.25, 0.0005."""
    for unit, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def _compact(x: float) -> str:
    """A step to the last digit; tokens and times to six digits at least."""
    return f"{x:.0f}" if x == round(x) and abs(x) < 1e8 else f"{x:.7g}"
