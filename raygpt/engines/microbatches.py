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
        return row_numbers(self.accumulation, self.micro_rows, self.groups)

    def numbers_of(self, group: int) -> NDArray[np.int32]:
        """The same for one group's rows."""
        return np.split(self.numbers, self.groups, axis=1)[group]


def row_numbers(accumulation: int, micro_rows: int, groups: int) -> NDArray[np.int32]:
    """[accumulation, micro_rows]: the rows of micro-batches. A group has neighbouring rows of the batch over all of
    them, since these are neighbours in the shards of a scattered store too: see `corpus/lanes.py`."""
    numbers = np.arange(accumulation * micro_rows, dtype=np.int32).reshape(groups, accumulation, -1)
    return numbers.swapaxes(0, 1).reshape(accumulation, micro_rows)


def needed_rows(numbers: NDArray[np.int32], batch_rows: int) -> list[int]:
    """The rows of the batch among these numbers, in order, each once, without padding."""
    return [int(row) for row in np.unique(numbers) if row < batch_rows]


def arrange(numbers: NDArray[np.int32], rows: Sequence[int], values: NDArray[Any]) -> NDArray[Any]:
    """Values [rows, …] of the batch's rows where `numbers` has these rows: [*numbers.shape, …]; padding is zero."""
    arranged = np.zeros((numbers.size, *values.shape[1:]), dtype=values.dtype)
    by_number = np.argsort(numbers, axis=None)
    arranged[by_number[np.searchsorted(numbers.ravel(), rows, sorter=by_number)]] = values
    return arranged.reshape(*numbers.shape, *values.shape[1:])
