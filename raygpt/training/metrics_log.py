"""Logs metrics in a thread that waits for the device, so that the loop does not have to."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from raygpt.training.clock import Clock

WAIT_S = 60.0  # how long a save waits for the metrics up to its step to be logged

Record = Callable[[int, Any, float, Clock], None]  # step, metrics, seconds waited for data, clock of the logged steps


class MetricsLog:
    """Calls `record` for each step put into it. The loop may be two logged steps ahead of it."""

    def __init__(self, record: Record):
        self.data_wait_s = 0.0  # since the last `put`
        self._record, self._clock = record, Clock()
        self._waiting: queue.Queue[tuple[int, Any, float]] = queue.Queue(1)
        self._unlogged: list[int] = []  # steps, in order
        self._error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, step: int, metrics: Any) -> None:
        """Log a step as soon as the device has finished it. Raises the error of an earlier step, if any."""
        if self._error:
            raise self._error
        self._unlogged.append(step)
        self._waiting.put((step, metrics, self.data_wait_s))
        self.data_wait_s = 0.0

    def flush(self) -> None:
        """Wait until everything is logged. Raises the error of a step, if any."""
        self._waiting.join()
        if self._error:
            raise self._error

    def wait_for(self, step: int) -> None:
        """Wait until everything up to a step is logged, but at most WAIT_S."""
        until = time.perf_counter() + WAIT_S
        while any(one <= step for one in [*self._unlogged]) and time.perf_counter() < until:
            time.sleep(0.01)

    def restart(self, step: int) -> None:
        """Restart the clock after a step: time that was not spent on training does not count."""
        self.data_wait_s = 0.0
        self._clock.restart(step)

    def _work(self) -> None:
        while True:
            step, metrics, waited = self._waiting.get()
            try:
                self._record(step, metrics, waited, self._clock)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._unlogged.remove(step)
                self._waiting.task_done()
