"""One or several runs as a single HTML page that needs no network: curves, samples, recipes, what they ran on.

`chart.py` draws every view of every chart; `assets/page.js` chooses the visible ones, and shows values at the pointer.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from raygpt import __version__
from raygpt.formatting import number_text, size, value_text
from raygpt.recipes.explain import flat
from raygpt.runs import OpenRun, status
from raygpt.show import chart, planning
from raygpt.show.curves import LOSSES, loss_curves, metric_curves, restart_marks

SAMPLES = 4  # shown open; the others are collapsed
# metric, title, factor; a chart that no run has values for is left out
METRICS = (
    ("lr", "Learning rate", 1),
    ("grad_norm", "Gradient norm", 1),
    ("tokens_per_s", "Tokens per second", 1),
    ("mfu", "MFU, %", 100),
    ("data_wait_s", "Waiting for data, seconds per log line", 1),
)


def page(runs: Sequence[OpenRun]) -> str:
    """The whole page."""
    details = [status.details(run) for run in runs]
    title = " · ".join(run.name for run in runs)
    body = [
        _header(runs, details, title),
        "<main>",
        *(_tiles(facts) for facts in details[:1] if len(runs) == 1),
        *(_runs_table(details) for _ in details[:1] if len(runs) > 1),
        *_charts(runs),
        *(_differences(runs) if len(runs) > 1 else ()),
        *_samples(runs),
        *_plans(details),
        *_checkpoints(details),
        *_recipes(runs),
        *_hardware(runs),
        "</main>",
    ]
    return document(title, body, f"<script>{_asset('page.js')}</script>")


def document(title: str, body: Iterable[str], script: str = "") -> str:
    """A whole page: a header, and from <main> to </main> what it shows."""
    footer = f"<footer>Made by raygpt {__version__}. This page needs no network and no other file.</footer>"
    inner = "\n".join([*body, footer, *filter(None, [script])])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)} – raygpt</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_colours()}{_asset('page.css')}{chart.style()}</style>\n</head>\n<body>\n{inner}\n</body>\n</html>\n"
    )


def _colours() -> str:
    """Those of all pages."""
    return (resources.files("raygpt") / "assets" / "colours.css").read_text("utf-8")


def _asset(name: str) -> str:
    return (resources.files("raygpt") / "show" / "assets" / name).read_text("utf-8")


# The parts, from the top down


def _header(runs: Sequence[OpenRun], details: Sequence[Mapping[str, Any]], title: str) -> str:
    line = _about_one(runs[0], details[0]) if len(runs) == 1 else f"{len(runs)} runs compared"
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="soft">{escape(line)}</p></div>'
        '<button id="theme" type="button" title="light or dark">Dark</button></header>'
    )


def _about_one(run: OpenRun, facts: Mapping[str, Any]) -> str:
    model = run.recipe.model
    sources = ", ".join(part.source.rsplit("/", 1)[-1] for part in run.recipe.data.sources)
    why = f": {facts['why']}" if facts["why"] else ""
    return (
        f"{facts['state'].capitalize()}{why}. {facts['parameters']:,} parameters, {model.layers} layers of "
        f"width {model.width}, context {model.context}, on {sources} ({run.recipe.data.tokenizer}), "
        f"engine {facts['engine']}."
    )


def _tiles(facts: Mapping[str, Any]) -> str:
    of = f"of {facts['steps']:,} steps" if facts["steps"] else "steps"
    best = next((found["val_loss"] for found in facts["checkpoints"] if found["step"] == facts["best"]), None)
    shown = [
        (of, f"{facts['step']:,}"),
        ("training loss", number_text(facts["loss"], ".4f")),
        ("validation loss", number_text(facts["val_loss"], ".4f")),
        ("best checkpoint's", number_text(best, ".4f")),
        ("tokens", f"{facts['tokens']:,}"),
        ("tokens per second", number_text(facts["tokens_per_s"], ",.0f")),
        *([("MFU", f"{facts['mfu']:.1%}")] if facts["mfu"] else []),
        ("restarts", f"{len(facts['restarts'])}"),
    ]
    return tiles(shown)


def tiles(shown: Iterable[tuple[str, str]]) -> str:
    """Figures, each with its label."""
    inner = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in shown)
    return f'<div class="tiles card">{inner}</div>'


def _runs_table(details: Sequence[Mapping[str, Any]]) -> str:
    head = ("run", "state", "engine", "step", "training loss", "validation loss", "tokens per second", "restarts")
    rows = []
    for number, facts in enumerate(details):
        steps = f"{facts['step']:,}" + (f" / {facts['steps']:,}" if facts["steps"] else "")
        rows.append(
            [
                f"{_dot(number)}{escape(facts['name'])}",
                escape(facts["state"]),
                facts["engine"],
                steps,
                number_text(facts["loss"], ".4f"),
                number_text(facts["val_loss"], ".4f"),
                number_text(facts["tokens_per_s"], ",.0f"),
                f"{len(facts['restarts'])}",
            ]
        )
    return f'<div style="margin-top:1.5rem">{table(head, rows, numbers=range(3, 8))}</div>'


def _charts(runs: Sequence[OpenRun]) -> Iterator[str]:
    """A card for each metric that was logged, with its chart in every view; the first view is visible."""
    losses = {axis: curves for axis in chart.AXES if (curves := loss_curves(runs, axis))}
    if not losses:
        return
    switch = f'<div class="switch" role="radiogroup" aria-label="x axis">{_axes(list(losses))}</div>'
    yield f'<div class="bar"><h2>Curves</h2>{switch}</div>'
    marks = {axis: restart_marks(runs, axis) for axis in losses}
    yield _legend(runs, has_restarts=bool(marks["step"]))
    options = "".join(
        f'<label><input type="checkbox" id="{name}">{label}</label>'
        for name, label in (("late", "without the first tenth"), ("log", "log scale"))
    )
    plots = [
        _plot("Loss", axis, curves, marks[axis], is_log=is_log, is_late=is_late)
        for axis, curves in losses.items()
        for is_log in (False, True)
        for is_late in (False, True)
    ]
    yield f'<div class="charts">{_card("loss", f"Loss<span>{options}</span>", plots, "wide")}'
    for metric, title, factor in METRICS:
        drawn = [(axis, metric_curves(runs, metric, axis, factor)) for axis in losses]
        if plots := [_plot(title, axis, curves, marks[axis], from_zero=True) for axis, curves in drawn if curves]:
            yield _card(metric, title, plots)
    yield "</div>"


def _plot(
    title: str,
    axis: str,
    curves: Sequence[chart.Curve],
    marks: Sequence[chart.Mark],
    is_log: bool = False,
    is_late: bool = False,
    from_zero: bool = False,
) -> str:
    view = axis + (" log" if is_log else "") + (" late" if is_late else "")
    attributes = f' data-view="{view}"' + ("" if view == "step" else " hidden")
    frame = chart.frame_of(curves, is_log, is_late, from_zero)
    return chart.plot(title, axis, frame, curves, marks, attributes)


def _card(metric: str, title: str, plots: Sequence[str], kind: str = "") -> str:
    body = "\n".join(plots)
    return f'<div class="chart card {kind}" data-key="{metric}"><h3>{title}</h3>\n{body}\n</div>'


def _axes(known: Sequence[str]) -> str:
    return "".join(
        f'<input type="radio" name="x" id="x-{axis}" value="{axis}"{" checked" if axis == "step" else ""}'
        f'{"" if axis in known else " disabled"}><label for="x-{axis}">{label}</label>'
        for axis, label in (("step", "Steps"), ("tokens", "Tokens"), ("time", "Time"))
    )


def _legend(runs: Sequence[OpenRun], has_restarts: bool) -> str:
    """The colours of the curves; clicking a run's name hides its curves."""
    if len(runs) == 1:
        entries = [f"<span>{_dot(number)}{name}</span>" for number, name in enumerate(LOSSES)]
    else:
        entries = [
            f'<button type="button" title="show or hide" aria-pressed="true" data-run="{number}">'
            f"{_dot(number)}{escape(run.name)}</button>"
            for number, run in enumerate(runs)
        ]
        entries.append('<span class="soft">faint: training, with points: validation</span>')
    if has_restarts:
        entries.append('<span class="soft">▾ restarted</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def _differences(runs: Sequence[OpenRun]) -> Iterator[str]:
    recipes = [flat(run.recipe.to_dict()) for run in runs]
    keys = [key for key in dict.fromkeys(itertools.chain(*recipes)) if not key.startswith(("run.name", "run.storage"))]
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<code>{escape(value_text(recipe.get(key)))}</code>" for recipe in recipes)]
        for key in keys
        if len({value_text(recipe.get(key)) for recipe in recipes}) > 1
    ]
    yield "<h2>Where the recipes differ</h2>"
    names = [f"{_dot(number)}{escape(run.name)}" for number, run in enumerate(runs)]
    yield table(("key", *names), rows) if rows else "<p>In nothing but their names.</p>"


def _samples(runs: Sequence[OpenRun]) -> Iterator[str]:
    if not any(run.samples for run in runs):
        return
    yield "<h2>Samples during training</h2>"
    for prompt in dict.fromkeys(sample.get("prompt") for run in runs for sample in run.samples):
        if prompt is not None:
            yield f'<h3>From <q class="prompt">{escape(prompt)}</q></h3>'
        for number, run in enumerate(runs):
            mark = "" if len(runs) == 1 else f"{_dot(number)}{escape(run.name)}, "
            yield from _samples_from(run, prompt, SAMPLES if len(runs) == 1 else 2, mark)


def _samples_from(run: OpenRun, prompt: str | None, count: int, mark: str) -> Iterator[str]:
    """The samples of a run from a prompt: the first, the last and some between; the others are collapsed."""
    samples = [sample for sample in run.samples if sample.get("prompt") == prompt]
    shown = spread(samples, count)
    others = [sample for sample in samples if sample not in shown]
    if shown:
        yield f'<div class="samples">{"".join(_sample(run, sample, mark) for sample in shown)}</div>'
    if others:
        cards = "".join(_sample(run, sample, mark) for sample in others)
        more = f"{len(others)} more of {escape(run.name)}"
        yield f'<details class="card"><summary>{more}</summary><div class="samples">{cards}</div></details>'


def _sample(run: OpenRun, sample: Mapping[str, Any], mark: str) -> str:
    loss = run.val_losses.get(sample["step"])
    scored = f' <span class="soft">validation loss {loss:.3f}</span>' if loss is not None else ""
    prompt = sample.get("prompt", "")
    begun = f"<b>{escape(prompt)}</b>" if prompt else ""
    text = f"{begun}{escape(sample['text'].removeprefix(prompt))}".strip("\n")
    return f'<div class="sample card"><h3>{mark}step {sample["step"]:,}{scored}</h3><pre>{text}</pre></div>'


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


def _plans(details: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was planned of each run on its devices, by kind, and how the run compared."""
    planned = [facts for facts in details if facts["plan"]]
    if planned:
        yield "<h2>Plan and run</h2>"
    for facts in planned:
        name = "" if len(details) == 1 else f"{escape(facts['name'])}: "
        yield f"<p>{name}{escape(facts['compared'])}</p>"
        for title, bars in planning.bars(facts["plan"]):
            yield f'<div class="plan card"><h3>{title}</h3>{chart.bar_rows(bars)}</div>'


def _checkpoints(details: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        [
            escape(facts["name"]),
            f"{found['step']:,}",
            number_text(found["val_loss"], ".4f"),
            size(found["bytes"]),
            "best" if found["step"] == facts["best"] else "",
        ]
        for facts in details
        for found in facts["checkpoints"]
    ]
    if rows:
        yield "<h2>Checkpoints</h2>"
        yield table(("run", "step", "validation loss", "size", ""), rows, numbers=range(1, 4))


def _recipes(runs: Sequence[OpenRun]) -> Iterator[str]:
    yield "<h2>Recipe</h2>" if len(runs) == 1 else "<h2>Recipes</h2>"
    for run in runs:
        text = escape(run.recipe.to_yaml())
        yield f'<details class="card"><summary>{escape(run.name)}, as resolved</summary><pre>{text}</pre></details>'


def _hardware(runs: Sequence[OpenRun]) -> Iterator[str]:
    abouts = [
        {**run.about, **{f"{name} version": v for name, v in run.about.get("versions", {}).items()}} for run in runs
    ]
    keys = [key for key in dict.fromkeys(key for about in abouts for key in about) if key != "versions"]
    if not keys:
        return
    yield "<h2>Hardware and versions</h2>"
    head = () if len(runs) == 1 else ("", *(f"{_dot(number)}{escape(run.name)}" for number, run in enumerate(runs)))
    rows = [[key.removesuffix(" version"), *(escape(str(about.get(key, "–"))) for about in abouts)] for key in keys]
    yield table(head, rows)


def table(head: Iterable[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; cells are HTML, and the first of a row is its header."""
    heads = "".join(f"<th{_right(n, numbers)}>{cell}</th>" for n, cell in enumerate(head))
    lines = [
        "<tr>" + f"<th>{row[0]}</th>" + "".join(_cell(n, cell, numbers) for n, cell in enumerate(row[1:], 1)) + "</tr>"
        for row in rows
    ]
    top = f"<thead><tr>{heads}</tr></thead>" if heads else ""
    return f'<div class="card scroll"><table>{top}<tbody>{"".join(lines)}</tbody></table></div>'


def _cell(column: int, content: str, numbers: Sequence[int]) -> str:
    return f'<td class="number">{content}</td>' if column in numbers else f"<td>{content}</td>"


def _right(column: int, numbers: Sequence[int]) -> str:
    return ' style="text-align:right"' if column in numbers else ""


def _dot(number: int) -> str:
    return f'<i class="dot" style="background:var(--c{number % chart.COLOURS})"></i>'
