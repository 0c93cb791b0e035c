"""The metrics of a run: `metrics.jsonl`, one object per line.

{"step", "loss", …}      a step of training
{"step", "val_loss", …}  a validation; only task scores where there is no text to validate on
{"step", "restart"}      the run was resumed after this step

Reader and writer ignore an incomplete line, as a killed process or a full disk may leave it, and the reader one whose
values are not numbers.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.errors import RaygptError

Line = dict[str, Any]
METRICS = "metrics.jsonl"
UPLOAD_INTERVAL_S = 10.0  # the shortest time between two uploads, and at least a hundred times as long as one takes


def read(run_folder: str) -> list[Line]:
    """Every line that was logged, in order; none if there is no file."""
    lines = (line for _, line in complete_lines(content_of(storage.join(run_folder, METRICS))))
    return [line for line in lines if all(isinstance(value, int | float) for value in line.values())]


def latest(lines: Iterable[Line]) -> Line:
    """The last value of each metric."""
    last: Line = {}
    for line in lines:
        last |= line
    last.pop("restart", None)
    return last


def restarts(lines: Iterable[Line]) -> list[Line]:
    """The lines that record a restart."""
    return [line for line in lines if line.get("restart")]


def since_start(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines of the last start: earlier ones may have been on other hardware."""
    first = max((number for number, line in enumerate(lines, 1) if line.get("restart")), default=0)
    return lines[first:]


class MetricsFile:
    """The only writer of a run's metrics. An object store cannot append: there the whole file is uploaded periodically.

    If the storage fails there is a warning; the lines are kept, and written with the next ones.
    """

    def __init__(self, run_folder: str, warn: Callable[[str], None] = lambda text: None):
        self._uri = storage.join(run_folder, METRICS)
        self._is_remote = storage.is_remote(run_folder)
        self._lines: list[bytes] = []  # not written yet; for an object store: all
        self._warn, self._is_failing, self._next_upload = warn, False, 0.0
        self._lock = threading.Lock()  # written to after logging, and before a checkpoint is committed
        self._size = 0  # of the complete lines on the disk

    def keep_until(self, step: int, is_validated: bool = True) -> bool:
        """Drop the lines after a step from which the run resumes. Returns whether there were any lines.

        If the step will be validated again, its earlier validation is dropped too.
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
                    self._warn(f"metrics cannot be written ({error}); they are kept, and training continues")
                self._is_failing = True

    def _write(self) -> None:
        if self._is_remote:
            started = time.monotonic()
            storage.write_bytes(self._uri, b"".join(self._lines))
            took = time.monotonic() - started
            self._next_upload = time.monotonic() + max(UPLOAD_INTERVAL_S, 100 * took)
            return
        content = b"".join(self._lines)
        with open(self._uri, "r+b" if Path(self._uri).exists() else "wb") as file:  # noqa: PTH123
            size = file.seek(0, 2)
            file.seek(min(size, self._size))
            if size < self._size or not content.startswith(file.read() if size > self._size else b""):
                raise RaygptError("another process has written them")  # another driver has taken over the run
            file.truncate(self._size)  # a full disk may have left half a line
            file.seek(self._size)
            file.write(content)
        self._size += len(content)
        self._lines.clear()


def _is_validation(line: Line) -> bool:
    """With a loss, or with task scores alone."""
    return "loss" not in line and "restart" not in line


def content_of(uri: str) -> bytes:
    """A file's content; empty if there is no file."""
    return storage.read_bytes(uri) if storage.exists(uri) else b""


def complete_lines(content: bytes) -> Iterator[tuple[bytes, Line]]:
    """Each line as bytes, and parsed."""
    for text in content.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int) and text.endswith(b"\n"):
                yield text, line
