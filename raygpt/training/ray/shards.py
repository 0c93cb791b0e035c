"""Rows of batches as Ray datasets, for functions of one's own: every rank gets those that it needs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ray.train import DataConfig

from raygpt.corpus.feed import Feed, rows_of_worker, windows_dataset

if TYPE_CHECKING:
    from ray.data import DataIterator


class RowsByRank(DataConfig):
    """Gives every rank a dataset of the rows that it needs, through `ray.train.get_dataset_shard`.

    Ray's own split deals blocks to whichever worker is hungry: in no order, and never the same row to two workers,
    as a tensor or context axis wants it.
    """

    def __init__(
        self, feed: Feed, batches: range, rows_of: Callable[[int, int, int], Sequence[int]] = rows_of_worker
    ) -> None:
        super().__init__()
        self._feed, self._batches, self._rows_of = feed, batches, rows_of

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, "DataIterator"]]:
        return [
            {name: self._iterator(rank, world_size, worker_node_ids) for name in datasets} for rank in range(world_size)
        ]

    def _iterator(self, rank: int, world_size: int, node_ids: list[str] | None) -> "DataIterator":
        rows = self._rows_of(self._feed.batch_rows, rank, world_size)
        dataset = windows_dataset(self._feed, self._batches, rows)
        return dataset.streaming_split(1, locality_hints=[node_ids[rank]] if node_ids else None)[0]
