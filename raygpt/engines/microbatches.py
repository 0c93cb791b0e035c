"""How the rows of a batch are split into micro-batches, and the arrays of those that a process computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Microbatches:
    """`accumulation` micro-batches whose rows divide evenly among `groups` of devices; the rest is padding."""

    batch_rows: int
    accumulation: int
    groups: int  # of devices; each has different rows

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch, over all devices."""
        return -(-self.batch_rows // (self.accumulation * self.groups)) * self.groups

    @property
    def numbers(self) -> NDArray[np.int32]:
        """[accumulation, micro_rows]: which row of the batch each is; those from `batch_rows` on are padding."""
        return row_numbers(self.batch_rows, self.accumulation, self.micro_rows, self.groups)

    def numbers_of(self, group: int) -> NDArray[np.int32]:
        """The same for one group's rows."""
        return np.split(self.numbers, self.groups, axis=1)[group]


def row_numbers(batch_rows: int, accumulation: int, micro_rows: int, groups: int) -> NDArray[np.int32]:
    """[accumulation, micro_rows]: the rows of micro-batches. Over all of them a group has neighbouring rows of a batch,
    since these are neighbours in the shards of a scattered store too (see `corpus/lanes.py`), and as many as others."""
    bounds = np.arange(groups + 1) * batch_rows // groups
    numbers = bounds[:-1, None] + np.arange(accumulation * micro_rows // groups)  # [groups, places]
    padding = numbers >= bounds[1:, None]
    numbers[padding] = batch_rows + np.arange(np.count_nonzero(padding))
    by_group = numbers.astype(np.int32).reshape(groups, accumulation, -1)
    return by_group.swapaxes(0, 1).reshape(accumulation, micro_rows)


def needed_rows(numbers: NDArray[np.int32], batch_rows: int) -> list[int]:
    """The rows of the batch among these numbers, in order, each once, without padding."""
    return [int(row) for row in np.unique(numbers) if row < batch_rows]


def arrange(numbers: NDArray[np.int32], rows: Sequence[int], values: NDArray[Any]) -> NDArray[Any]:
    """Values [rows, …] of the batch's rows where `numbers` has these rows: [*numbers.shape, …]; padding is zero."""
    arranged = np.zeros((numbers.size, *values.shape[1:]), dtype=values.dtype)
    by_number = np.argsort(numbers, axis=None)
    arranged[by_number[np.searchsorted(numbers.ravel(), rows, sorter=by_number)]] = values
    return arranged.reshape(*numbers.shape, *values.shape[1:])
