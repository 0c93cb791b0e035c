"""The terminal: standard output and standard error, and formatting that all console output shares."""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """Print an error in one line."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def note(text: str) -> None:
    """Print a note on standard error."""
    err.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        out.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def program() -> str:
    """What to type for raygpt: its name if the shell finds it, else its path."""
    if shutil.which("raygpt"):
        return "raygpt"
    return "python -m raygpt" if sys.argv[0].endswith("__main__.py") else shlex.quote(relative_path(sys.argv[0]))


def command(*words: str) -> str:
    """What to type, with names that contain spaces in quotes; escaped, to be printed."""
    return escape(f"{program()} {shlex.join(words)}")


def relative_path(path: str) -> str:
    """A path relative to the current folder."""
    return path.removeprefix(f"{Path.cwd()}/")


def as_path(name: str) -> str:
    """Add a slash: without one a folder's name means a tokenizer, or a run in run.storage."""
    return name if "/" in name else f"./{name}"


def table_of(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(escape(label), escape(value))
    return table


def printable(text: str) -> str:
    """The text without control characters, which a model may generate and a terminal would execute.

    Windows' line ends are line ends; a text that comes in pieces may be cut between their two characters.
    """
    text = re.sub(r"\r(?=\n|\Z)", "", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def clip(text: str, length: int) -> str:
    text = printable(text)
    return text if len(text) <= length else text[:length].rstrip() + " …"
