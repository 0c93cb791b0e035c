"""The order of a scattered store: against a slow reference in plain Python, and by what must always hold."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raygpt.corpus.extents import Buckets
from raygpt.corpus.lanes import LaneOrder, group_ends
from raygpt.corpus.order import Order
from raygpt.engines.microbatches import Microbatches, needed_rows
from tests.corpus.test_order import slow_key, slow_permute, slow_start

seeds = st.integers(0, 2**64 - 1)


@st.composite
def scattered(draw: st.DrawFn, streams: int = 1) -> Order:
    context = draw(st.integers(1, 5))
    buckets = []
    for _ in range(streams):
        group = draw(st.sampled_from([1, 2, 4]))
        tokens = draw(st.lists(st.integers(0, 30), min_size=group + 1, max_size=20))
        buckets.append(Buckets(np.array([context + 1, *tokens]), group))
    weights = draw(st.lists(st.floats(0.1, 10), min_size=streams, max_size=streams))
    lengths = tuple(int(b.tokens.sum()) for b in buckets)
    return Order("shuffled", draw(seeds), context, lengths, tuple(weights), draw(st.integers(1, 12)), tuple(buckets))


# The reference: lists, one position at a time


def slow_epoch(order: Order, epoch: int, lanes: int, stream: int = 0) -> list[int]:
    """The first token of every window of an epoch, in the order of training."""
    buckets = order.buckets[stream]
    assert buckets is not None
    firsts = [0, *itertools.accumulate(buckets.tokens.tolist())]
    windows = [
        [first + n * order.context for n in range(max(0, (tokens - 1) // order.context))]
        for first, tokens in zip(firsts, buckets.tokens.tolist(), strict=False)
    ]
    shard_key = [slow_key(order.seed, epoch, stream, 0x53484152, shard) for shard in range(len(windows))]
    shards = sorted(range(len(windows)), key=lambda shard: shard_key[shard])
    total, done = sum(map(len, windows)), []
    for number, size in enumerate(slow_group_sizes(len(shards), buckets.group)):
        group, shards = shards[:size], shards[size:]
        pool = [start for shard in group for start in windows[shard]]
        done += slow_group(order, epoch, stream, number, pool, lanes)
    assert len(done) == total
    return done


def slow_group_sizes(shards: int, group: int) -> list[int]:
    """Double up to the size of a group; a rest that does not fill one is not read last, but where it fits by size."""
    sizes = [1]
    while sum(sizes) < shards:
        sizes.append(min(2 * sizes[-1], group, shards - sum(sizes)))
    return sorted(sizes)


def slow_group(order: Order, epoch: int, stream: int, number: int, pool: list[int], lanes: int) -> list[int]:
    """Each lane takes one window in turn from its part of the pool, in its own order."""
    sizes = [len(pool) // lanes + (lane < len(pool) % lanes) for lane in range(lanes)]
    begins = [0, *itertools.accumulate(sizes)]
    taken = []
    for turn, lane in itertools.product(range(max(sizes)), range(lanes)):
        if turn < sizes[lane]:
            key = slow_key(order.seed, epoch, stream, 0x57494E44, number, lane)
            taken.append(pool[begins[lane] + slow_permute(turn, sizes[lane], key)])
    return taken


@given(order=scattered(), epoch=st.integers(0, 3))
def test_the_order_is_that_of_the_slow_reference(order: Order, epoch: int) -> None:
    expected = slow_epoch(order, epoch, order.rows)
    positions = np.arange(len(expected)) + epoch * len(expected)
    assert order.starts(positions)[1].tolist() == expected


@given(order=scattered(), epoch=st.integers(0, 10**6))
def test_every_window_comes_once_per_epoch_and_none_reaches_over_a_shards_end(order: Order, epoch: int) -> None:
    buckets = order.buckets[0]
    assert buckets is not None
    windows = int(((buckets.tokens - 1).clip(0) // order.context).sum())
    _, starts = order.starts(np.arange(windows) + epoch * windows)
    assert len(set(starts.tolist())) == windows
    ends = np.cumsum(buckets.tokens)
    shard = np.searchsorted(ends, starts, side="right")
    assert (starts + order.context + 1 <= ends[shard]).all()


@settings(max_examples=20)
@given(order=scattered(streams=2), chosen=st.data())
def test_a_position_is_a_pure_function(order: Order, chosen: st.DataObject) -> None:
    positions = chosen.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
    together = order.starts(positions)
    for number, position in enumerate(positions):
        fresh = Order(
            order.kind, order.seed, order.context, order.tokens, order.weights, order.rows, order.buckets
        ).starts([position])
        assert (together[0][number], together[1][number]) == (fresh[0][0], fresh[1][0])


@settings(max_examples=30)
@given(order=scattered(), group=st.integers(1, 4), accumulation=st.integers(1, 3), batch=st.integers(0, 200))
def test_what_a_process_reads_lies_in_the_spans_of_its_rows(
    order: Order, group: int, accumulation: int, batch: int
) -> None:
    split = Microbatches(order.rows, accumulation, group)
    for process in range(group):
        rows = needed_rows(split.numbers_of(process), order.rows)
        if rows:
            assert rows == list(range(rows[0], rows[-1] + 1))  # neighbours, so that it reads few pieces
            check_spans(order, rows, batch)


def check_spans(order: Order, rows: list[int], batch: int) -> None:
    """The windows of 20 batches lie in the spans that are needed by then."""
    buckets = order.buckets[0]
    assert buckets is not None
    ends = np.cumsum(buckets.tokens)
    groups = list(itertools.takewhile(lambda group: group.first < batch + 20, order.upcoming(batch, rows, 0)))
    for number in range(batch, batch + 20):
        _, starts = order.starts(number * order.rows + np.array(rows))
        for start in starts.tolist():
            shard = int(np.searchsorted(ends, start, side="right"))
            window = (start - int(ends[shard] - buckets.tokens[shard])) // order.context
            now = [span for group in groups if group.first <= number < group.end for span in group.spans]
            assert any(s.shard == shard and s.first <= window < s.first + s.windows for s in now)


def test_processes_together_read_each_window_of_a_group_once() -> None:
    order = Order("shuffled", 3, 4, (20_000,), (1.0,), 24, (Buckets(np.full(20, 1000), 4),))
    for processes in (1, 3, 8):
        spans = [
            span
            for process in range(processes)
            for group in itertools.islice(order.upcoming(0, range(24)[process::processes], 0), 7)
            for span in group.spans
        ]
        read = Counter(
            (span.shard, window) for span in spans for window in range(span.first, span.first + span.windows)
        )
        assert len(read) == 20 * 249  # groups of 1, 1, 2, 4, 4, 4 and 4 shards
        assert set(read.values()) == {1}


def test_neighbouring_rows_read_one_piece_of_each_group() -> None:
    order = Order("shuffled", 3, 4, (20_000,), (1.0,), 24, (Buckets(np.full(20, 1000), 4),))
    groups = [group.spans for group in itertools.islice(order.upcoming(0, range(6, 12), 0), 3, 6)]
    assert all(len(spans) <= 3 for spans in groups)  # a piece may reach over a shard's end, or begin again at the front
    assert [sum(span.windows for span in spans) for spans in groups] == pytest.approx([249] * 3, abs=6)


@pytest.mark.parametrize(("nodes", "accumulation"), [(1, 1), (3, 8), (8, 8)])
def test_nodes_fetch_little_more_than_they_train_on_with_any_accumulation(nodes: int, accumulation: int) -> None:
    shard, context, block = 15_000_000, 1024, 2**17
    order = Order("shuffled", 1, context, (100 * shard,), (1.0,), 480, (Buckets(np.full(100, shard)),))
    for node in range(nodes):
        rows = needed_rows(Microbatches(480, accumulation, nodes).numbers_of(node), 480)
        groups = list(itertools.islice(order.upcoming(0, rows, 0), 15))
        ends = [(s.first * context // block, (s.first + s.windows) * context // block) for g in groups for s in g.spans]
        trained = sum(span.windows * context for group in groups for span in group.spans)
        assert sum(last + 1 - first for first, last in ends) * block < 1.05 * trained


@pytest.mark.parametrize(
    ("shards", "group", "ends"), [(20, 8, [1, 3, 7, 12, 20]), (24, 4, [1, 2, 4, 8, 12, 16, 20, 24]), (2, 1, [1, 2])]
)
def test_groups_double_up_to_their_size_and_the_last_one_is_whole(shards: int, group: int, ends: list[int]) -> None:
    assert group_ends(shards, group).tolist() == ends


@pytest.mark.parametrize(("rows", "block"), [(1, 0), (7, 3), (480, 1000), (20_000, 5)])
def test_a_mixtures_weights_hold_in_every_block_of_batches(rows: int, block: int) -> None:
    buckets, weights = Buckets(np.full(12, 9000), 4), (0.5, 0.37, 0.13)
    order = Order("shuffled", 1, 4, (108_000,) * 3, weights, rows, (buckets, None, buckets))
    size = -(-10_000 // rows) * rows
    streams, _ = order.starts(np.arange(size) + block * size)
    assert np.bincount(streams, minlength=3) / size == pytest.approx(np.array(weights), abs=1 / size)


@pytest.mark.parametrize("rows", [7, 480])
def test_every_stream_of_a_mixture_is_read_as_alone_with_its_own_lanes(rows: int) -> None:
    """A grouped stream, and one that is permuted whole, as before."""
    buckets = Buckets(np.random.default_rng(rows).integers(100, 900, 30), 4)
    order = Order("shuffled", rows, 3, (int(buckets.tokens.sum()), 5000), (0.6, 0.4), rows, (buckets, None))
    size = -(-10_000 // order.rows) * order.rows
    streams, starts = order.starts(np.arange(size))
    lanes = int((streams == 0).sum())
    alone: list[int] = []
    for epoch in itertools.count():
        if len(alone) >= lanes:
            break
        alone += slow_epoch(order, epoch, lanes)
    assert sorted(starts[streams == 0].tolist()) == sorted(alone[:lanes])
    whole = [slow_start(order, rank, 1) for rank in range(int((streams == 1).sum()))]
    assert sorted(starts[streams == 1].tolist()) == sorted(whole)


def test_an_order_of_a_million_shards_is_reached_anywhere_at_once() -> None:
    tokens = np.random.default_rng(1).integers(14_000_000, 16_000_000, 1_000_000)
    order = LaneOrder((tokens - 1) // 1024, 8, 512, 1)
    order.locate(np.arange(512))
    started = time.process_time()
    shards, windows = order.locate(np.arange(512) + 123_456_789_012)
    assert time.process_time() - started < 5  # 0.4 s on an idle core; the whole epoch's order of shards is new
    assert len(np.unique(shards)) <= 9
    assert (windows < order.windows[shards]).all()
