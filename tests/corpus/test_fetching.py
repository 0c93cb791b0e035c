"""A scattered store in an object store: right rows through a bounded cache, whatever the store and the disk do."""

import contextlib
import glob
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raygpt.corpus import cache as caching
from raygpt.corpus import fetching
from raygpt.corpus.cache import Block, BlockCache, Need
from raygpt.corpus.feed import Feed, rows_of_worker
from raygpt.corpus.lanes import Group
from raygpt.corpus.mixture import Mixture
from raygpt.corpus.readahead import ReadAhead
from raygpt.corpus.store import TokenStore, open_store
from raygpt.errors import DamagedError, RaygptError
from raygpt.testing.object_store import ArithmeticStore, ObjectStore

CONTEXT, ROWS = 256, 48
STORE = ArithmeticStore(40, 400_000)  # 0.8 MB and four blocks a shard


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectStore]:
    """An object store that holds STORE, and an empty cache."""
    made = ObjectStore(STORE)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "PAUSES_S", (0.01,))
    yield made
    made.close()


def opened(limit: float = 1e9, order: str = "shuffled") -> tuple[TokenStore, Feed]:
    store = open_store("s3://bucket/store")
    store.train.cache_bytes = int(limit)
    feed = Feed([store.train], context=CONTEXT, batch_rows=ROWS, order=order, seed=5)
    feed.read_ahead(fetching.to_stderr)
    return store, feed


def expected(feed: Feed, batch: int) -> list[list[int]]:
    """The rows of a batch, from the store's arithmetic."""
    _, starts = feed._order(0).starts(batch * ROWS + np.arange(ROWS))
    ends = np.cumsum(STORE.counts)
    rows = []
    for start in starts.tolist():
        shard = int(np.searchsorted(ends, start, side="right"))
        first = start - int(ends[shard] - STORE.counts[shard])
        rows.append(STORE.ids(shard, first, first + CONTEXT + 1).tolist())
    return rows


def used(folder: Path) -> int:
    total = 0
    for path in glob.glob(f"{folder}/cache/raygpt/blocks/*/*/*"):
        with contextlib.suppress(FileNotFoundError):  # evicted since
            total += Path(path).stat().st_size
    return total


def test_rows_come_right_through_a_cache_that_never_exceeds_its_limit(server: ObjectStore, tmp_path: Path) -> None:
    store, feed = opened(limit=12e6)  # a group has 6.4 MB; the store has 32 MB
    for batch in range(1000):
        rows = feed.rows(batch)
        if batch % 100 == 0:
            assert rows.tolist() == expected(feed, batch)
            assert used(tmp_path) <= 12e6
    store.train.close()
    assert server.counts["bytes"] > 18e6  # the cache was turned over


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_batches_are_equal_for_any_number_of_nodes_and_each_fetches_its_own_part(
    server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    fetched = []
    batches = {}
    for node in range(nodes):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(node)))
        monkeypatch.setattr("raygpt.corpus.readahead.HORIZON_S", 0.0)
        store, feed = opened()
        before = server.counts["bytes"]
        for batch in (*range(3), 70):  # in the first group, and in the third
            batches[batch, node] = feed.rows(batch, rows_of_worker(ROWS, node, nodes))
        store.train.close()
        fetched.append(server.counts["bytes"] - before)
    for batch in (0, 2, 70):
        whole = np.concatenate([batches[batch, node] for node in range(nodes)])
        assert whole.tolist() == expected(feed, batch)


def test_nothing_is_fetched_again_that_is_still_there(server: ObjectStore) -> None:
    store, feed = opened()
    feed.rows(0)
    wait_until_idle(server)
    store.train.close()
    before = dict(server.counts)
    store, feed = opened()
    assert feed.rows(0).tolist() == expected(feed, 0)
    wait_until_idle(server)
    assert dict(server.counts) == before
    store.train.close()


def test_a_process_says_what_it_needs_before_its_first_batch_could_evict_that(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    published: list[Need] = []

    def publish(cache: BlockCache, needs: list[Need]) -> None:
        done.append("publish")
        published.extend(needs)

    def add(cache: BlockCache, blocks: object, when: float) -> bool:
        done.append("add")
        return True

    monkeypatch.setattr("raygpt.corpus.readahead.ReadAhead._work", lambda self: None)
    monkeypatch.setattr(BlockCache, "publish", publish)
    monkeypatch.setattr(BlockCache, "add", add)
    store, feed = opened()
    assert feed.rows(70).tolist() == expected(feed, 70)
    store.train.close()
    assert done[0] == "publish"
    assert "add" in done
    _, starts = feed._order(0).starts(70 * ROWS + np.arange(ROWS))
    shards = set(np.searchsorted(np.cumsum(STORE.counts), starts, side="right").tolist())
    assert shards <= {need.shard for need in published}


def test_a_worker_without_lanes_of_a_small_source_reads_nothing_of_it_ahead(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [open_store("s3://bucket/store").train for _ in range(2)]
    feed = Feed(streams, context=CONTEXT, batch_rows=512, weights=[0.999, 0.001])
    followed: list[ReadAhead] = []
    monkeypatch.setattr(ReadAhead, "follow", lambda self, *what: followed.append(self))
    for rank in range(64):
        feed._follow(0, np.array(rows_of_worker(512, rank, 64)), feed._order(0), fetching.to_stderr)
    for stream in streams:
        assert stream.read_ahead
    assert [followed.count(stream.read_ahead) for stream in streams] == [64, 9]  # of the second's ten lanes
    for stream in streams:
        stream.close()


def test_a_plan_of_groups_that_need_nothing_is_finite(server: ObjectStore) -> None:
    store, _ = opened()
    assert store.train.cached
    reader = ReadAhead(store.train.cached)
    reader._upcoming = (Group(number, number + 1, []) for number in range(2000))
    assert reader._plan() == []
    assert next(reader._upcoming).first == 1000
    store.train.close()


def test_a_mixture_that_is_closed_keeps_neither_threads_nor_files_open(server: ObjectStore) -> None:
    before = set(threading.enumerate())
    store = open_store("s3://bucket/store")
    mixture = Mixture((store,), (1.0,))
    mixture.feed(context=CONTEXT, batch_rows=ROWS, order="shuffled", seed=5).rows(0)
    cached, threads = store.train.cached, [thread for thread in threading.enumerate() if thread.name == "fetch"]
    mixture.close()
    assert cached
    assert cached._node.closed
    for thread in set(threads) - before:
        thread.join(60)
        assert not thread.is_alive()


def wait_until_idle(server: ObjectStore) -> None:
    unchanged = 0
    for _ in range(600):
        before = server.counts["requests"]
        time.sleep(0.5)
        unchanged = unchanged + 1 if server.counts["requests"] == before else 0
        if unchanged == 6:  # on busy cores the next request may take seconds to come
            return
    raise AssertionError("still fetching")


@pytest.mark.parametrize("kind", ["fail", "short", "wrong", "hang"])
def test_a_fetch_that_goes_wrong_is_repeated_and_nothing_wrong_reaches_a_batch(server: ObjectStore, kind: str) -> None:
    server.hang_s = 0.5
    server.fault = lambda number, name: kind if number % 3 == 0 else None
    store, feed = opened()
    for batch in (0, 1, 60):
        assert feed.rows(batch).tolist() == expected(feed, batch)
    store.train.close()


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_a_store_that_is_away_is_waited_for_and_that_is_reported(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(fetching, "SAY_AFTER_S", 0.0)
    away = threading.Event()
    away.set()
    server.fault = lambda number, name: "fail" if away.is_set() else None
    store, feed = opened(order=order)
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        away.clear()

    feed.read_ahead(report)
    assert feed.rows(0).tolist() == expected(feed, 0)
    assert said[0].startswith("waiting for s3://bucket/store for ")
    assert "\n" not in said[0]
    store.train.close()


def test_bytes_that_stay_wrong_are_an_error(server: ObjectStore) -> None:
    server.fault = lambda number, name: "wrong"
    store, feed = opened()
    with pytest.raises(DamagedError, match="copy"):
        feed.rows(0)
    store.train.close()


def test_a_shard_of_another_size_is_an_error(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "size", lambda name: 10_000 if name.startswith("train") else len(server._files[name]))
    store, feed = opened()
    with pytest.raises(DamagedError, match="has 10000 bytes instead of "):
        feed.rows(0)
    store.train.close()


def test_a_missing_shard_is_an_error_at_once(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    known = server._files
    monkeypatch.setattr(server, "size", lambda name: len(known[name]) if name in known else None)
    store, feed = opened()
    with pytest.raises(RaygptError, match=r"the shard train-\d{7}.tokens is missing"):
        feed.rows(0)
    store.train.close()


def test_a_block_that_was_damaged_on_the_disk_is_fetched_again(server: ObjectStore, tmp_path: Path) -> None:
    store, feed = opened()
    feed.rows(0)
    store.train.close()
    files = sorted((tmp_path / "cache").glob("raygpt/blocks/*/*/*"))
    for number, path in enumerate(files):
        content = path.read_bytes()
        path.write_bytes([content[:-1] + bytes([content[-1] ^ 1]), content[:100], b""][number % 3])
    store, feed = opened()
    assert feed.rows(0).tolist() == expected(feed, 0)
    store.train.close()


def test_a_full_disk_stops_caching_but_not_training(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    written = itertools.count()

    def write_bytes(path: Path, content: bytes) -> None:
        if next(written) > 3:
            raise OSError(28, "No space left on device")
        with path.open("wb") as file:
            file.write(content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    store, feed = opened()
    for batch in (0, 1, 100):
        assert feed.rows(batch).tolist() == expected(feed, batch)
    store.train.close()


def test_a_pass_of_reading_ahead_that_fails_is_reported_once_and_repeated(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, repeated, said = [OSError(5, "Input/output error")] * 2, threading.Event(), list[str]()

    def make_room(cache: BlockCache, size: int, when: float) -> bool:
        if failures:
            raise failures.pop()
        repeated.set()
        return False

    monkeypatch.setattr(BlockCache, "make_room", make_room)
    monkeypatch.setattr("raygpt.corpus.readahead.PASS_S", 0.01)
    store, feed = opened()
    feed.read_ahead(said.append)
    feed.rows(0)
    assert repeated.wait(60)
    store.train.close()
    assert said == ["nothing is read ahead for now ([Errno 5] Input/output error)"]


READER = """
import json, sys, time
import numpy as np
from tests.corpus.test_fetching import ROWS, STORE, expected, opened
first, last = map(int, sys.argv[1:])
store, feed = opened(limit=9e6)
for batch in range(first, last):
    rows = feed.rows(batch)
    assert batch % 20 or rows.tolist() == expected(feed, batch), batch
print("right")
"""


def test_two_processes_that_evict_at_once_read_right_rows_within_one_limit(server: ObjectStore, tmp_path: Path) -> None:
    """One in the first groups, one further on: together they need more than the cache holds."""
    ranges = ((0, 150), (400, 550))
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, *map(str, span)], stdout=subprocess.PIPE, text=True)
        for span in ranges
    ]
    while any(reader.poll() is None for reader in readers):
        assert used(tmp_path) <= 9e6
        time.sleep(0.05)
    assert [reader.communicate()[0] for reader in readers] == ["right\n", "right\n"]


def test_two_runs_share_what_either_fetched(server: ObjectStore, tmp_path: Path) -> None:
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, "0", "120"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [reader.communicate()[0] for reader in readers] == ["right\n", "right\n"]
    windows = server.counts["bytes"] / 2 / CONTEXT
    assert windows < 1.2 * 9e6 / 2 / CONTEXT + 120 * ROWS  # one cache full, and what was trained on: not twice that


# The cache alone


def block(number: int, shard: int = 0) -> Block:
    return Block("store", shard, number)


def test_what_nobody_needs_is_evicted_first_and_then_what_is_needed_last(tmp_path: Path) -> None:
    cache = BlockCache(1000, tmp_path)
    for number in range(10):
        assert cache.add({block(number): bytes(100)}, when=0)

    def held() -> list[int]:
        return [number for number in range(30) if cache.path(block(number)).exists()]

    cache.publish([Need("store", 0, 0, 4, 50.0), Need("store", 0, 4, 9, 100.0), Need("store", 0, 20, 21, 10.0)])
    assert cache.add({block(20): bytes(100)}, when=10)
    assert held() == [*range(9), 20]
    assert cache.add({block(21): bytes(300)}, when=60)
    assert set(held()) >= {0, 1, 2, 3, 20, 21}
    assert len(held()) == 8
    assert not cache.add({block(22): bytes(900)}, when=60)
    assert set(held()) >= {0, 1, 2, 3, 20}  # needed before that one
    cache.close()


def test_a_full_disk_keeps_nothing_and_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, **options: object) -> None:
        raise OSError(28, "No space left on device")

    cache = BlockCache(1000, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        assert not cache.add({block(0): bytes(100)}, when=0)
        patched.setattr(caching.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 99}))
        assert not cache.make_room(100, when=0)  # otherwise the same would be read ahead again and again
    with Path("/dev/full").open("wb", buffering=0) as file, monkeypatch.context() as patched:
        patched.setattr(cache._needs, "_file", file)
        cache.publish([Need("store", 0, 0, 4, 50.0)])
    assert cache.add({block(0): bytes(100)}, when=0)
    cache.close()


def test_folders_of_shards_whose_blocks_were_evicted_do_not_pile_up(tmp_path: Path) -> None:
    cache = BlockCache(100, tmp_path)
    for shard in range(20):
        assert cache.add({block(0, shard): bytes(100)}, when=0)
    cache.close()
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["0000018", "0000019"]


def test_a_damaged_block_that_is_removed_while_blocks_are_counted_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(1000, tmp_path)
    cache.add({block(0): bytes(100), block(1): bytes(100)}, when=0)
    entries = {str(path): list(os.scandir(path)) for path in (tmp_path, tmp_path / "store", tmp_path / "store/0000000")}
    cache.remove(block(0))
    monkeypatch.setattr(os, "scandir", lambda folder: entries[str(folder)])
    assert list(cache._list()) == [(block(1), 100)]
    cache.close()


def test_needs_of_a_process_that_has_ended_do_not_count(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from raygpt.corpus.cache import BlockCache, Need
        BlockCache(1000, Path(sys.argv[1])).publish([Need("store", 0, 0, 9, 1.0)])
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    cache = BlockCache(1000, tmp_path)
    assert cache.add({block(n): bytes(100) for n in range(10)}, when=5.0)
    assert cache.add({block(10): bytes(500)}, when=5.0)
    cache.close()


def test_the_default_limit_is_half_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 3000}))
    cache = BlockCache(folder=tmp_path)
    cache.add({block(0): bytes(1000)}, when=0)
    cache.close()
    assert cache.limit == 1500
    again = BlockCache(folder=tmp_path)
    assert again.limit == 2000
    again.close()


def test_a_store_of_a_million_shards_opens_in_two_seconds(
    server: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    huge = ObjectStore(ArithmeticStore(1_000_000, 15_000_000))
    monkeypatch.setenv("AWS_ENDPOINT_URL", huge.endpoint)
    started = time.process_time()
    store = open_store("s3://bucket/huge")
    assert time.process_time() - started < 2
    assert len(store.train) == pytest.approx(15e12, rel=0.01)
    huge.close()
