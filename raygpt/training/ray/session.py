"""The loop's Session in a worker of Ray Train: metrics go into the run directory, events to the driver by an actor."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

from raygpt import storage
from raygpt.runs.metrics import MetricsFile
from raygpt.training.events import Event, Metrics, Restarted, Warned
from raygpt.training.session import Listener, Orders, steps_until_next_poll
from raygpt.training.watchdog import Watchdog

REPORT_INTERVAL_S = 5.0  # the shortest time between two reports of a checkpoint to Ray: all workers wait for each


class RaySession:
    """A worker of Ray Train."""

    def __init__(self, run_folder: str, mailbox: Any, watchdog: Watchdog):
        context = ray.train.get_context()
        self.rank, self.workers = int(context.get_world_rank()), int(context.get_world_size())
        self._mailbox, self._watchdog = mailbox, watchdog
        self._metrics = MetricsFile(run_folder, self.warn)
        self._listener: Listener | None = None
        self._preempted: Any = None  # Ray's last notice of nodes about to be lost
        self._unreported: str | None = None  # a checkpoint not yet reported to Ray
        self._reported = 0.0

    def emit(self, event: Event) -> None:
        if self.rank == 0:
            self._mailbox.put.remote(event)

    def listen(self, listener: Listener) -> None:
        """Also send metrics to `listener`; in rank 0."""
        self._listener = listener

    def warn(self, text: str) -> None:
        self.emit(Warned(text))

    def record(self, metrics: Metrics) -> None:
        if self.rank == 0:
            metrics = replace(metrics, time=round(time.time(), 3))
            self._metrics.append(metrics.line())
            self.emit(metrics)
            if self._listener:
                self._listener.record(metrics.line())

    def resume(self, step: int, is_validated: bool = True) -> None:
        if self.rank == 0:
            ray.get(self._mailbox.begin.remote())
            is_restart = self._metrics.keep_until(step, is_validated)
            if self._listener:
                self._listener.begin(step)
            if is_restart:
                self.record(Restarted(step))

    def beat(self, step: int) -> None:
        self._watchdog.feed()
        if self.rank == 0:
            self._mailbox.beat.remote(step)

    def rest(self) -> None:
        self._watchdog.rest()

    def orders(self, steps_per_s: float) -> Orders:
        """Takes two of Ray's collectives, about a millisecond each."""
        stop, save, report, next_poll = self._broadcast(self._wanted(steps_per_s) if self.rank == 0 else None)
        if report:
            self._report(str(report))
        preempted = ray.train.get_preemption_info()
        is_news, self._preempted = preempted is not None and preempted != self._preempted, preempted
        if is_news:
            self.warn("a node is about to be lost: saving before it goes")
        return Orders(stop, save or is_news, next_poll)

    def _wanted(self, steps_per_s: float) -> tuple[bool, bool, str | None, int]:
        """Rank 0: requests of the driver and the controller, the checkpoint to report to Ray, and when the next poll is
        due."""
        requests = ray.get(self._mailbox.take_requests.remote())
        is_time = time.monotonic() - self._reported > REPORT_INTERVAL_S
        report, self._unreported = (self._unreported, None) if is_time else (None, self._unreported)
        return "stop" in requests, "save" in requests, report, steps_until_next_poll(steps_per_s)

    def _report(self, folder: str) -> None:
        """Report a checkpoint's path to Ray, which copies nothing."""
        self._reported = time.monotonic()
        filesystem, path = storage.filesystem(folder) if storage.is_remote(folder) else (None, folder)
        checkpoint = Checkpoint(path, filesystem) if self.rank == 0 else None
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _broadcast(self, value: Any) -> Any:
        return broadcast_from_rank_zero(value)

    def decide(self, what: Callable[[], int]) -> int:
        return int(self._broadcast(what() if self.rank == 0 else None))

    def expect(self, step: int) -> None:
        ray.get(self._mailbox.expect.remote(step))

    def flush(self) -> None:
        if self.rank == 0:
            self._metrics.flush()

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        self._mailbox.add_part.remote(step, self.rank, part)

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = ray.get(self._mailbox.parts_of.remote(step))
        return parts

    def saved(self, step: int, folder: str) -> None:
        self._unreported = folder
        self._mailbox.saved.remote(step)

    def close(self) -> None:
        """Report the last checkpoint to Ray, and write all metrics."""
        report = self._broadcast(self._unreported)
        if report:
            self._report(report)
        self._watchdog.stop()
        self.flush()
        if self._listener:
            self._listener.close()

    def fail(self) -> None:
        """An error ends this worker: write and send the metrics logged so far."""
        self.flush()
        if self._listener:
            self._listener.close(succeeded=False)
