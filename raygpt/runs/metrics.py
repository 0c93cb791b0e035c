"""What a run logs: `metrics.jsonl`, one object a line."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.errors import RaygptError

Line = dict[str, Any]
METRICS = "metrics.jsonl"
UPLOADED_S = 10.0  # at least so long between two uploads of the metrics, and a hundred times as long as one takes


class MetricsFile:
    """`metrics.jsonl`: one object a line. An object store cannot append: there the whole file is put, now and then.

    A storage that fails for a while costs a warning: the lines are kept, and written with the next ones.
    """

    def __init__(self, run_folder: str, warn: Callable[[str], None] = lambda text: None):
        self._uri = storage.join(run_folder, METRICS)
        self._is_remote = storage.is_remote(run_folder)
        self._lines: list[str] = []  # not written yet; in an object store: all
        self._warn, self._is_failing, self._next_upload = warn, False, 0.0
        self._lock = threading.Lock()  # it is written to after a log event, and before a checkpoint counts
        self._size = 0  # of the whole lines on the disk

    def keep_until(self, step: int, is_validated: bool = True) -> bool:
        """Drop what was logged after a step, before the run goes on from there; whether there was anything."""
        lines = storage.read_bytes(self._uri).decode().splitlines(keepends=True) if storage.exists(self._uri) else []
        read = [(line, logged) for line in lines if (logged := _read(line)) and logged["step"] <= step]
        again = (
            [] if is_validated else [line for line, logged in read if "val_loss" in logged and logged["step"] == step]
        )
        kept = [line for line, _ in read if line not in again]
        content = "".join(kept).encode()
        storage.write_bytes(self._uri, content)
        self._lines, self._size = kept if self._is_remote else [], len(content)
        return bool(lines)

    def append(self, metrics: Line) -> None:
        with self._lock:
            self._lines.append(json.dumps(metrics) + "\n")
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
            storage.write_bytes(self._uri, "".join(self._lines).encode())
            took = time.monotonic() - started
            self._next_upload = time.monotonic() + max(UPLOADED_S, 100 * took)
            return
        content = "".join(self._lines).encode()
        with open(self._uri, "r+b" if Path(self._uri).exists() else "wb") as file:  # noqa: PTH123
            file.truncate(self._size)  # a disk that was full may have half a line
            file.seek(self._size)
            file.write(content)
        self._size += len(content)
        self._lines.clear()


def _read(line: str) -> Line | None:
    """A line of metrics; None for what a killed process, or a disk that was full, has left of one."""
    with contextlib.suppress(ValueError):
        logged = json.loads(line)
        if isinstance(logged, dict) and "step" in logged and line.endswith("\n"):
            return logged
    return None


def last_metrics(run_folder: str) -> Line:
    """The last value of each metric that a run has logged."""
    uri = storage.join(run_folder, METRICS)
    last: Line = {}
    for line in storage.read_bytes(uri).decode().splitlines(keepends=True) if storage.exists(uri) else []:
        last.update(_read(line) or {})
    last.pop("restart", None)
    return last
