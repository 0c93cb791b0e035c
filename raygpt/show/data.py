"""Console output of `raygpt prepare` and `raygpt data show`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.recipes import run_name
from raygpt.show.console import as_path, clip, command, err, out, relative_path, show_notes, table_of

if TYPE_CHECKING:
    from raygpt.corpus import prepare
    from raygpt.corpus.store import TokenStore


@contextlib.contextmanager
def preparing() -> Iterator[Callable[["prepare.Progress"], None]]:
    """A progress bar while a corpus is prepared; plain lines without a terminal; nothing if nothing is to be done."""
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
            bar.update(task, total=1.0, completed=_share(progress), counts=_counts(progress))

        yield watch


class _PlainProgress:
    """A line at the start and every ten seconds; none at the end, which the result follows: it is on standard output,
    and where the two are captured separately the line would come after it."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: "prepare.Progress") -> None:
        share = _share(progress)
        if share < 1 and time.monotonic() >= self._next:
            err.print(f"preparing {share:4.0%}  {_counts(progress)}{_left(share, progress.seconds)}", soft_wrap=True)
            self._next = time.monotonic() + 10


def _left(share: float, seconds: float) -> str:
    """The time left, as soon as there is something to judge by."""
    return f"  {timedelta(seconds=round(seconds / share - seconds))} left" if share and seconds > 5 else ""


def _share(progress: "prepare.Progress") -> float:
    """How much is done. Scattering takes about a fifth of the time, where documents are scattered."""
    tokenised = progress.source_bytes / max(1, progress.source_total)
    return tokenised if progress.scattered is None else 0.8 * tokenised + 0.2 * progress.scattered


def _counts(progress: "prepare.Progress") -> str:
    if not progress.seconds:
        return "waiting for Ray to read and tokenise the first part"
    if progress.scattered:
        return f"{progress.documents:,} documents  {progress.tokens:,} tokens  scattering {progress.scattered:.0%}"
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
    show_notes(index.notes)
    folder = relative_path(store.folder)
    out.print(f"token store  {escape(folder)}", soft_wrap=True)
    where, name = as_path(folder), run_name(folder.rstrip("/"))
    words = ("train", "tiny", f"data.source={where}", f"data.tokenizer={where}", f"run.name={name}")
    out.print(f"train on it  {command(*words)}", soft_wrap=True)


def show_data(shown: dict[str, Any]) -> None:
    """A source or a store: its facts, then its rows."""
    hidden = ("rows", "lengths")  # rows come after the table, and lengths are on the page
    shown = {**shown, **({"copies": _share_text(shown["copies"])} if "copies" in shown else {})}
    facts = [(name, _fact(value)) for name, value in shown.items() if name not in hidden and value not in ({}, [], "")]
    out.print(table_of(facts))
    for number, row in enumerate(shown["rows"]):
        text = row if isinstance(row, str) else row["text"]
        ids = "" if isinstance(row, str) else f" [dim]{' '.join(map(str, row['tokens'][:8]))} …[/]"
        out.print(f"[bold cyan]row {number}[/]{ids}")
        out.print(escape(clip(text, 240)), soft_wrap=True)


def write_page(shown: dict[str, Any], path: str) -> None:
    """The HTML page of a store."""
    from raygpt.show.data_page import data_page

    if "folder" not in shown:
        raise RaygptError(f"--page is for a token store, and {shown['source']} is text; prepare it first")
    storage.write_bytes(path, data_page(shown).encode())
    err.print(f"page  {escape(path)}", soft_wrap=True)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_share_text(kind)}" for name, kind in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _share_text(value: Any) -> str:
    return f"{value:.2%}" if isinstance(value, float) else str(value)
