"""Which window of a scattered store is at a position of its order, so that a node needs little of the store at a time.

The shards of a scattered store are fair samples of the corpus (see `scatter.py`), so only a few need be open at once.
An epoch reads them in a keyed order, in groups of 1, 2, 4, 8, 8, 8, … shards: the first batch needs a small part of the
first shard, and each group can be fetched while the one before is trained on. Shards that do not fill a group make one
at the start too, so that the last steps, which count most, see a whole group. A group's windows are divided among the
lanes, the rows of a batch: each has a contiguous part of the group, and takes the windows of it in a keyed order.

    group        | shard 7 | shard 2 | shard 9 | shard 4 |
    lanes        |  0   |  1   |  2   |  3   |  4   |  5   |      position p belongs to lane p mod 6

So a process needs just its own lanes' parts of a group, and every window comes once per epoch. All of it is arithmetic
on the position: neither the number of processes nor what a node keeps has an influence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raygpt.corpus.permutation import Integers, keyed, permute

SHARDS, WINDOWS = 0x53484152, 0x57494E44  # keep the keys of shards and of windows apart


class Span(NamedTuple):
    """Neighbouring windows of a shard that some lanes will read."""

    shard: int
    first: int  # window of the shard
    windows: int


class Group(NamedTuple):
    """What some lanes read of a group of shards, and from when till when."""

    first: int  # position of the order; in `Order.upcoming` a batch
    end: int
    spans: list[Span]


@dataclass(frozen=True)
class Epoch:
    """One epoch's order of the shards."""

    shards: Integers  # in the order in which they are read
    ends: Integers  # windows up to and including each of these
    groups: Integers  # windows up to each group's end

    def group_at(self, place: Integers) -> Integers:
        return np.searchsorted(self.groups, place, side="right")

    def first_of(self, group: Integers) -> Integers:
        """The number of windows before a group."""
        return np.where(group > 0, self.groups[group - 1], 0)


class LaneOrder:
    """`shuffled` over one scattered stream; `stream` is its number in a mixture."""

    def __init__(self, windows: Integers, group: int, lanes: int, seed: int, stream: int = 0):
        self.windows, self.group = windows, group  # windows of each shard; shards in a group, a power of two
        self.lanes, self._seed, self._stream = lanes, seed, stream
        self.total = int(windows.sum())  # windows of an epoch
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """A million shards take 0.3 s to order, so this epoch's order is kept, and the next one's.

        Training and the thread that reads ahead share them, so the dictionary is replaced, never changed.
        """
        known = self._epochs.get(number)
        if known is None:
            keys = keyed(self._seed, number, self._stream, SHARDS, np.arange(len(self.windows)))
            shards = np.argsort(keys, kind="stable")
            ends = np.cumsum(self.windows[shards])
            known = Epoch(shards, ends, ends[group_ends(len(shards), self.group) - 1])
            near = {n: order for n, order in self._epochs.items() if abs(n - number) == 1}
            self._epochs = {**near, number: known}
        return known

    def locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """(shard, window in it) at each position of the endless order."""
        shards, windows = np.empty_like(positions), np.empty_like(positions)
        epochs, places = np.divmod(positions, self.total)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            shards[mine], windows[mine] = self._locate_in(epoch, places[mine])
        return shards, windows

    def _locate_in(self, epoch: int, places: Integers) -> tuple[Integers, Integers]:
        order = self.epoch(epoch)
        group = order.group_at(places)
        first = order.first_of(group)
        turn, part = np.divmod(places - first, self.lanes)
        starts, sizes = _parts(order.groups[group] - first, part, self.lanes)
        keys = keyed(self._seed, epoch, self._stream, WINDOWS, group, part)
        chosen = np.empty_like(places)
        for size in np.unique(sizes).tolist():  # few: the parts of a group differ by one window
            mine = sizes == size
            chosen[mine] = permute(turn[mine], size, keys[mine])
        place = first + starts + chosen
        rank = np.searchsorted(order.ends, place, side="right")
        shard = order.shards[rank]
        return shard, place - (order.ends[rank] - self.windows[shard])

    def upcoming(self, position: int, lanes: Sequence[int] | Integers) -> Iterator[Group]:
        """What these lanes read from a position on, one group after the other, without end."""
        wanted = np.unique(np.asarray(lanes, dtype=np.int64))
        epoch, place = divmod(position, self.total)
        group = int(self.epoch(epoch).group_at(np.asarray(place)))
        while True:
            yield self._read_by(wanted, epoch, group)
            group += 1
            if group == len(self.epoch(epoch).groups):
                epoch, group = epoch + 1, 0

    def _read_by(self, lanes: Integers, epoch: int, number: int) -> Group:
        order = self.epoch(epoch)
        first, end = int(order.first_of(np.asarray(number))), int(order.groups[number])
        position = epoch * self.total + first
        starts, sizes = _parts(np.asarray(end - first), np.sort((lanes - position) % self.lanes), self.lanes)
        spans = []
        for begin, stop in _merged(starts + first, starts + first + sizes):
            while begin < stop:
                rank = int(np.searchsorted(order.ends, begin, side="right"))
                shard, last = int(order.shards[rank]), min(stop, int(order.ends[rank]))
                spans.append(Span(shard, begin - int(order.ends[rank] - self.windows[shard]), last - begin))
                begin = last
        return Group(position, position + end - first, spans)


def group_ends(shards: int, group: int) -> Integers:
    """How many of over `group` shards have been read at each group's end: groups of 1, 2, 4, …, `group`, `group`, …

    What is left over is a group too, at its place by size: 20 shards are groups of 1, 2, 4, 5 and 8.
    """
    first = [1 << n for n in range(group.bit_length() - 1)]
    whole, left = divmod(shards - sum(first), group)
    return np.cumsum(sorted([*first, *[group] * whole, *[left][:left]]))


def _parts(windows: Integers, part: Integers, parts: int) -> tuple[Integers, Integers]:
    """First window and number of windows of each part, if so many windows are divided as evenly as possible."""
    size, more = np.divmod(windows, parts)
    return part * size + np.minimum(part, more), size + (part < more)


def _merged(starts: Integers, ends: Integers) -> Iterator[tuple[int, int]]:
    """Ranges in ascending order, with neighbours joined and empty ones left out."""
    held: tuple[int, int] | None = None
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start == end:
            continue
        if held and held[1] == start:
            held = (held[0], end)
            continue
        if held:
            yield held
        held = (start, end)
    if held:
        yield held
