"""What a worker knows of the outside: its rank, its run directory, and who watches. On Ray, or in this process."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from raygpt import storage

Event = dict[str, Any]
METRICS = "metrics.jsonl"


class Session(Protocol):
    """The loop's way out. Only rank 0 speaks, and nothing here waits for an answer."""

    def emit(self, event: Event) -> None:
        """Tell whoever watches."""
        ...

    def record(self, metrics: Event) -> None:
        """Tell whoever watches, and keep it in the run's metrics."""
        ...

    def resume(self, step: int) -> None:
        """Begin, or go on, after a step: what the metrics say of later ones is about to be said again."""
        ...

    def committed(self, folder: str, commit: Callable[[], None]) -> None:
        """A checkpoint is written: commit it once, and tell Ray, which does not copy it."""
        ...

    def once(self, work: Callable[[], None]) -> None:
        """Do something in one worker only."""
        ...

    def agree(self, value: int) -> int:
        """Rank 0's value, in every worker."""
        ...


@dataclass
class LocalSession:
    """A single process: what was said is kept."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def record(self, metrics: Event) -> None:
        self.events.append(metrics)

    def resume(self, step: int) -> None:
        self.events = [event for event in self.events if event.get("step", 0) <= step]

    def committed(self, folder: str, commit: Callable[[], None]) -> None:
        commit()

    def once(self, work: Callable[[], None]) -> None:
        work()

    def agree(self, value: int) -> int:
        return value


class RaySession:
    """A worker of Ray Train. Metrics go into the run directory; an actor holds them for the driver."""

    def __init__(self, run_folder: str, mailbox: Any):
        import ray.train

        self.rank = int(ray.train.get_context().get_world_rank())
        self._mailbox = mailbox
        self._metrics = MetricsFile(run_folder)

    def emit(self, event: Event) -> None:
        if self.rank == 0:
            self._mailbox.put.remote(event)

    def record(self, metrics: Event) -> None:
        if self.rank == 0:
            metrics = {**metrics, "time": round(time.time(), 3)}
            self._metrics.append(metrics)
            self.emit(metrics)

    def resume(self, step: int) -> None:
        if self.rank == 0:
            self._metrics.keep_until(step)

    def committed(self, folder: str, commit: Callable[[], None]) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        checkpoint = None
        if self.rank == 0:
            commit()
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def once(self, work: Callable[[], None]) -> None:
        if self.rank == 0:
            work()

    def agree(self, value: int) -> int:
        from ray.train.collective import broadcast_from_rank_zero

        return int(broadcast_from_rank_zero(value))


class MetricsFile:
    """`metrics.jsonl`: one object a line. An object store cannot append, so there the whole file is written anew."""

    def __init__(self, run_folder: str):
        self._uri = storage.join(run_folder, METRICS)
        self._lines: list[str] = []

    def keep_until(self, step: int) -> None:
        """Drop what was logged after a step, before the run goes on from there."""
        lines = storage.read_bytes(self._uri).decode().splitlines(keepends=True) if storage.exists(self._uri) else []
        whole = (line for line in lines if line.endswith("\n"))  # a killed process may leave half a line
        self._lines = [line for line in whole if json.loads(line)["step"] <= step]
        storage.write_bytes(self._uri, "".join(self._lines).encode())

    def append(self, metrics: Event) -> None:
        line = json.dumps(metrics) + "\n"
        if storage.is_remote(self._uri):
            self._lines.append(line)
            storage.write_bytes(self._uri, "".join(self._lines).encode())
            return
        with open(self._uri, "a") as file:  # noqa: PTH123
            file.write(line)


def last_metrics(run_folder: str) -> Event:
    """The last value of each metric that a run has logged."""
    uri = storage.join(run_folder, METRICS)
    last: Event = {}
    for line in storage.read_bytes(uri).splitlines() if storage.exists(uri) else []:
        last.update(json.loads(line))
    return last


class Mailbox:
    """An actor that holds events until the driver asks for them."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def put(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> list[Event]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events
