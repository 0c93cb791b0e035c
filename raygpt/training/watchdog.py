"""Ends a worker that takes no step for too long, after writing its stacks to the run's logs.

Ray then restarts the workers, as after any fault. The first worker to end takes down the others, which wait for it, so
each leaves the others time to write their stacks. Nothing here needs the interpreter lock, which a library may hold: a
thread of Python's faulthandler writes the stacks, and an alarm of the operating system ends the process.
"""

import faulthandler
import signal
import time
from pathlib import Path
from typing import TextIO

GRACE_S = 30.0  # between stacks and end, or half of a step's limit: not all workers get stuck at the same moment


class Watchdog:
    """Ends the process unless it is fed at least every `seconds`; `None` disables it."""

    def __init__(self, seconds: float | None, log: Path):
        self._seconds, self._fed = seconds, 0.0
        self._file: TextIO | None = log.open("a") if seconds else None
        self.feed()

    def feed(self) -> None:
        """Something moves."""
        now = time.monotonic()
        if self._file and self._seconds and now - self._fed > min(1, self._seconds / 4):  # setting it starts a thread
            faulthandler.dump_traceback_later(self._seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + min(GRACE_S, self._seconds / 2))
            self._fed = now

    def rest(self) -> None:
        """Suspend until it is fed again."""
        if self._file:
            _call_off()
            self._fed = 0.0

    def stop(self) -> None:
        """Disable for good."""
        if self._file:
            _call_off()
            self._file.close()
            self._file = None


def _call_off() -> None:
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
