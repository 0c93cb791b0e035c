"""What a run logs: `metrics.jsonl`, one object a line.

{"step", "loss", …}      a step of training
{"step", "val_loss", …}  a validation; only task scores where there is no text to validate on
{"step", "restart"}      the run went on after this step

What a killed process, or a disk that was full, has left of a line is none, for the reader as for the writer.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.errors import RaygptError

Line = dict[str, Any]
METRICS = "metrics.jsonl"
UPLOADED_S = 10.0  # at least so long between two uploads of the metrics, and a hundred times as long as one takes


def read(run_folder: str) -> list[Line]:
    """Every line that was logged, in order; none where nothing was."""
    return [line for _, line in complete_lines(content_of(storage.join(run_folder, METRICS)))]


def latest(lines: Iterable[Line]) -> Line:
    """The last value of each metric."""
    last: Line = {}
    for line in lines:
        last |= line
    last.pop("restart", None)
    return last


def restarts(lines: Iterable[Line]) -> list[Line]:
    """Where the run was started anew."""
    return [line for line in lines if line.get("restart")]


class MetricsFile:
    """The writer, of which a run has one. An object store cannot append: there the whole file is put, now and then.

    A storage that fails for a while costs a warning: the lines are kept, and written with the next ones.
    """

    def __init__(self, run_folder: str, warn: Callable[[str], None] = lambda text: None):
        self._uri = storage.join(run_folder, METRICS)
        self._is_remote = storage.is_remote(run_folder)
        self._lines: list[bytes] = []  # not written yet; in an object store: all
        self._warn, self._is_failing, self._next_upload = warn, False, 0.0
        self._lock = threading.Lock()  # it is written to after a log event, and before a checkpoint counts
        self._size = 0  # of the whole lines on the disk

    def keep_until(self, step: int, is_validated: bool = True) -> bool:
        """Drop what was logged after a step, before the run goes on from there; whether there was anything.

        A step that is still to be validated loses what an earlier validation said of it.
        """
        content = content_of(self._uri)
        lines = [(text, line) for text, line in complete_lines(content) if line["step"] <= step]
        if not is_validated:
            lines = [(text, line) for text, line in lines if line["step"] < step or not _is_validation(line)]
        kept = [text for text, _ in lines]
        storage.write_bytes(self._uri, b"".join(kept))
        self._lines, self._size = kept if self._is_remote else [], sum(map(len, kept))
        return bool(content)

    def append(self, metrics: Line) -> None:
        with self._lock:
            self._lines.append(json.dumps(metrics).encode() + b"\n")
        if not self._is_remote or time.monotonic() > self._next_upload:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        with self._lock:
            try:
                self._write()
                self._is_failing = False
            except (OSError, RaygptError) as error:
                if not self._is_failing:
                    self._warn(f"metrics cannot be written ({error}); they are kept, and training goes on")
                self._is_failing = True

    def _write(self) -> None:
        if self._is_remote:
            started = time.monotonic()
            storage.write_bytes(self._uri, b"".join(self._lines))
            took = time.monotonic() - started
            self._next_upload = time.monotonic() + max(UPLOADED_S, 100 * took)
            return
        content = b"".join(self._lines)
        with open(self._uri, "r+b" if Path(self._uri).exists() else "wb") as file:  # noqa: PTH123
            size = file.seek(0, 2)
            file.seek(min(size, self._size))
            if size < self._size or not content.startswith(file.read() if size > self._size else b""):
                raise RaygptError("another process has written them")  # which has gone on with this run
            file.truncate(self._size)  # a disk that was full may have half a line
            file.seek(self._size)
            file.write(content)
        self._size += len(content)
        self._lines.clear()


def _is_validation(line: Line) -> bool:
    """With a loss, or with task scores alone."""
    return "loss" not in line and "restart" not in line


def content_of(uri: str) -> bytes:
    """A file of lines; empty where there is none."""
    return storage.read_bytes(uri) if storage.exists(uri) else b""


def complete_lines(content: bytes) -> Iterator[tuple[bytes, Line]]:
    """Each line as it is written, and what it says."""
    for text in content.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line and text.endswith(b"\n"):
                yield text, line
