"""A worker that takes no step for too long is stuck: its stacks are written to the run's logs, and it ends.

Then Ray starts the workers again, as after any fault. The watching is done by Python's faulthandler, in a thread that
needs no interpreter: it also barks where a library holds it.
"""

import faulthandler
import time
from pathlib import Path
from typing import TextIO


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
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
            self._fed = now

    def rest(self) -> None:
        """Nothing needs to move until it is fed again."""
        if self._file:
            faulthandler.cancel_dump_traceback_later()
            self._fed = 0.0

    def stop(self) -> None:
        """Watch no more."""
        if self._file:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None
