"""Which window of the corpus is row r of batch N: a pure function of (recipe, seed, N), without state.

A token stream is cut into W windows; window i starts at token i·context and has context+1 tokens, so that it holds
`context` inputs and the same number of targets. Row r of batch N is position p = N·rows + r of an endless sequence.
`shuffled` visits every window once per epoch: epoch p // W, window permute(p mod W). No list of indices exists: the
permutation is computed for the requested rows only, so a 9-billion-token store costs as much as a small one.

In a store that prepare has scattered, `shuffled` takes one group of shards after the other: see `lanes.py`. A batch's
row is a lane there, so position p is lane p mod rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raygpt.corpus.extents import Buckets
from raygpt.corpus.lanes import Group, LaneOrder
from raygpt.corpus.permutation import Integers, keyed, permute
from raygpt.errors import RaygptError

MIXTURE_BLOCK = 10_000  # rows in which a mixture's weights hold exactly, to four decimals
LANES = 0x4C414E45  # the key that assigns a mixture's lanes to its streams


def window_count(tokens: int, context: int) -> int:
    """How many windows of context+1 tokens, `context` apart, a stream of `tokens` has."""
    return max(0, (tokens - 1) // context)


def window_counts(buckets: Buckets, context: int) -> Integers:
    """The windows of each shard of a scattered store; none reaches over a shard's end."""
    return np.maximum(0, (buckets.tokens - 1) // context)


@dataclass(frozen=True)
class Order:
    """The sequence of windows that training sees: `shuffled`, `sequential` or `random` over one stream or a mixture."""

    kind: str
    seed: int
    context: int
    tokens: tuple[int, ...]  # length of each stream
    weights: tuple[float, ...] = (1.0,)  # fraction of rows drawn from each stream
    rows: int = 1  # of a batch
    buckets: tuple[Buckets | None, ...] = ()  # of each stream that is scattered over more shards than a group has

    def starts(self, positions: Sequence[int] | Integers) -> tuple[Integers, Integers]:
        """(stream, first token) of the window at each position of the sequence."""
        positions = np.asarray(positions, dtype=np.int64)
        streams, ranks = self._assign(positions)
        starts = np.empty_like(positions)
        for stream in range(len(self.tokens)):
            mine = streams == stream
            starts[mine] = self._starts_in(stream, ranks[mine])
        return streams, starts

    def reads_groups(self, stream: int, rows: Sequence[int] | Integers) -> bool:
        """Whether a stream is read group by group, and by these rows: in a mixture they may have none of its lanes."""
        return stream in self._grouped and len(self._lanes.of_rows(stream, rows)) > 0

    def upcoming(self, batch: int, rows: Sequence[int] | Integers, stream: int) -> Iterator[Group]:
        """What these rows read from a batch on of a stream that is read group by group; first and end are batches."""
        order, lanes = self._grouped[stream], self._lanes
        for group in order.upcoming(batch // lanes.batches * order.lanes, lanes.of_rows(stream, rows)):
            end = -(-group.end // order.lanes) * lanes.batches
            yield Group(group.first // order.lanes * lanes.batches, end, group.spans)

    def _assign(self, positions: Integers) -> tuple[Integers, Integers]:
        """Which stream serves each position, and how many rows of that stream came before it.

        In every block of 10,000 positions each stream has its exact share of places; a permutation of the block
        mixes them. The place's number tells both the stream and the rank, so nothing has to be counted.
        """
        if len(self.tokens) == 1:
            return np.zeros_like(positions), positions
        if self._grouped:
            return self._lanes.assign(positions)
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
        if stream in self._grouped:
            shards, places = self._grouped[stream].locate(ranks)
            return self._firsts[stream][shards] + places * self.context
        windows = window_count(self.tokens[stream], self.context)
        epoch, place = np.divmod(ranks, windows)
        if self.kind == "shuffled":
            place = permute(place, windows, keyed(self.seed, epoch, stream))
        return place * self.context

    @cached_property
    def _grouped(self) -> dict[int, LaneOrder]:
        """The orders of streams that are read group by group."""
        chosen = self.buckets if self.kind == "shuffled" else ()
        return {
            stream: LaneOrder(
                window_counts(buckets, self.context), buckets.group, self._lanes.quotas[stream], self.seed, stream
            )
            for stream, buckets in enumerate(chosen)
            if buckets
        }

    @cached_property
    def _firsts(self) -> dict[int, Integers]:
        """The first token of each shard of a grouped stream."""
        return {n: np.cumsum(b.tokens) - b.tokens for n, b in enumerate(self.buckets) if b}

    @cached_property
    def _lanes(self) -> "Lanes":
        """Each lane belongs to one stream. It is a row of every m-th batch, with m batches of at least 10,000 rows, in
        which the weights hold exactly; without a mixture it is a row of every batch."""
        batches = -(-MIXTURE_BLOCK // self.rows) if len(self.tokens) > 1 else 1
        quotas = mixture_quotas(self.weights, self.rows * batches)
        numbers = np.arange(self.rows * batches)
        places = permute(numbers, len(numbers), keyed(self.seed, np.full(len(numbers), LANES)))
        streams = np.searchsorted(np.cumsum(quotas), places, side="right")
        ranks = np.empty_like(numbers)
        for stream, quota in enumerate(quotas.tolist()):
            ranks[streams == stream] = np.arange(quota)
        return Lanes(self.rows, batches, quotas, streams, ranks)


@dataclass(frozen=True, eq=False)
class Lanes:
    """Lane row·m + (batch mod m) of m batches, its stream, and its number among that stream's lanes."""

    rows: int
    batches: int  # m
    quotas: Integers  # lanes of each stream
    streams: Integers  # of each lane
    ranks: Integers  # of each lane

    def assign(self, positions: Integers) -> tuple[Integers, Integers]:
        """Which stream serves each position, and how many rows of that stream come before it."""
        batch, row = np.divmod(positions, self.rows)
        block, turn = np.divmod(batch, self.batches)
        lane = row * self.batches + turn
        return self.streams[lane], block * self.quotas[self.streams[lane]] + self.ranks[lane]

    def of_rows(self, stream: int, rows: Sequence[int] | Integers) -> Integers:
        """The numbers of a stream's lanes that these rows read."""
        lanes = np.add.outer(np.asarray(rows) * self.batches, np.arange(self.batches)).ravel()
        chosen: Integers = self.ranks[lanes[self.streams[lanes] == stream]]
        return chosen


def mixture_quotas(weights: Sequence[float], block: int = MIXTURE_BLOCK) -> Integers:
    """Places of each stream in a block: the weights in ten-thousandths, rounded so that they fill it exactly."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * block
    quotas = np.floor(shares).astype(np.int64)
    left_over = block - int(quotas.sum())
    quotas[np.argsort(quotas - shares, kind="stable")[:left_over]] += 1
    if not quotas.all():
        raise RaygptError(
            f"data.source: a weight of {min(weights):g} is less than 1 row in {MIXTURE_BLOCK:,} and would never be "
            "drawn; raise it, or leave that source out"
        )
    return quotas
