"""Reads the rows of batch N by memory map; for user functions also as a Ray Dataset.

Both read the same windows by index, so both give the same rows in the same batches for any number of workers, also to
several workers that need the same row.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raygpt.corpus.fetching import Report
from raygpt.corpus.order import Order, window_count
from raygpt.corpus.store import TokenStream
from raygpt.errors import RaygptError

if TYPE_CHECKING:
    import ray.data

ROWS_PER_TASK = 1024  # 8 MB of x and y at a context of 1024: 64 tasks hold half a gigabyte


class Feed:
    """Reads any row of any batch. Row r of batch N is position N·rows + r of the order; see `order.py`."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        *,
        context: int,
        batch_rows: int,
        order: str = "shuffled",
        seed: int = 0,
        weights: Sequence[float] = (1.0,),
    ):
        self.context, self.batch_rows, self.kind, self.seed = context, batch_rows, order, seed
        self.streams, self._weights = tuple(streams), tuple(weights)
        self._report: Report | None = None
        self._known: Order | None = None  # over the tokens that the streams had at the last read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "_report": None}  # each process has its own

    def rows(self, batch: int, rows: Sequence[int] | None = None) -> NDArray[np.int32]:
        """These rows of a batch, or all: int32 [rows, context + 1]. Inputs are [:, :-1], targets [:, 1:]."""
        chosen = np.arange(self.batch_rows) if rows is None else np.asarray(rows, dtype=np.int64)
        positions = batch * self.batch_rows + chosen
        if self._report:
            self._follow(batch, chosen, self._order(int(positions.max(initial=0))), self._report)
        return self.windows(positions)

    def read_ahead(self, report: Report) -> None:
        """From now on, fetch what the rows of later batches need from an object store; `report` receives messages about
        waits."""
        self._report = report

    def _follow(self, batch: int, rows: NDArray[np.int64], order: Order, report: Report) -> None:
        for number, stream in enumerate(self.streams):
            if stream.cached and stream.read_ahead:
                stream.cached.report = report
                if order.reads_groups(number, rows):
                    upcoming = partial(order.upcoming, batch, rows, number)
                    stream.read_ahead.follow(batch, tuple(rows.tolist()), self.context, upcoming)

    def windows(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The windows at these positions of the order: int32 [positions, context + 1]."""
        order = self._order(int(positions.max(initial=0)))
        streams, starts = order.starts(positions)
        windows = np.empty((len(positions), self.context + 1), dtype=np.int32)
        for number, stream in enumerate(self.streams):
            mine = streams == number
            windows[mine] = stream.windows(starts[mine], self.context + 1)
        return windows

    def _order(self, last: int) -> Order:
        """The order over the streams' tokens. For a growing stream `sequential` needs only those up to position `last`;
        every other order depends on the final number."""
        grows = self.kind == "sequential" and len(self.streams) == 1
        needed = (last + 1) * self.context + 1 if grows else sys.maxsize
        tokens = tuple(stream.wait(needed) for stream in self.streams)
        if self._known and self._known.tokens == tokens:
            return self._known
        for stream, count in zip(self.streams, tokens, strict=True):
            if not stream.window_count(self.context):
                raise RaygptError(
                    f"{stream.folder} has {count} tokens, fewer than a window of {self.context + 1}; "
                    "set model.context lower, or use more text"
                )
        buckets = tuple(stream.buckets for stream in self.streams)
        self._known = Order(self.kind, self.seed, self.context, tokens, self._weights, self.batch_rows, buckets)
        return self._known


def rows_of_worker(batch_rows: int, rank: int, workers: int) -> range:
    """The rows of a batch for one worker if each has different rows: contiguous, and divided as evenly as possible."""
    return range(batch_rows * rank // workers, batch_rows * (rank + 1) // workers)


def windows_dataset(feed: Feed, batches: range, rows: Sequence[int] | None = None) -> "ray.data.Dataset":
    """These rows of these batches as a Ray Dataset, in order: columns `x` and `y`, int32 [context], y shifted by one.

    Lazy: the driver only has a range of row numbers. Iterating with a batch size of `len(rows)` gives batch after
    batch.
    """
    import ray.data

    chosen = np.arange(feed.batch_rows) if rows is None else np.asarray(rows, dtype=np.int64)
    total = len(batches) * len(chosen)
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True  # otherwise rows come as tasks finish
    with ray.data.DataContext.current(context):
        numbers = ray.data.range(total, override_num_blocks=max(1, min(total, -(-total // ROWS_PER_TASK))))
        read = partial(_read_rows, feed=feed, batches=batches, rows=chosen)
        return numbers.map_batches(read, batch_size=min(ROWS_PER_TASK, max(1, total)))


def _read_rows(
    numbers: dict[str, NDArray[np.int64]], feed: Feed, batches: range, rows: NDArray[np.int64]
) -> dict[str, NDArray[np.int32]]:
    batch, row = np.divmod(numbers["id"], len(rows))
    windows = feed.windows((batches.start + batch * batches.step) * feed.batch_rows + rows[row])
    return {"x": windows[:, :-1], "y": windows[:, 1:]}


def val_windows(
    streams: Sequence[TokenStream], context: int, rows: int, limit: int | None = None
) -> Iterator[NDArray[np.int32]]:
    """All validation windows, `context` apart, some rows at a time; or `limit` of them, evenly spaced.

    Always the same, in the same order.
    """
    counts = [window_count(len(stream), context) for stream in streams]
    total = sum(counts)
    chosen = np.arange(total) if limit is None or limit >= total else np.arange(limit) * total // limit
    for stream, count, first in zip(streams, counts, np.cumsum([0, *counts]), strict=False):
        starts = (chosen[(chosen >= first) & (chosen < first + count)] - first) * context
        for begin in range(0, len(starts), rows):
            yield stream.windows(starts[begin : begin + rows], context + 1)
