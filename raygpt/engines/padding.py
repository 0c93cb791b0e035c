"""Pads shapes to sizes that devices compute fast, and to few different ones, which are compiled."""

from math import gcd

import numpy as np
from numpy.typing import NDArray

VOCAB_MULTIPLE = 128  # matrix units need multiples; ids beyond the vocabulary never leave an engine
SHORTEST = 128  # of the lengths that a model is compiled for


def padded_vocab(vocab: int) -> int:
    """Rows of the token tables as the engines keep them."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def pad_windows(
    windows: NDArray[np.int32], longest: int, row_shards: int = 1, time_shards: int = 1
) -> NDArray[np.int32]:
    """Windows [rows, time + 1] padded with zeros: the rows to a power of two, the time to a bucket, or more where its
    shards would not be multiples of 128, as kernels for TPUs want them, though those of the longest are.

    Padding is after or below the data, which does not depend on it.
    """
    rows, time = len(windows), windows.shape[1] - 1
    padded = -(-(1 << (rows - 1).bit_length()) // row_shards) * row_shards
    multiple = time_shards * gcd(longest // time_shards, SHORTEST)
    longer = -(-bucket(time, longest) // multiple) * multiple
    return np.pad(windows, ((0, padded - rows), (0, longer - time)))


def bucket(length: int, longest: int) -> int:
    """The length to compile for: a power of two, so that texts of all lengths share a few programs."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)
