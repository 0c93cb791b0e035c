"""One or several runs as a single HTML page that needs no network: curves, samples, recipes, what they ran on.

The words and tables are written here; `assets/page.js` draws the curves from the data that the page carries.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from raygpt import __version__
from raygpt.formatting import number_text, size, value_text
from raygpt.recipes.explain import flat
from raygpt.runs import OpenRun, status
from raygpt.show import curve, normal
from raygpt.show.series import compact, restarts, thinned, train_series, val_series

SAMPLES = 4  # that are shown open; the others unfold
COLOURS = 6


def page(runs: Sequence[OpenRun]) -> str:
    """The whole page."""
    details = [status.details(run) for run in runs]
    verdicts = [normal.judge(run) for run in runs]
    title = " · ".join(run.name for run in runs)
    body = [
        _header(runs, details, title),
        "<main>",
        *(_tiles(facts) for facts in details[:1] if len(runs) == 1),
        *(_runs_table(details) for _ in details[:1] if len(runs) > 1),
        _verdicts(runs, verdicts),
        _charts(runs),
        *(_differences(runs) if len(runs) > 1 else ()),
        *_samples(runs),
        *_checkpoints(details),
        *_recipes(runs),
        *_hardware(runs),
        "</main>",
        f"<footer>Made by raygpt {__version__}. This page is whole: it needs no network and no other file.</footer>",
        f'<script type="application/json" id="data">{_data(runs, verdicts)}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    return _document(title, "\n".join(body))


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)} – raygpt</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("raygpt") / "show" / "assets" / name).read_text("utf-8")


def _data(runs: Sequence[OpenRun], verdicts: Sequence[normal.Verdict]) -> str:
    """What the curves are drawn from. `<` is written so that no text of a run can end the script."""
    drawn = [
        {
            "name": run.name,
            "batch_tokens": run.recipe.training.batch_tokens,
            "train": compact(thinned(train_series(run))),
            "val": compact(thinned(val_series(run))),
            "restarts": compact(restarts(run)),
        }
        for run in runs
    ]
    return json.dumps({"runs": drawn, "band": _band(runs, verdicts)}, separators=(",", ":")).replace("<", "\\u003c")


def _band(runs: Sequence[OpenRun], verdicts: Sequence[normal.Verdict]) -> dict[str, Any] | None:
    """The validation loss's, where all runs are of one recipe with a reference."""
    names = {verdict.recipe for verdict in verdicts}
    measured = verdicts[0].val
    if len(names) > 1 or measured is None:
        return None
    rounded = [[round(loss, 4) for loss in side] for side in (measured.low, measured.high)]
    low, high = rounded
    batch = runs[0].recipe.training.batch_tokens
    return {"recipe": verdicts[0].recipe, "steps": measured.steps, "low": low, "high": high, "batch_tokens": batch}


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
        f"{facts['state'].capitalize()}{why}. GPT-2 of {facts['parameters']:,} parameters, {model.layers} layers of "
        f"width {model.width}, context {model.context}, on {sources} ({run.recipe.data.tokenizer}), "
        f"engine {facts['engine']}."
    )


def _tiles(facts: Mapping[str, Any]) -> str:
    of = f"of {facts['steps']:,} steps" if facts["steps"] else "steps"
    best = next((found["val_loss"] for found in facts["checkpoints"] if found["step"] == facts["best"]), None)
    tiles = [
        (of, f"{facts['step']:,}"),
        ("training loss", number_text(facts["loss"], ".4f")),
        ("validation loss", number_text(facts["val_loss"], ".4f")),
        ("best checkpoint's", number_text(best, ".4f")),
        ("tokens", f"{facts['tokens']:,}"),
        ("tokens per second", number_text(facts["tokens_per_s"], ",.0f")),
        *([("MFU", f"{facts['mfu']:.1%}")] if facts["mfu"] else []),
        ("restarts", f"{len(facts['restarts'])}"),
    ]
    inner = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in tiles)
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
    return f'<div style="margin-top:1.5rem">{_table(head, rows, numbers=range(3, 8))}</div>'


def _verdicts(runs: Sequence[OpenRun], verdicts: Sequence[normal.Verdict]) -> str:
    """One answer, or one for each run; the card has the colour of the worst."""
    kinds = [verdict.kind for verdict in verdicts]
    worst = next(kind for kind in ("high", "low", "unknown", "normal") if kind in kinds)
    if len(runs) == 1:
        return f'<div class="verdict card {worst}"><b>Is this loss normal?</b> {escape(verdicts[0].sentence)}</div>'
    lines = "".join(
        f"<p>{_dot(number)}<b>{escape(run.name)}</b> {escape(verdict.sentence)}</p>"
        for number, (run, verdict) in enumerate(zip(runs, verdicts, strict=True))
    )
    return f'<div class="verdict card {worst}"><b>Are these losses normal?</b>{lines}</div>'


def _charts(runs: Sequence[OpenRun]) -> str:
    switch = "".join(
        f'<input type="radio" name="x" id="x-{key}" value="{key}"{" checked" if key == "step" else ""}>'
        f'<label for="x-{key}">{label}</label>'
        for key, label in (("step", "Steps"), ("tokens", "Tokens"), ("time", "Time"))
    )
    still = "".join(_still(run) for run in runs)
    return (
        '<div class="bar"><h2>Curves</h2>'
        f'<div class="switch" role="radiogroup" aria-label="x axis">{switch}</div></div>'
        f'<div class="legend"></div><div class="charts"></div><noscript>{still}</noscript>'
    )


def _still(run: OpenRun) -> str:
    """The losses for a reader whose browser runs no scripts."""
    series = (thinned(train_series(run)), thinned(val_series(run)))
    train, val = (
        [(x, y) for x, y in zip(s["step"], s["loss"], strict=True) if x is not None and y is not None] for s in series
    )
    return curve.draw(escape(run.name), train, val) if train else ""


def _differences(runs: Sequence[OpenRun]) -> Iterator[str]:
    recipes = [flat(run.recipe.to_dict()) for run in runs]
    keys = [key for key in recipes[0] if not key.startswith(("run.name", "run.storage"))]
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<code>{escape(value_text(recipe.get(key)))}</code>" for recipe in recipes)]
        for key in keys
        if len({value_text(recipe.get(key)) for recipe in recipes}) > 1
    ]
    yield "<h2>Where the recipes differ</h2>"
    names = [f"{_dot(number)}{escape(run.name)}" for number, run in enumerate(runs)]
    yield _table(("key", *names), rows) if rows else "<p>In nothing but their names.</p>"


def _samples(runs: Sequence[OpenRun]) -> Iterator[str]:
    if not any(run.samples for run in runs):
        return
    yield "<h2>What it wrote, as it learned</h2>"
    for prompt in dict.fromkeys(sample.get("prompt") for run in runs for sample in run.samples):
        if prompt is not None:
            yield f'<h3>From <q class="prompt">{escape(prompt)}</q></h3>'
        for number, run in enumerate(runs):
            mark = "" if len(runs) == 1 else f"{_dot(number)}{escape(run.name)}, "
            yield from _samples_from(run, prompt, SAMPLES if len(runs) == 1 else 2, mark)


def _samples_from(run: OpenRun, prompt: str | None, count: int, mark: str) -> Iterator[str]:
    """What a run wrote from a prompt, the first beside the last and some between; the others unfold."""
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
    loss = run.scores.get(sample["step"])
    scored = f' <span class="soft">validation loss {loss:.3f}</span>' if loss is not None else ""
    prompt = sample.get("prompt", "")
    begun = f"<b>{escape(prompt)}</b>" if prompt else ""
    text = f"{begun}{escape(sample['text'].removeprefix(prompt))}".strip("\n")
    return f'<div class="sample card"><h3>{mark}step {sample["step"]:,}{scored}</h3><pre>{text}</pre></div>'


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly: the first and the last are among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


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
        yield _table(("run", "step", "validation loss", "size", ""), rows, numbers=range(1, 4))


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
    yield _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; a row's first names it."""
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
    return f'<i class="dot" style="background:var(--c{number % COLOURS})"></i>'
