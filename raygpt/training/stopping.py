"""Stops a run so that it can be resumed: by Ctrl-C, a signal, or `raygpt stop RUN`. All workers save, then end.

A second Ctrl-C ends the run immediately, but not within a second of the first: `timeout` and schedulers signal the
process and then its group, so that one request comes twice. `raygpt stop` leaves a file in the run directory, which the
driver polls for.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.runs.lock import lock_owner
from raygpt.training.events import Event, StopRequested

STOP_FILE = "stop"
STOP_POLL_S = 2.0  # between two polls for the file of `raygpt stop`
AGAIN_S = 1.0  # after which a signal is a second request
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, `kill` and `ray job stop`, a closed terminal


@contextlib.contextmanager
def stoppable(
    run_folder: str, stop_workers: Callable[[], object], watch: Callable[[Event], None]
) -> Iterator[Callable[[], None]]:
    """Inside the block signals order the workers to save and end. Yields the function that polls for `raygpt stop`."""
    uri = storage.join(run_folder, STOP_FILE)
    requested = threading.Event()
    polled = signalled = time.monotonic()
    unsaid: list[StopRequested] = []  # printed later: a signal may interrupt a print

    def ask(who: str, by_signal: bool) -> None:
        requested.set()
        stop_workers()
        unsaid.append(StopRequested(f"{who}: saving after one of the next steps", by_signal))

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if requested.is_set():
            if time.monotonic() - signalled >= AGAIN_S:
                raise KeyboardInterrupt
            return
        signalled = time.monotonic()
        ask(f"{signal.Signals(number).name}, once more to stop at once", by_signal=True)

    def poll() -> None:
        nonlocal polled
        while unsaid:
            watch(unsaid.pop(0))
        if requested.is_set() or time.monotonic() - polled < STOP_POLL_S:
            return
        polled = time.monotonic()
        with contextlib.suppress(OSError, RaygptError):
            if storage.exists(uri):
                storage.delete(uri)
                ask("stopped by raygpt stop", by_signal=False)

    with _handled(on_signal):
        yield poll


def clear_stop_request(run_folder: str) -> None:
    """Delete a request that came after an earlier process of the run had ended."""
    storage.delete(storage.join(run_folder, STOP_FILE))


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals; Python allows that in the main thread only, so in others nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What nohup has made the process ignore stays ignored: a terminal that is closed.
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def ask_to_stop(run_folder: str) -> str:
    """Leave the request for a run's driver. Returns who that is."""
    owner = lock_owner(run_folder)
    if owner is None or owner.is_gone:
        raise RaygptError(f"{run_folder} is not being trained; there is nothing to stop")
    storage.write_bytes(storage.join(run_folder, STOP_FILE), b"")
    return str(owner)
