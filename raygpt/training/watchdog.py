"""A worker that takes no step for too long is stuck: its stacks are written to the run's logs, and then it ends.

Then Ray starts the workers again, as after any fault. The first to end takes the others with it, which wait for it: so
each leaves the others time to show where they are. Nothing here needs the interpreter, which a library may hold: the
stacks are written by a thread of Python's faulthandler, and the end is an alarm of the operating system.
"""

import faulthandler
import signal
import time
from pathlib import Path
from typing import TextIO

GRACE_S = 30.0  # between stacks and end, or half of what a step may take: workers are not all stuck at the same moment


class Watchdog:
    """Has to be fed at least every so many seconds; `None` is a dog that sleeps."""

    def __init__(self, seconds: float | None, log: Path):
        self._seconds, self._fed = seconds, 0.0
        self._file: TextIO | None = log.open("a") if seconds else None
        self.feed()

    def feed(self) -> None:
        """Something moves."""
        now = time.monotonic()
        if self._file and self._seconds and now - self._fed > min(1, self._seconds / 4):  # setting it takes a thread
            faulthandler.dump_traceback_later(self._seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + min(GRACE_S, self._seconds / 2))
            self._fed = now

    def rest(self) -> None:
        """Nothing needs to move until it is fed again."""
        if self._file:
            _call_off()
            self._fed = 0.0

    def stop(self) -> None:
        """Watch no more."""
        if self._file:
            _call_off()
            self._file.close()
            self._file = None


def _call_off() -> None:
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
