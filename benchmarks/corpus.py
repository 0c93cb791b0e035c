"""A store of 30 TB, which exists as arithmetic on a loopback object store, read through a node's bounded cache.

    python benchmarks/corpus.py open nodes speed link       # or some of them; --cache-gb 1 is quicker than 4

open   opening a million shards; reaching a batch far away
nodes  one node, one of 3 and one of 8, until the cache has been turned over five times: bytes and requests, the cache's
       size, a restart. Of eight batches one is read and compared with the arithmetic, and the others are passed over.
speed  tokens a second with 50 ms a request, all batches read
link   a training loop of 0.6 M tokens/s on a link of 5 MB/s that stands still for 5 s every 30 s
prepare  the speed of prepare with scattering and without, of --text TEXT
scatter  scattering --gb of tokens on Ray: the largest memory of a task's process, whose limit is 64 MB of tokens
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray

from raygpt.corpus import pipeline, tokenizers
from raygpt.corpus.cache import Block, Need
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed, rows_of_worker
from raygpt.corpus.fetching import CachedShards
from raygpt.corpus.index import Index
from raygpt.corpus.lanes import Group
from raygpt.corpus.prepare import prepare
from raygpt.corpus.scatter import scatter
from raygpt.corpus.shards import Header, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.testing.object_store import ArithmeticStore
from raygpt.training.prefetch import prefetch

SHARDS, TOKENS = 1_000_000, 15_000_000  # 30 TB of uint16
CONTEXT, ROWS = 1024, 480
TURNS = 5
TRAINED_PER_S, LINK = 600_000, 5e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["open", "nodes", "speed", "link"])
    parser.add_argument("--cache-gb", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of speed; link takes three times that")
    parser.add_argument("--text", help="for prepare: a text of 20 MB or more")
    parser.add_argument("--rounds", type=int, default=3, help="of prepare")
    parser.add_argument("--gb", type=float, default=0.64, help="of tokens that scatter makes up")
    parser.add_argument("--name", help="write results/NAME.json")
    words = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in words.parts:
        figures |= PARTS[part](words)
    record.show(figures, words.name)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """The object store in a process of its own; the environment leads Arrow's client there, and to an empty cache."""
    command = [
        sys.executable,
        "-m",
        "raygpt.testing.object_store",
        f"--shards={SHARDS}",
        f"--tokens={TOKENS}",
        *options,
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
    ):
        assert server.stdout
        endpoint = server.stdout.readline().strip()
        os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        os.environ |= {"AWS_DEFAULT_REGION": "x", "AWS_EC2_METADATA_DISABLED": "true", "XDG_CACHE_HOME": home}
        try:
            yield endpoint
        finally:
            server.terminate()


def opened(cache_gb: float) -> tuple[TokenStore, Feed]:
    store = open_store("s3://bucket/store")
    store.train.cache_bytes = int(cache_gb * 1e9)
    feed = Feed([store.train], context=CONTEXT, batch_rows=ROWS, seed=1)
    feed.read_ahead(print)
    return store, feed


def opening(words: argparse.Namespace) -> dict[str, Any]:
    with serving():
        open_store("s3://bucket/store")  # Arrow's S3 client starts
        started = time.perf_counter()
        _, feed = opened(words.cache_gb)
        opened_s = time.perf_counter() - started
        started = time.perf_counter()
        order = feed._order(0)
        order.starts(20_000_000 * ROWS + np.arange(ROWS))
        return {"open, s": opened_s, "order of batch 20,000,000, s": time.perf_counter() - started}


def nodes(words: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    arithmetic = ArithmeticStore(SHARDS, TOKENS)
    for count, node in ((1, 0), (3, 1), (8, 5)):
        with serving() as endpoint:
            figures = one_node(words.cache_gb, rows_of_worker(ROWS, node, count), endpoint, arithmetic)
        found |= {f"1 of {count} nodes: {label}": value for label, value in figures.items()}
    return found


def one_node(cache_gb: float, rows: range, endpoint: str, arithmetic: ArithmeticStore) -> dict[str, Any]:
    store, feed = opened(cache_gb)
    largest = reached = trained = 0
    for group in feed._order(0).upcoming(0, rows, 0):
        for batch in range(reached, group.end):
            if batch % 8:
                feed._follow(batch, np.array(rows), feed._order(0), print)
            else:
                check(feed.rows(batch, rows), feed, arithmetic, batch, rows)
        while missing(store, group):  # the loop is faster than training, and would evict what is on its way
            time.sleep(0.05)
        largest = max(largest, cached(store))
        reached, trained = group.end, group.end * len(rows) * CONTEXT * 2
        if trained > TURNS * cache_gb * 1e9:
            break
    shards = store.train.cached
    assert shards
    store.train.close()
    time.sleep(1)
    counts, later = read_counts(endpoint), needed_later(shards, feed, reached, rows)
    again = restart(cache_gb, rows, reached, endpoint)
    return {
        "GB trained on": trained / 1e9,
        "fetched / trained on": (counts["bytes"] - later) / trained,
        "KB a request": counts["bytes"] / counts["requests"] / 1e3,
        "largest cache / limit": largest / cache_gb / 1e9,
        **again,
    }


def missing(store: TokenStore, group: Group) -> bool:
    cached = store.train.cached
    assert cached
    needs = (Need(store.index.fingerprint, *part, when=0.0) for part in cached.ranges(group, CONTEXT))
    return any(cached.missing(need) for need in needs)


def needed_later(shards: CachedShards, feed: Feed, batch: int, rows: range) -> int:
    """Bytes in the cache that were fetched for later batches."""
    found = 0
    for group in feed._order(0).upcoming(batch, rows, 0):
        ranges = shards.ranges(group, CONTEXT)
        here = [
            shards.cache.path(Block(shards.index.fingerprint, part.shard, number))
            for part in ranges
            for number in range(part.first, part.end)
        ]
        sizes = [path.stat().st_size for path in here if path.exists()]
        if not sizes:
            return found
        found += sum(sizes)
    return found


def restart(cache_gb: float, rows: range, batch: int, endpoint: str) -> dict[str, Any]:
    """What a new process fetches until it has a batch, and how much of that was in the cache."""
    store, feed = opened(cache_gb)
    shards = store.train.cached
    assert shards
    held, before = written(shards), read_counts(endpoint).get("bytes", 0)
    feed.rows(batch, rows)
    fetched = read_counts(endpoint).get("bytes", 0) - before
    store.train.close()
    again = [path for path, when in written(shards).items() if held.get(path, when) != when]
    return {
        "MB fetched until the first batch after a restart": fetched / 1e6,
        "bytes of it that the cache had": sum(path.stat().st_size for path in again),
    }


def written(shards: CachedShards) -> dict[Path, int]:
    """When each block in the cache was written."""
    return {path: path.stat().st_mtime_ns for path in shards.cache.folder.glob("*/*/*") if path.suffix != ".tmp"}


def speed(words: argparse.Namespace) -> dict[str, Any]:
    with serving("--latency=0.05"):
        store, feed = opened(words.cache_gb)
        started = time.perf_counter()
        feed.rows(0)
        first = time.perf_counter() - started
        batch, busy = 0, time.process_time()
        while time.perf_counter() - started < words.seconds + first:
            batch += 1
            feed.rows(batch)
        elapsed = time.perf_counter() - started - first
        store.train.close()
        tokens = batch * ROWS * CONTEXT / 1e6
        return {
            "50 ms a request: first batch, s": first,
            "M tokens/s": tokens / elapsed,
            "M tokens a second of the reader's CPU time": tokens / (time.process_time() - busy),
        }


def link(words: argparse.Namespace) -> dict[str, Any]:
    with serving(f"--bytes-per-s={LINK}", "--latency=0.05", "--hiccup-every=30"):
        store, feed = opened(words.cache_gb)
        batches = int(3 * words.seconds * TRAINED_PER_S / (ROWS * CONTEXT))
        started, waits = time.perf_counter(), []
        for _, waited in prefetch((feed.rows(batch) for batch in range(batches)), 2):
            waits.append(waited)
            time.sleep(ROWS * CONTEXT / TRAINED_PER_S)
        store.train.close()
        return {
            "link of 5 MB/s: first batch, s": waits[0],
            "batches": batches,
            "longest wait after it, s": max(waits[1:]),
            "data_wait_s in all": sum(waits[1:]),
            "seconds": time.perf_counter() - started,
        }


def preparing(words: argparse.Namespace) -> dict[str, Any]:
    """prepare with and without scattering, in turns, after a small one that starts Ray's processes."""
    from raygpt.cluster import connected

    assert words.text, "prepare needs --text"
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with connected(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        prepare("stdlib", f"{home}/first", "bytes", limit=1000)
        for number in range(words.rounds):
            for scattered in (False, True):
                started = time.perf_counter()
                prepare(words.text, f"{home}/{number}-{scattered}", "gpt2", scatter=scattered)
                seconds[scattered].append(time.perf_counter() - started)
    plain, scattered_s = min(seconds[False]), min(seconds[True])
    return {"prepare, s": plain, "with scattering, s": scattered_s, "speed with / without": plain / scattered_s}


def scattering(words: argparse.Namespace) -> dict[str, Any]:
    """A store of made-up tokens, scattered through Ray Data; every task reports the peak of its process so far."""
    from raygpt.cluster import connected

    peaks, on_ray = [], pipeline.each

    def each(task: Any, items: Any, cpus: Any) -> Iterator[Any]:
        def measured(item: Any) -> dict[str, Any]:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {**task(item), "before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

        for row in on_ray(measured, items, cpus):
            peaks.append((row["before"] / 1e3, row["peak"] / 1e3))  # from KB
            yield row

    with connected(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        plain = made_up(f"{home}/plain", int(words.gb * 1e9))
        pipeline.each = each
        started = time.perf_counter()
        index = scatter(plain, f"{home}/out", "2" * 16, seed=1, by_content=False)
        seconds = time.perf_counter() - started
    return {
        "tokens, MB": words.gb * 1e3,
        "shards": len(index.train),
        "scattering, MB/s": words.gb * 1e3 / seconds,
        "a process before its first task, MB": min(before for before, _ in peaks),
        "largest process, MB": max(peak for _, peak in peaks),
    }


def made_up(folder: str, size: int) -> TokenStore:
    """A store of random ids in the order of the text: documents of some 700 tokens, shards of 8 MB."""
    tokenizer, random = tokenizers.Bytes(), np.random.default_rng(0)
    fingerprint, extents = tokenizers.fingerprint(tokenizer), []
    for number in range(size // 8_000_000):
        ids = random.integers(0, 256, 4_000_000, dtype=np.uint16)
        ids[random.integers(0, len(ids), len(ids) // 700)] = ids[-1] = tokenizer.end_of_text
        extents.append(Extent(f"train-{number:05d}-00000.tokens", 0, len(ids)))
        write_shard(f"{folder}/{extents[-1].shard}", [ids], Header(np.dtype("<u2"), len(ids), fingerprint))
    tokenizers.save(tokenizer, folder)
    facts = (tokenizer.vocab, tokenizer.end_of_text, "<u2", size // 1400, size // 2)
    Index("1" * 16, "made up", fingerprint, *facts, tuple(extents), ()).write(folder)
    return open_store(folder)


def check(found: NDArray[np.int32], feed: Feed, arithmetic: ArithmeticStore, batch: int, rows: range) -> None:
    """Compare some rows with what the store's arithmetic says."""
    _, starts = feed._order(0).starts(batch * ROWS + np.array(rows))
    ends = ends_of(arithmetic)
    for row, start in zip(found[::16], starts[::16].tolist(), strict=True):
        shard = int(np.searchsorted(ends, start, side="right"))
        first = start - int(ends[shard] - arithmetic.counts[shard])
        assert (row == arithmetic.ids(shard, first, first + CONTEXT + 1)).all()


@cache
def ends_of(arithmetic: ArithmeticStore) -> NDArray[np.int64]:
    return np.cumsum(arithmetic.counts)


def cached(store: TokenStore) -> int:
    """Bytes in the cache."""
    found = 0
    assert store.train.cached
    for path in store.train.cached.cache.folder.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def read_counts(endpoint: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{endpoint}/bucket/counts") as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


PARTS = {"open": opening, "nodes": nodes, "speed": speed, "link": link, "prepare": preparing, "scatter": scattering}

if __name__ == "__main__":
    main()
