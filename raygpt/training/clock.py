"""Training speed in steps per second."""

import time


class Clock:
    """Steps per second between two laps, each taken when the device has finished a step."""

    def __init__(self, step: int = 0) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start measuring again, after something that is not training."""
        self.step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Steps per second since the last lap."""
        now = time.perf_counter()
        speed = (step - self.step) / max(now - self._since, 1e-9)
        self.step, self._since = step, now
        return speed
