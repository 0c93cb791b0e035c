"""Which window of the corpus is row r of batch N: a pure function of (recipe, seed, N), without state.

A token stream is cut into W windows; window i starts at token i·context and has context+1 tokens, so that it holds
`context` inputs and the same number of targets. Row r of batch N is position p = N·rows + r of an endless sequence.
`shuffled` visits every window once per epoch: epoch p // W, window permute(p mod W). No list of indices exists: the
permutation is computed for the requested rows only, so a 9-billion-token store costs as much as a small one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raygpt.errors import RaygptError

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 16  # of the Feistel network: with 8, some orders of 4 windows came up twice as often as others; with 16, none
MIXTURE_BLOCK = 10_000  # rows in which a mixture's weights hold exactly, to four decimals


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


def window_count(tokens: int, context: int) -> int:
    """How many windows of context+1 tokens, `context` apart, a stream of `tokens` has."""
    return max(0, (tokens - 1) // context)


@dataclass(frozen=True)
class Order:
    """The sequence of windows that training sees: `shuffled`, `sequential` or `random` over one stream or a mixture."""

    kind: str
    seed: int
    context: int
    tokens: tuple[int, ...]  # length of each stream
    weights: tuple[float, ...] = (1.0,)  # fraction of rows drawn from each stream

    def starts(self, positions: Sequence[int] | Integers) -> tuple[Integers, Integers]:
        """(stream, first token) of the window at each position of the sequence."""
        positions = np.asarray(positions, dtype=np.int64)
        streams, ranks = self._assign(positions)
        starts = np.empty_like(positions)
        for stream in range(len(self.tokens)):
            mine = streams == stream
            starts[mine] = self._starts_in(stream, ranks[mine])
        return streams, starts

    def _assign(self, positions: Integers) -> tuple[Integers, Integers]:
        """Which stream serves each position, and how many rows of that stream came before it.

        In every block of 10,000 positions each stream has its exact share of places; a permutation of the block
        mixes them. The place's number tells both the stream and the rank, so nothing has to be counted.
        """
        if len(self.tokens) == 1:
            return np.zeros_like(positions), positions
        quotas = mixture_quotas(self.weights)
        ends = np.cumsum(quotas)
        block, offset = np.divmod(positions, MIXTURE_BLOCK)
        place = permute(offset, MIXTURE_BLOCK, keyed(self.seed, block, 0x4D495845))
        streams = np.searchsorted(ends, place, side="right")
        return streams, block * quotas[streams] + place - (ends - quotas)[streams]

    def _starts_in(self, stream: int, ranks: Integers) -> Integers:
        if self.kind == "random":  # with replacement, from any token
            choices = self.tokens[stream] - self.context
            return (keyed(self.seed, ranks, stream) % np.uint64(choices)).astype(np.int64)
        windows = window_count(self.tokens[stream], self.context)
        epoch, place = np.divmod(ranks, windows)
        if self.kind == "shuffled":
            place = permute(place, windows, keyed(self.seed, epoch, stream))
        return place * self.context


def mixture_quotas(weights: Sequence[float]) -> Integers:
    """Places of each stream in a block: the weights in ten-thousandths, rounded so that they fill it exactly."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * MIXTURE_BLOCK
    quotas = np.floor(shares).astype(np.int64)
    left_over = MIXTURE_BLOCK - int(quotas.sum())
    quotas[np.argsort(quotas - shares, kind="stable")[:left_over]] += 1
    if not quotas.all():
        raise RaygptError(
            f"data.source: a weight of {min(weights):g} is less than 1 row in {MIXTURE_BLOCK:,} and would never be "
            "drawn; raise it, or leave that source out"
        )
    return quotas
