"""Prefetching in a thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any


def prefetch(items: Iterator[Any], ahead: int) -> Iterator[tuple[Any, float]]:
    """Yield each item with the seconds waited for it. A thread makes up to `ahead` items in advance."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                ready.put(("item", item))
            ready.put(("end", None))
        except BaseException as error:
            ready.put(("error", error))

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            started = time.perf_counter()
            kind, item = ready.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item, time.perf_counter() - started
    finally:
        stopped.set()
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()  # wakes a thread that waits for room, so that it sees that it should stop
