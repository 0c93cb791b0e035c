"""How fast steps are taken."""

import time


class Clock:
    """Steps per second between two moments at which the device had done a step."""

    def __init__(self, step: int = 0) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin anew, after something that is not training."""
        self.step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Steps per second since the last lap."""
        now = time.perf_counter()
        speed = (step - self.step) / max(now - self._since, 1e-9)
        self.step, self._since = step, now
        return speed
