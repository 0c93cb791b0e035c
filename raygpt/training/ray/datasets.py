"""Rows of batches as Ray Datasets for user functions: every rank gets the rows that it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.train import DataConfig

from raygpt.corpus.feed import Feed, rows_of_worker, windows_dataset

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset


@dataclass(frozen=True)
class BatchRows:
    """Rows of some batches of a feed, and which of them a rank needs: by default an equal part of each batch."""

    feed: Feed
    batches: range
    rows_of: Callable[[int, int, int], Sequence[int]] = rows_of_worker  # takes batch_rows, rank, workers

    def all(self) -> "Dataset":
        return windows_dataset(self.feed, self.batches)

    def of_rank(self, rank: int, workers: int) -> "Dataset":
        return windows_dataset(self.feed, self.batches, self.rows_of(self.feed.batch_rows, rank, workers))


class RowsByRank(DataConfig):
    """Gives every rank its rows through `ray.train.get_dataset_shard`, batch after batch; Ray splits other datasets.

    Ray's own split gives blocks to whichever worker is ready: in no fixed order, and never the same row to two workers,
    which a tensor or context axis needs.
    """

    def __init__(self, rows: Mapping[str, BatchRows]) -> None:
        super().__init__()
        self._rows = rows

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, "DataIterator"]]:
        others = {name: dataset for name, dataset in datasets.items() if name not in self._rows}
        split = super().configure(others, world_size, worker_handles, worker_node_ids, **kwargs)
        for rank, iterators in enumerate(split):
            for name in datasets.keys() & self._rows.keys():
                dataset = self._rows[name].of_rank(rank, world_size)
                near = [worker_node_ids[rank]] if worker_node_ids else None
                (iterators[name],) = dataset.streaming_split(1, locality_hints=near)
        return split
