"""Console output of the verbs that print a result: export, import, eval, runs, show, report, recipes, doctor, bench."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from raygpt.config import Recipe
from raygpt.formatting import ago, network_address, number_text, size, value_text
from raygpt.models import describe
from raygpt.recipes.explain import flat
from raygpt.show.console import as_path, command, err, out, printable, relative_path, table_of

if TYPE_CHECKING:
    from raygpt.doctor import Finding
    from raygpt.evaluation.tasks import Figures
    from raygpt.inference.loaded import CheckpointWeights, LoadedModel
    from raygpt.jobs import Job
    from raygpt.recipes.explain import Key
    from raygpt.runs import OpenRun

MARKS = {"ok": "[green]✓[/]", "optional": "[yellow]○[/]", "problem": "[red]✗[/]"}
# Columns of `raygpt runs` that are left out, from the last on, if the terminal is too narrow for all
LESS_IMPORTANT = ("model", "tokens/s", "engine")
STATES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red", "unreadable": "red"}

# To train finished weights further: the default rate, 1e-3 without a warm-up, is for new ones.
LOW_RATE = ("optimizer.learning_rate=3e-5", "schedule.warmup_steps=20", "training.steps=200")


def show_exported(found: "CheckpointWeights", folder: str, files: Mapping[str, int]) -> None:
    """The files, and how to open them."""
    _show_checkpoint(found)
    table = Table.grid(padding=(0, 2))
    for name, count in sorted(files.items()):
        table.add_row(f"  {escape(name)}", size(count))
    out.print(table)
    out.print("\nOpen it with transformers:", soft_wrap=True)
    out.print(f"  AutoModelForCausalLM.from_pretrained({folder!r})", markup=False, soft_wrap=True)


def _show_checkpoint(found: "CheckpointWeights") -> None:
    out.print(
        f"checkpoint of step {found.checkpoint.step} of {escape(relative_path(found.run.folder))}", soft_wrap=True
    )


def show_serving(models: Sequence[str], address: tuple[str, int], has_key: bool) -> None:
    """The models' names, and the addresses of the page and of the API."""
    host, port = address
    name = "localhost" if host in ("127.0.0.1", "::1", "0.0.0.0", "::") else host
    url = escape(f"http://{network_address(name, port)}")
    out.print(f"[bold]{escape(', '.join(models))}[/] at {url}", soft_wrap=True)
    key = "its own key" if has_key else "any key"
    out.print(f"  write in it   {url}/", soft_wrap=True)
    out.print(f"  OpenAI's API  {url}/v1  ({key})", soft_wrap=True)
    out.print("  Ctrl-C ends it")


def show_imported(run: "OpenRun") -> None:
    """What it is, and how to train it further."""
    model, vocab = run.recipe.model, run.tokenizer.vocab
    folder = relative_path(run.folder)
    out.print(
        f"{describe(model, vocab).count:,} parameters: {model.layers} layers, {model.heads} heads, "
        f"width {model.width}, context {model.context}, {vocab:,} tokens in the vocabulary",
        soft_wrap=True,
    )
    out.print(f"run directory  {escape(folder)}\n\nTry next:", soft_wrap=True)
    batch = max(1, 4096 // model.context) * model.context
    where = as_path(folder)
    out.print(f"  {command('generate', folder, '--prompt', 'Once')}", soft_wrap=True)
    words = ("run.name=further", f"run.start_from={where}", "data.source=YOUR.txt", f"training.batch_tokens={batch}")
    out.print(f"  {command('train', f'{where}/recipe.yaml', *words, *LOW_RATE)}", soft_wrap=True)


@contextlib.contextmanager
def evaluating() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each task; nothing without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield watch


def show_scores(loaded: "LoadedModel", results: Mapping[str, "Figures"]) -> None:
    """A line for each score, with its standard error."""
    _show_checkpoint(loaded)
    table = Table("task", "score", "value", "± standard error", "over", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for task, result in results.items():
        over = f"{result['items']:,} items" if "items" in result else f"{result['tokens']:,} tokens"
        for name in (name for name in result if f"{name}_stderr" in result or name in ("perplexity", "bits_per_byte")):
            error = result.get(f"{name}_stderr")
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, name.replace("_", " "), f"{result[name]:.4f}", shown, over)
    out.print(table)


def show_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """A line for each run, and below the table why a run was stopped or has failed."""
    table, without = _table_of_runs(runs), list(LESS_IMPORTANT)
    # As wide as necessary: a truncated name could not be copied.
    wide = Console(file=out.file, width=max(out.width, 200), highlight=False, force_terminal=out.is_terminal)
    while out.is_terminal and without and wide.measure(table).maximum > out.width:
        without.pop()
        table = _table_of_runs(runs, LESS_IMPORTANT[len(without) :])
    wide.print(table)
    for run in runs:
        if run["why"]:
            state = "stopped " if run["state"] == "stopped" else ""
            out.print(f"{escape(run['name'])}: {state}{escape(printable(run['why']))}", soft_wrap=True)


def _table_of_runs(runs: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> Table:
    columns = {
        "name": [escape(run["name"]) for run in runs],
        "engine": [run["engine"] or "–" for run in runs],
        "model": [run["model"] or "–" for run in runs],
        "step": [_steps(run) for run in runs],
        "loss": [number_text(run["loss"], ".4f") for run in runs],
        "val loss": [number_text(run["val_loss"], ".4f") for run in runs],
        "tokens/s": [number_text(run["tokens_per_s"], ",.0f") for run in runs],
        "state": [_state(run) for run in runs],
        "last seen": [ago(run["last_seen"]) for run in runs],
    }
    kept = {name: column for name, column in columns.items() if name not in without}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in kept:
        is_number = name in ("step", "loss", "val loss", "tokens/s")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in zip(*kept.values(), strict=True):
        table.add_row(*row)
    return table


def show_run(facts: Mapping[str, Any]) -> None:
    """Everything about a run: progress, checkpoints, the recipe, and a sample of what it writes."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in _lines(facts):
        table.add_row(label, value)
    out.print(table)
    if facts["checkpoints"]:
        out.print()
        out.print(_checkpoints(facts))
    if facts["sample"]:
        out.print(f"\n[bold]a sample of step {facts['sample']['step']}[/]")
        out.print(escape(printable(facts["sample"]["text"])), soft_wrap=True)
    out.print("\n[bold]recipe[/][dim], where it differs from the defaults; recipe.yaml has all of it[/]")
    out.print(table_of([(key, value_text(value)) for key, value in _chosen(facts["recipe"]).items()]))


def _chosen(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are not at their defaults, nor at those of the preset, the depth and the optimizer's kind."""
    values, usual = flat(recipe), flat(Recipe().to_dict())
    others = {key: values[key] for key in ("model.preset", "model.depth", "optimizer.kind")}
    model = {"preset": others["model.preset"], "depth": others["model.depth"]}
    with_them = flat(Recipe.model_validate({"model": model, "optimizer": {"kind": others["optimizer.kind"]}}).to_dict())
    defaults = with_them | {key: usual[key] for key in others}
    return {key: value for key, value in values.items() if value != defaults.get(key)}


def show_report(files: Mapping[str, int]) -> None:
    """The files of the page and the picture."""
    for file, count in files.items():
        hint = "; open it in a browser, it needs no network" if file.endswith(".html") else ""
        out.print(f"{escape(relative_path(file))}  {size(count)}{hint}", soft_wrap=True)


def show_recipes(recipes: dict[str, str]) -> None:
    """Name and description of each."""
    out.print(table_of(list(recipes.items())))
    out.print("\nraygpt recipes show NAME prints one; raygpt train NAME runs it.")


def show_keys(keys: Sequence["Key"]) -> None:
    """Description, type and default of each key."""
    out.print(table_of([(key.name, f"{key.description} ({key.type}; default {key.default})") for key in keys]))


def show_findings(findings: Sequence["Finding"]) -> None:
    """The doctor's report."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        remedy = f"\n[yellow]→ {escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(MARKS[finding.state], finding.name, escape(finding.detail) + remedy)
    out.print(table)
    problems = sum(finding.state == "problem" for finding in findings)
    out.print("\nReady." if not problems else f"\n{problems} to fix; ○ marks what only some recipes need.")


def show_speed(figures: dict[str, Any], verdict: str) -> None:
    """What `raygpt bench` measured, and how it compares."""
    about, table = figures["about"], Table.grid(padding=(0, 2))
    table.add_row("device", escape(about["device"]))
    table.add_row("engine", f"{about['engine']}, {about['precision']}, attention by {about['attention']}")
    table.add_row("model", f"{figures['layers']} layers of width {figures['width']}")
    table.add_row("batch", f"{figures['rows']} rows × {figures['context']} tokens")
    share = "" if figures["mfu"] is None else f", MFU {figures['mfu']:.3f}"
    table.add_row("step", f"{figures['ms']:.1f} ms, [bold]{figures['tokens_per_s']:,.0f} tokens/s[/]{share}")
    if figures["peak_gib"]:
        table.add_row("memory", f"{figures['peak_gib']:.1f} GiB at most")
    table.add_row("first step", f"{figures['compile_s']:.0f} s, compiling included")
    out.print(table)
    out.print(f"\n{escape(verdict)}")


def show_submitted(job: "Job", address: str) -> None:
    """The job of a run that was just submitted."""
    out.print(f"submitted {escape(job.name)} to {escape(address)} as job {escape(job.id)}", soft_wrap=True)
    out.print(f"run directory   {escape(job.folder)}", soft_wrap=True)


def show_left_running(job: "Job", address: str) -> None:
    """How to come back to a run that is no longer followed."""
    out.print(
        f"\n{escape(job.name)} goes on as job {escape(job.id)}. To come back to it, or to stop it:", soft_wrap=True
    )
    for verb in ("logs", "stop"):
        out.print(f"  {command(verb, job.name, '--cluster', address)}", soft_wrap=True)


def show_jobs(jobs: Sequence["Job"], address: str) -> None:
    """The runs that were submitted to a cluster."""
    if not jobs:
        out.print(f"no run was submitted to {escape(address)}", soft_wrap=True)
        return
    table = Table("run", "job", "state", "since", "directory", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for job in jobs:
        table.add_row(*map(escape, (job.name, job.id, job.status.lower(), ago(job.started), job.folder)))
    out.print(table)


def show_blocks(blocks: Sequence[tuple[str, str]]) -> None:
    """What each block of a manifest is for."""
    for block, why in blocks:
        out.print(f"[bold]{escape(block)}[/]", soft_wrap=True)
        if why:
            out.print(f"  {escape(why)}", soft_wrap=True)


def show_deployed(files: Sequence[str], steps: Sequence[str]) -> None:
    """The files that `raygpt deploy` wrote, and the commands that use them."""
    for file in files:
        out.print(f"wrote {escape(relative_path(file))}", soft_wrap=True)
    out.print("\nTry next:")
    for step in steps:
        out.print(f"  {escape(step)}", soft_wrap=True)


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "run", escape(relative_path(facts["folder"]))
    why = f": {escape(printable(facts['why']))}" if facts["why"] else ""
    yield "state", f"{_state(facts)}{why}, last seen {ago(facts['last_seen'])}"
    yield "model", f"{facts['model']}, {facts['parameters']:,} parameters, engine {facts['engine']}"
    yield "progress", f"step {_steps(facts)}, {facts['tokens']:,} tokens"
    losses = [("loss", "loss"), ("validation loss", "val_loss")]
    yield "losses", ", ".join(f"{label} {number_text(facts[key], '.4f')}" for label, key in losses)
    mfu = f", MFU {facts['mfu']:.1%}" if facts["mfu"] else ""
    yield "speed", f"{number_text(facts['tokens_per_s'], ',.0f')} tokens/s{mfu}"
    restarts = ", ".join(f"{restart['step']:,}" for restart in facts["restarts"])
    yield "restarts", f"{len(facts['restarts'])}, after step {restarts}" if restarts else "none"
    about = {key: value for key, value in facts["about"].items() if key != "versions"}
    if about:
        yield "ran on", escape(", ".join(f"{key} {value}" for key, value in about.items()))
        yield "versions", escape(", ".join(f"{name} {number}" for name, number in facts["about"]["versions"].items()))
    if facts["compared"]:
        yield "plan", facts["compared"]
    yield "disk use", size(facts["disk_bytes"])


def _checkpoints(facts: Mapping[str, Any]) -> Table:
    table = Table("checkpoint", "val loss", "size", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for found in facts["checkpoints"]:
        best = "best" if found["step"] == facts["best"] else ""
        table.add_row(f"step {found['step']:,}", number_text(found["val_loss"], ".4f"), size(found["bytes"]), best)
    return table


def _steps(run: Mapping[str, Any]) -> str:
    if run["step"] is None:
        return "–"
    return f"{run['step']:,}/{run['steps']:,}" if run["steps"] else f"{run['step']:,}"


def _state(run: Mapping[str, Any]) -> str:
    return f"[{STATES[run['state']]}]{run['state']}[/]"
