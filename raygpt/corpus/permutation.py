"""Keyed random numbers and permutations, computed for the requested positions only; the same on every machine."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 16  # of the Feistel network: with 8, some orders of 4 windows came up twice as often as others; with 16, none


def mix(values: Words) -> Words:
    """SplitMix64's finaliser: every input bit reaches every output bit. Written out so that it never changes."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keyed(seed: int, *parts: Integers | int) -> Words:
    """A 64-bit number for (seed, parts), the same on every machine; parts are arrays that broadcast."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        state = mix(np.atleast_1d(np.asarray(seed % 2**64, dtype=np.uint64)) + golden)
        for part in parts:
            state = mix((state ^ np.asarray(part).astype(np.uint64)) + golden)
    return state


def permute(positions: Integers, size: int, keys: Words) -> Integers:
    """Where each position in [0, size) goes under the permutation of its key.

    A Feistel network over pairs (left, right) of Z_a × Z_b with a·b just above `size`; a result beyond `size` is
    permuted again until it lands inside, which is still a bijection and hardly ever happens (a·b - size < a ≈ √size).
    """
    a = max(1, int(np.ceil(np.sqrt(size))))
    b = -(-size // a)
    result = positions.astype(np.int64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = np.divmod(result[outside], b)
        for round_ in range(ROUNDS):
            if round_ % 2 == 0:
                left = (left + _round(keys[outside], round_, right, a)) % a
            else:
                right = (right + _round(keys[outside], round_, left, b)) % b
        result[outside] = left * b + right
        outside = result >= size
    return result


def _round(keys: Words, round_: int, half: Integers, modulus: int) -> Integers:
    with np.errstate(over="ignore"):
        mixed = mix((keys ^ mix(half.astype(np.uint64) + np.uint64(round_))) + np.uint64(0x9E3779B97F4A7C15))
    return (mixed % np.uint64(modulus)).astype(np.int64)
