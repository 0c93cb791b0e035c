"""What a worker knows of the outside: its rank, its run directory, and who watches. On Ray, or in this process."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from raygpt import storage
from raygpt.runs.metrics import MetricsFile
from raygpt.training.watchdog import Watchdog

Event = dict[str, Any]
REPORTED_S = 5.0  # at least so long between two checkpoints that Ray is told of: each time all workers wait for it
ASKED_S = 5.0  # at most so long between two times that the workers ask what is wanted: a node may be about to go


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

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        """This worker's part of a checkpoint is written, or it says why not."""
        ...

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
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
    _parts: dict[int, dict[int, Any]] = field(default_factory=dict)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def warn(self, text: str) -> None:
        self.emit({"event": "warning", "text": text})

    def record(self, metrics: Event) -> None:
        self.events.append(metrics)

    def resume(self, step: int, is_validated: bool = True) -> None:
        self.events = [event for event in self.events if event.get("step", 0) <= step]

    def expect(self, step: int) -> None:
        self._parts.pop(step, None)

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

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        self._parts[step] = {0: part}

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        return self._parts.get(step, {})

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
            is_restart = self._metrics.keep_until(step, is_validated)
            if self._listener:
                self._listener.begin(step)
            if is_restart:
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

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        self._mailbox.add_part.remote(step, self.rank, part)

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        import ray

        parts: dict[int, dict[str, Any]] = ray.get(self._mailbox.parts_of.remote(step))
        return parts

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

    def fail(self) -> None:
        """An error ends this worker: what was logged is kept, and told."""
        self.flush()
        if self._listener:
            self._listener.close(is_well=False)


class Listener(Protocol):
    """Who else is told of the metrics: see tracking.py."""

    def begin(self, after: int) -> None: ...

    def record(self, event: Event) -> None: ...

    def close(self, is_well: bool = True) -> None: ...
