"""What a CPU reaches, measured by NumPy: a product and a copy, the best of a few.

Measured in a process of its own, whose environment gives it all cores: Ray's workers have as many threads as CPUs were
requested for them, and NumPy reads that number once, when it is imported.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache

import numpy as np

PRODUCT, REPEATS = 768, 10  # of the matrices: 0.1 s on two cores
TIMEOUT_S = 60.0


@cache  # a sweep plans many trials
def cpu_speed(cores: int) -> tuple[float, float]:
    """FLOP/s of products, and bytes/s of memory, of so many cores."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(cores))
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        peak, bandwidth = map(float, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):  # no process can be started here
        return _measured()
    return peak, bandwidth


def _measured() -> tuple[float, float]:
    ones, copied = np.ones((PRODUCT, PRODUCT), np.float32), np.empty(2**23, np.float32)
    return 2 * PRODUCT**3 / _best_time(lambda: ones @ ones), 2 * copied.nbytes / _best_time(copied.copy)


def _best_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


if __name__ == "__main__":
    print(*_measured())
