"""What people see in a terminal: progress while work goes on, and the results of the verbs."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from raygpt.config import TASKS
from raygpt.training.mfu import peak_flops

if TYPE_CHECKING:
    from raygpt.corpus import prepare
    from raygpt.corpus.store import TokenStore
    from raygpt.doctor import Finding
    from raygpt.recipes.explain import Key
    from raygpt.training.prepared import Prepared
    from raygpt.training.ray.launch import Result
    from raygpt.training.session import Event

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
MARKS = {"ok": "[green]✓[/]", "optional": "[yellow]○[/]", "problem": "[red]✗[/]"}


def fail(message: str) -> None:
    """The one line that an error ends in."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


@contextlib.contextmanager
def preparing() -> Iterator[Callable[["prepare.Progress"], None]]:
    """A bar while a corpus is prepared, plain lines where there is no terminal, nothing where nothing is to do."""
    if not err.is_terminal:
        yield _PlainProgress()
        return
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None, counts="starting")  # without a total it pulses

        def watch(progress: "prepare.Progress") -> None:
            bar.update(task, total=progress.source_total, completed=progress.source_bytes, counts=_counts(progress))

        yield watch


class _PlainProgress:
    """A line at the start and every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: "prepare.Progress") -> None:
        if time.monotonic() >= self._next:
            share = progress.source_bytes / max(1, progress.source_total)
            err.print(f"preparing {share:4.0%}  {_counts(progress)}", soft_wrap=True)
            self._next = time.monotonic() + 10


def _counts(progress: "prepare.Progress") -> str:
    speed = progress.text_bytes / max(progress.seconds, 1e-9) / 1e6
    return f"{progress.documents:,} documents  {progress.tokens:,} tokens  {speed:.1f} MB/s"


def show_prepared(store: "TokenStore") -> None:
    """The closing line of prepare."""
    index = store.index
    tokens = index.tokens("train") + index.tokens("val")
    out.print(
        f"{index.documents:,} documents, {index.text_bytes / 1e6:,.1f} MB of text → {index.tokens('train'):,} tokens "
        f"to train on, {index.tokens('val'):,} to validate; {index.text_bytes / tokens:.2f} bytes per token",
        soft_wrap=True,
    )
    _notes(index.notes)
    folder = escape(near(store.folder))
    out.print(f"token store  {folder}", soft_wrap=True)
    where, name = as_path(folder), folder.rstrip("/").rpartition("/")[-1]
    words = f"train tiny data.source={where} data.tokenizer={where} run.name={name}"
    out.print(f"train on it  {program()} {words}", soft_wrap=True)


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        out.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def show_plan(run: "Prepared") -> None:
    """Every number of a run, and the beginning of its first batch."""
    out.print(table_of([(label, near(value)) for label, value in run.plan.lines()]))
    for store in run.corpus.stores:
        _notes(store.index.notes)
    (row,) = run.feed.rows(0, [0])
    text = run.corpus.tokenizer.decode(row.tolist())
    out.print(f"\n[bold]batch 0, row 0 of {run.plan.rows}[/] [dim]{' '.join(map(str, row[:8].tolist()))} …[/]")
    out.print(f"{escape(_clip(text, 240))}\n", soft_wrap=True)


@contextlib.contextmanager
def training(steps: int) -> Iterator["Training"]:
    """A live line while training in a terminal, a line per event elsewhere."""
    if not out.is_terminal:
        yield Training(steps, None)
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=out, transient=True) as live:
        yield Training(steps, live)


def tell_trouble(event: "Event") -> None:
    """Where standard output is for a program: warnings and the like, on standard error."""
    if said := _trouble(event):
        err.print(said, soft_wrap=True)


def _trouble(event: "Event") -> str:
    """A warning, a fault, or what is waited for; nothing else."""
    if event.get("event") in ("warning", "fault"):
        return f"[yellow]{event['event']}:[/] {escape(event['text'])}"
    return escape(event["text"]) if event.get("event") in ("waiting", "stopping") else ""


class Training:
    """Watches a run; what it saw is in `events`."""

    def __init__(self, steps: int, live: Progress | None):
        self.events: list[Event] = []
        self._steps, self._live = steps, live
        self._val_loss: float | None = None
        self._said: dict[str, str] = {}
        self._task = live.add_task("starting workers") if live else None

    def __call__(self, event: "Event") -> None:
        self.events.append(event)
        if event.get("event") == "start":
            about = ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")
            unknown = "" if peak_flops(event["device"]) else "; its MFU is unknown"
            self._once("computing", about + unknown)
            self._show("compiling")
        elif event.get("event") == "split":
            self._once("batch", event["text"])
        elif said := _trouble(event):
            out.print(said, soft_wrap=True)
            if event["event"] == "waiting":
                self._show("waiting")
        elif event.get("event") == "resume":
            where = f" of {escape(near(event['folder']))}" if event["fork"] else ""
            out.print(f"continuing after step {event['step']}{where}", soft_wrap=True)
        elif event.get("event") == "profile":
            out.print(f"profile in {escape(near(event['file']))}, for ui.perfetto.dev", soft_wrap=True)
        elif scores := [name for name in event if name == "val_loss" or name.partition("_")[0] in TASKS]:
            self._val_loss = event.get("val_loss", self._val_loss)
            parts = [f"step {event['step']:>{len(str(self._steps))}}/{self._steps}"]
            parts += [f"{name.replace('_', ' ')} {_score(name, event[name])}" for name in scores]
            out.print("  ".join(parts), soft_wrap=True)
        elif "loss" in event:
            self._show(self._line(event))
            if not self._live:
                out.print(self._line(event), soft_wrap=True)

    def _once(self, label: str, value: str) -> None:
        """Again only when it is another: workers that start anew mostly compute as before."""
        if self._said.get(label) != value:
            out.print(table_of([(label, value)]))
            self._said[label] = value

    def _line(self, event: "Event") -> str:
        parts = [f"step {event['step']:>{len(str(self._steps))}}/{self._steps}", f"loss {event['loss']:.4f}"]
        if "tokens_per_s" in event:
            left = (self._steps - event["step"]) * event["tokens"] / event["step"] / event["tokens_per_s"]
            parts += [f"{event['tokens_per_s']:,.0f} tokens/s", f"{int(left // 60)}:{int(left % 60):02d} left"]
        if event.get("skipped"):
            parts.append(f"{event['skipped']:.0f} skipped")
        if "mfu" in event:
            parts.append(f"MFU {event['mfu']:.1%}")
        return "  ".join(parts)

    def _show(self, text: str) -> None:
        if self._live and self._task is not None:
            val = "" if self._val_loss is None else f"  val loss {self._val_loss:.4f}"
            self._live.update(self._task, description=text + val)


def _score(name: str, value: float) -> str:
    return f"{value:.4f}" if name == "val_loss" else f"{value:.4g}"


def show_finished(run: "Prepared") -> None:
    """Nothing was left to do."""
    out.print(
        f"{escape(near(run.plan.run_folder))} is trained to step {run.after} already. Set training.steps (or epochs) "
        "higher to go on, or run.name to begin another run.",
        soft_wrap=True,
    )


def show_stopped(result: "Result") -> None:
    """It was asked to stop, and did."""
    folder = escape(near(result.path))
    text = f"stopped after step {result.stopped}, which is saved in {folder}; the same command goes on from there"
    out.print(text, soft_wrap=True)


def show_result(result: "Result", events: Sequence["Event"]) -> None:
    """What came of a run: the validation loss before and after, its last samples, and what to do next."""
    losses = [event["val_loss"] for event in events if "val_loss" in event]
    folder = near(result.path)
    _show_samples([event for event in events if event.get("event") == "sample"])
    if len(losses) > 1:
        out.print(f"\nvalidation loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end ({_fall(losses)})")
    out.print(f"run directory   {escape(folder)}\n\nTry next:", soft_wrap=True)
    for words in (
        f"generate {folder}",
        f"eval {folder}",
        "train tiny data.source=README.md data.tokenizer=bytes training.steps=20 run.name=readme",
    ):
        out.print(f"  {program()} {escape(words)}", soft_wrap=True)


def _show_samples(samples: Sequence["Event"]) -> None:
    """Those of the last evaluation: one, or one for each prompt, which stands out in it."""
    last = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    for sample in last:
        prompt = sample.get("prompt", "")
        about = f" from {_clip(prompt, 40)!r}" if len(last) > 1 else ""
        out.print(f"\n[bold]a sample of what it writes now{escape(about)}[/]")
        text = printable(sample["text"].removeprefix(prompt))
        out.print(f"[cyan]{escape(printable(prompt))}[/]{escape(text)}", soft_wrap=True)


def _fall(losses: Sequence[float]) -> str:
    return f"{losses[-1] / losses[0] - 1:+.0%}"


def show_data(shown: dict[str, Any]) -> None:
    """A source or a store: its facts, then its rows."""
    facts = [(name, _fact(value)) for name, value in shown.items() if name != "rows" and value not in ({}, [], "")]
    out.print(table_of(facts))
    for number, row in enumerate(shown["rows"]):
        text = row if isinstance(row, str) else row["text"]
        ids = "" if isinstance(row, str) else f" [dim]{' '.join(map(str, row['tokens'][:8]))} …[/]"
        out.print(f"[bold cyan]row {number}[/]{ids}")
        out.print(escape(_clip(text, 240)), soft_wrap=True)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {kind}" for name, kind in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_recipes(recipes: dict[str, str]) -> None:
    """Name and description of each."""
    out.print(table_of(list(recipes.items())))
    out.print("\nraygpt recipes show NAME prints one; raygpt train NAME runs it.")


def show_keys(keys: Sequence["Key"]) -> None:
    """What each is for, of which kind it is, and its default."""
    out.print(table_of([(key.name, f"{key.description} ({key.type}; default {key.default})") for key in keys]))


def show_findings(findings: Sequence["Finding"]) -> None:
    """The doctor's report."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        remedy = f"\n[yellow]→ {escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(MARKS[finding.state], finding.name, escape(finding.detail) + remedy)
    out.print(table)
    problems = sum(finding.state == "problem" for finding in findings)
    out.print("\nReady." if not problems else f"\n{problems} to mend; ○ marks what only some recipes need.")


def show_speed(figures: dict[str, Any], verdict: str) -> None:
    """What `raygpt bench` measured, and what to think of it."""
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


def program() -> str:
    """What to type for raygpt: its name where the shell finds it, else its path."""
    if shutil.which("raygpt"):
        return "raygpt"
    return "python -m raygpt" if sys.argv[0].endswith("__main__.py") else near(sys.argv[0])


def near(path: str) -> str:
    """A path as seen from here."""
    return path.removeprefix(f"{Path.cwd()}/")


def as_path(name: str) -> str:
    """With a slash: without one a folder is taken for a tokenizer's name, or for a run's in run.storage."""
    return name if "/" in name else f"./{name}"


def table_of(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(escape(label), escape(value))
    return table


def printable(text: str) -> str:
    """Without control characters, which a model may write and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _clip(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else text[:length].rstrip() + " …"
