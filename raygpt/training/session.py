"""What a worker knows of the outside: its rank, its run directory, and who watches. On Ray, or in this process."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.training.watchdog import Watchdog

Event = dict[str, Any]
METRICS = "metrics.jsonl"
REPORTED_S = 5.0  # at least so long between two checkpoints that Ray is told of: each time all workers wait for it
ASKED_S = 5.0  # at most so long between two times that the workers ask what is wanted: a node may be about to go
UPLOADED_S = 10.0  # at least so long between two uploads of the metrics, and a hundred times as long as one takes


class Orders(NamedTuple):
    """What the outside wants of all workers."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and go on: a node is about to be lost, or more workers wait to join
    again: int = 0  # ask again after so many steps at the latest; 0: when one is logged


def asked_again(steps_per_s: float) -> int:
    """After how many steps the workers are to ask again."""
    return max(1, int(ASKED_S * steps_per_s))


class Session(Protocol):
    """The loop's way out. Only rank 0 speaks."""

    rank: int
    workers: int

    def emit(self, event: Event) -> None:
        """Tell whoever watches."""
        ...

    def warn(self, text: str) -> None:
        """Tell whoever watches of what is no reason to end."""
        ...

    def record(self, metrics: Event) -> None:
        """Tell whoever watches, and keep it in the run's metrics."""
        ...

    def resume(self, step: int, is_validated: bool = True) -> None:
        """Begin, or go on, after a step: what the metrics say of later ones is about to be said again, and so is its
        own validation where it is still to come."""
        ...

    def beat(self, step: int) -> None:
        """This step is taken, or something after it: the worker is not stuck."""
        ...

    def rest(self) -> None:
        """Until the next step nothing is expected of this worker: it waits for others, or for storage."""
        ...

    def orders(self, steps_per_s: float) -> Orders:
        """What is wanted, the same in every worker: all ask after the same steps. Rank 0's speed says when again."""
        ...

    def decide(self, what: Callable[[], int]) -> int:
        """What rank 0 finds, in every worker."""
        ...

    def expect(self, step: int) -> None:
        """A checkpoint is about to be written: what was told of an earlier try does not count. Rank 0 alone."""
        ...

    def flush(self) -> None:
        """All that was recorded is in the run's storage, if that can be."""
        ...

    def tell(self, step: int, part: dict[str, Any]) -> None:
        """This worker's part of a checkpoint is written, or it says why not."""
        ...

    def told(self, step: int) -> dict[int, dict[str, Any]]:
        """What the workers have told of a checkpoint so far, by rank."""
        ...

    def saved(self, step: int, folder: str) -> None:
        """A checkpoint is whole."""
        ...

    def close(self) -> None:
        """Nothing more will be said."""
        ...


@dataclass
class LocalSession:
    """A single process: what was said is kept."""

    events: list[Event] = field(default_factory=list)
    wanted: list[Orders] = field(default_factory=list)  # to be given, one after another
    rank: int = 0
    workers: int = 1
    _told: dict[int, dict[int, Any]] = field(default_factory=dict)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def warn(self, text: str) -> None:
        self.emit({"event": "warning", "text": text})

    def record(self, metrics: Event) -> None:
        self.events.append(metrics)

    def resume(self, step: int, is_validated: bool = True) -> None:
        self.events = [event for event in self.events if event.get("step", 0) <= step]

    def expect(self, step: int) -> None:
        self._told.pop(step, None)

    def flush(self) -> None:
        pass

    def beat(self, step: int) -> None:
        pass

    def rest(self) -> None:
        pass

    def orders(self, steps_per_s: float) -> Orders:
        return self.wanted.pop(0) if self.wanted else Orders(again=asked_again(steps_per_s))

    def decide(self, what: Callable[[], int]) -> int:
        return what()

    def tell(self, step: int, part: dict[str, Any]) -> None:
        self._told[step] = {0: part}

    def told(self, step: int) -> dict[int, dict[str, Any]]:
        return self._told.get(step, {})

    def saved(self, step: int, folder: str) -> None:
        pass

    def close(self) -> None:
        pass


class RaySession:
    """A worker of Ray Train. Metrics go into the run directory; an actor holds them for the driver."""

    def __init__(self, run_folder: str, mailbox: Any, watchdog: Watchdog):
        import ray.train

        context = ray.train.get_context()
        self.rank, self.workers = int(context.get_world_rank()), int(context.get_world_size())
        self._mailbox, self._watchdog = mailbox, watchdog
        self._metrics = MetricsFile(run_folder, self.warn)
        self._listener: Listener | None = None
        self._preempted: Any = None  # the last that is known of nodes about to be lost
        self._whole: str | None = None  # a checkpoint that Ray does not know of yet
        self._reported = 0.0

    def emit(self, event: Event) -> None:
        if self.rank == 0:
            self._mailbox.put.remote(event)

    def listen(self, listener: "Listener") -> None:
        """Tell somebody else of the metrics, too; in rank 0."""
        self._listener = listener

    def warn(self, text: str) -> None:
        self.emit({"event": "warning", "text": text})

    def record(self, metrics: Event) -> None:
        if self.rank == 0:
            metrics = {**metrics, "time": round(time.time(), 3)}
            self._metrics.append(metrics)
            self.emit(metrics)
            if self._listener:
                self._listener.record(metrics)

    def resume(self, step: int, is_validated: bool = True) -> None:
        if self.rank == 0:
            import ray

            ray.get(self._mailbox.begin.remote())
            if self._listener:
                self._listener.begin(step)
            if self._metrics.keep_until(step, is_validated):
                self.record({"step": step, "restart": True})

    def beat(self, step: int) -> None:
        self._watchdog.feed()
        if self.rank == 0:
            self._mailbox.beat.remote(step)

    def rest(self) -> None:
        self._watchdog.rest()

    def orders(self, steps_per_s: float) -> Orders:
        """Two collectives of Ray's, of about a millisecond each."""
        import ray.train

        stop, save, report, again = self._broadcast(self._wanted(steps_per_s) if self.rank == 0 else None)
        if report:
            self._report(str(report))
        preempted = ray.train.get_preemption_info()
        is_news, self._preempted = preempted is not None and preempted != self._preempted, preempted
        if is_news:
            self.warn("a node is about to be lost: saving before it goes")
        return Orders(stop, save or is_news, again)

    def _wanted(self, steps_per_s: float) -> tuple[bool, bool, str | None, int]:
        """Rank 0: what the driver and the controller wish, the checkpoint that Ray is to be told of, and when to ask
        again."""
        import ray

        wishes = ray.get(self._mailbox.take_wishes.remote())
        is_time = time.monotonic() - self._reported > REPORTED_S
        report, self._whole = (self._whole, None) if is_time else (None, self._whole)
        return "stop" in wishes, "save" in wishes, report, asked_again(steps_per_s)

    def _report(self, folder: str) -> None:
        """Ray is told where it lies, and copies nothing."""
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        self._reported = time.monotonic()
        filesystem, path = storage.filesystem(folder) if storage.is_remote(folder) else (None, folder)
        checkpoint = Checkpoint(path, filesystem) if self.rank == 0 else None
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _broadcast(self, value: Any) -> Any:
        from ray.train.collective import broadcast_from_rank_zero

        return broadcast_from_rank_zero(value)

    def decide(self, what: Callable[[], int]) -> int:
        return int(self._broadcast(what() if self.rank == 0 else None))

    def expect(self, step: int) -> None:
        import ray

        ray.get(self._mailbox.expect.remote(step))

    def flush(self) -> None:
        if self.rank == 0:
            self._metrics.flush()

    def tell(self, step: int, part: dict[str, Any]) -> None:
        self._mailbox.tell.remote(step, self.rank, part)

    def told(self, step: int) -> dict[int, dict[str, Any]]:
        import ray

        told: dict[int, dict[str, Any]] = ray.get(self._mailbox.told.remote(step))
        return told

    def saved(self, step: int, folder: str) -> None:
        self._whole = folder
        self._mailbox.saved.remote(step)

    def close(self) -> None:
        """Ray hears of the last checkpoint, and the metrics are all where they belong."""
        report = self._broadcast(self._whole)
        if report:
            self._report(report)
        self._watchdog.stop()
        self.flush()
        if self._listener:
            self._listener.close()


class Listener(Protocol):
    """Who else is told of the metrics: see tracking.py."""

    def begin(self, after: int) -> None: ...

    def record(self, event: Event) -> None: ...

    def close(self) -> None: ...


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

    def append(self, metrics: Event) -> None:
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


def _read(line: str) -> Event | None:
    """A line of metrics; None for what a killed process, or a disk that was full, has left of one."""
    with contextlib.suppress(ValueError):
        logged = json.loads(line)
        if isinstance(logged, dict) and "step" in logged and line.endswith("\n"):
            return logged
    return None


def last_metrics(run_folder: str) -> Event:
    """The last value of each metric that a run has logged."""
    uri = storage.join(run_folder, METRICS)
    last: Event = {}
    for line in storage.read_bytes(uri).decode().splitlines(keepends=True) if storage.exists(uri) else []:
        last.update(_read(line) or {})
    last.pop("restart", None)
    return last
