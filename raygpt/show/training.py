"""Console output of `raygpt train`: the plan, live progress, and the result."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn

from raygpt.formatting import duration
from raygpt.runs import free_name
from raygpt.runs.planned import compare
from raygpt.show.console import clip, command, err, out, printable, relative_path, show_notes, table_of
from raygpt.training.events import (
    BatchSplit,
    Event,
    FaultHandled,
    Message,
    ProfileWritten,
    Resumed,
    Sampled,
    Started,
    StepLogged,
    Validated,
    Waiting,
    Warned,
)
from raygpt.training.mfu import peak_flops

if TYPE_CHECKING:
    from raygpt.training.prepared import Prepared
    from raygpt.training.ray.launch import Result


def show_plan(run: "Prepared") -> None:
    """Every number of a run, and the start of its first batch."""
    out.print(table_of([(label, relative_path(value)) for label, value in run.totals.lines()]))
    for store in run.corpus.stores:
        show_notes(store.index.notes)
    (row,) = run.feed.rows(0, [0])
    text = run.corpus.tokenizer.decode(row.tolist())
    out.print(f"\n[bold]batch 0, row 0 of {run.totals.rows}[/] [dim]{' '.join(map(str, row[:8].tolist()))} …[/]")
    out.print(f"{escape(clip(text, 240))}\n", soft_wrap=True)


@contextlib.contextmanager
def live_progress(steps: int) -> Iterator["TrainingProgress"]:
    """A live line while training in a terminal, a line per event elsewhere."""
    if not out.is_terminal:
        yield TrainingProgress(steps, None)
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=out, transient=True) as live:
        yield TrainingProgress(steps, live)


def show_message(event: Event) -> None:
    """Print warnings and other messages on standard error, when standard output is JSON for a program."""
    if text := message_text(event):
        err.print(text, soft_wrap=True)


def message_text(event: Event) -> str:
    """The text of a message; empty for other events."""
    match event:
        case Warned(text):
            return f"[yellow]warning:[/] {escape(text)}"
        case FaultHandled(text):
            return f"[yellow]fault:[/] {escape(text)}"
        case Message(text):
            return escape(text)
    return ""


class TrainingProgress:
    """Shows the events of a run, and keeps them in `events`."""

    def __init__(self, steps: int | None, live: Progress | None):
        self.events: list[Event] = []
        self._steps, self._live = steps, live
        self._val_loss: float | None = None
        self._said: dict[str, str] = {}
        self._task = live.add_task("starting workers") if live else None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Started(about):
                unknown = "" if peak_flops(about["device"]) else "; its MFU is unknown"
                self._once("computing", ", ".join(f"{name} {value}" for name, value in about.items()) + unknown)
                self._show("compiling")
            case BatchSplit(text):
                self._once("batch", text)
            case Message():
                out.print(message_text(event), soft_wrap=True)
                if isinstance(event, Waiting):
                    self._show("waiting")
            case Resumed(step, folder, is_fork):
                where = f" of {escape(relative_path(folder))}" if is_fork else ""
                out.print(f"continuing after step {step}{where}", soft_wrap=True)
            case ProfileWritten(file):
                out.print(f"profile in {escape(relative_path(file))}, for ui.perfetto.dev", soft_wrap=True)
            case Validated(step, scores):
                self._val_loss = self._val_loss if event.val_loss is None else event.val_loss
                parts = [self._step(step)]
                parts += [f"{name.replace('_', ' ')} {_score(name, value)}" for name, value in scores.items()]
                out.print("  ".join(parts), soft_wrap=True)
            case StepLogged():
                self._show(self._line(event))
                if not self._live:
                    out.print(self._line(event), soft_wrap=True)

    def _once(self, label: str, value: str) -> None:
        """Print a value again only if it has changed: restarted workers usually compute as before."""
        if self._said.get(label) != value:
            out.print(table_of([(label, value)]))
            self._said[label] = value

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}" if self._steps else f"step {step}"

    def _line(self, event: StepLogged) -> str:
        values, parts = event.values, [self._step(event.step), f"loss {event.loss:.4f}"]
        if "tokens_per_s" in values:
            parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
            if self._steps and event.step and values["tokens_per_s"] and "tokens" in values:
                left = (self._steps - event.step) * values["tokens"] / event.step / values["tokens_per_s"]
                parts.append(f"{duration(left)} left")
        if values.get("skipped"):
            parts.append(f"{values['skipped']:.0f} skipped")
        if "mfu" in values:
            parts.append(f"MFU {values['mfu']:.1%}")
        return "  ".join(parts)

    def _show(self, text: str) -> None:
        if self._live and self._task is not None:
            val = "" if self._val_loss is None else f"  val loss {self._val_loss:.4f}"
            self._live.update(self._task, description=text + val)


def _score(name: str, value: float) -> str:
    return f"{value:.4f}" if name == "val_loss" else f"{value:.4g}"


def show_finished(run: "Prepared") -> None:
    """The run was already finished."""
    out.print(
        f"{escape(relative_path(run.totals.run_folder))} is trained to step {run.after} already. Set training.steps "
        f"(or epochs) higher to go on, or run.name={escape(free_name(run.totals.run_folder))} to begin another run.",
        soft_wrap=True,
    )


def show_stopped(result: "Result") -> None:
    """The run was stopped on request."""
    folder = escape(relative_path(result.path))
    text = f"stopped after step {result.stopped}, which is saved in {folder}; the same command resumes it"
    out.print(text, soft_wrap=True)


def show_result(result: "Result", events: Sequence[Event]) -> None:
    """The result of a run: validation loss before and after, its last samples, and what to do next."""
    validated = [(event.step, event.val_loss) for event in events if isinstance(event, Validated)]
    losses = [(step, loss) for step, loss in validated if loss is not None]
    folder = relative_path(result.path)
    _show_samples([event for event in events if isinstance(event, Sampled)])
    if len(losses) > 1:
        (first, before), (_, after) = losses[0], losses[-1]
        since = f"at step {first:,}" if first else "at the start"  # of a resumed run the first one of this process
        out.print(f"\nvalidation loss {before:.4f} {since}, {after:.4f} at the end ({after / before - 1:+.0%})")
    if compared := compare(result.path):
        out.print(f"plan            {compared}", soft_wrap=True)
    out.print(f"run directory   {escape(folder)}\n\nTry next:", soft_wrap=True)
    own_text = (
        "train",
        "tiny",
        "data.source=README.md",
        "data.tokenizer=bytes",
        "training.steps=20",
        "run.name=readme",
    )
    last = own_text if Path("README.md").is_file() else ("report", folder)
    for words in (("generate", folder), ("eval", folder), last):
        out.print(f"  {command(*words)}", soft_wrap=True)


def _show_samples(samples: Sequence[Sampled]) -> None:
    """The samples of the last evaluation: one, or one for each prompt, which is highlighted."""
    last = [sample for sample in samples if sample.step == samples[-1].step]
    for sample in last:
        prompt = sample.prompt
        about = f" from {clip(prompt, 40)!r}" if len(last) > 1 else ""
        out.print(f"\n[bold]a sample of what it writes now{escape(about)}[/]")
        text = printable(sample.text.removeprefix(prompt))
        out.print(f"[cyan]{escape(printable(prompt))}[/]{escape(text)}", soft_wrap=True)
