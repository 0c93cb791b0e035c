"""Spreads a store's documents over shards at random, so that every shard is a fair sample of the corpus.

Each document has a keyed hash of its place in the source, or, to remove copies, of its content. A shard holds the
documents of one range of hashes, in the order of their hashes: the result is a sort, and depends on nothing but the
documents. It runs on Ray Data in levels, each task with about 64 MB of tokens in memory:

    tokens in the order of the text ──▶ runs, each divided into ≤ 512 ranges of hashes ──▶ … ──▶ a shard for each range

What a task writes is named by what it reads, so a killed prepare continues with the files that are missing.
"""

import contextlib
import functools
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.corpus import pipeline, tokenizers
from raygpt.corpus.extents import Buckets, Extent, bucket_name
from raygpt.corpus.index import Index
from raygpt.corpus.permutation import keyed
from raygpt.corpus.shards import HEADER_BYTES, SCATTERED, Header, Ids, read_header, write_bucket, write_shard
from raygpt.corpus.store import TokenStore

BUCKET_BYTES = 32 * 2**20  # of a shard: a million shards are 30 TB, and a group of eight 250 MB
TASK_BYTES = 64 * 2**20  # of tokens that a task holds
FAN_OUT = 512  # ranges that a run is divided into: 128 KB each
RUNS, VAL_SHARD = "runs", "val.tokens"
RUN = struct.Struct("<QQ")  # documents, ids; then the first document and the first id of each range, and of the end

Words = NDArray[np.uint64]
Advance = Callable[[int, int], None]  # tasks that are done, of all


class Documents(NamedTuple):
    """Documents one after another."""

    keys: Words
    lengths: NDArray[np.int64]
    ids: Ids

    def chosen(self, order: NDArray[np.int64]) -> "Documents":
        """These, in this order."""
        ends = np.cumsum(self.lengths)
        parts = [self.ids[end - length : end] for end, length in zip(ends[order], self.lengths[order], strict=True)]
        ids = np.concatenate(parts) if parts else self.ids[:0]
        return Documents(self.keys[order], self.lengths[order], ids)


@dataclass(frozen=True)
class Scatter:
    """Everything that determines the result, as it is sent to every task."""

    folder: str  # of the result
    source: str  # folder of the store in the order of the text
    index: Index  # of that store, without its list of shards
    size: int  # bytes of tokens
    buckets: int
    seed: int
    by_content: bool  # and copies are removed
    task_bytes: int
    fan_out: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.index.dtype)

    def steps(self) -> list[int]:
        """How many buckets each range of a level has: [1] for up to 512 buckets, [512, 1] for up to 512², …"""
        steps = [1]
        while steps[0] * self.fan_out < self.buckets:
            steps.insert(0, steps[0] * self.fan_out)
        return steps


class Segments(NamedTuple):
    """What a task reads: a range of some runs, or, on the first level, extents of the source."""

    level: int  # that the task is on
    parent: int  # range of the level before that the runs are of; these are divided into `fan_out` ranges
    child: int  # which of them the task reads
    runs: tuple[str, ...] = ()
    extents: tuple[Extent, ...] = ()


def scatter(
    store: TokenStore,
    folder: str,
    fingerprint: str,
    *,
    seed: int,
    by_content: bool,
    cpus: float | None = None,
    advance: Advance = lambda done, total: None,
    bucket_bytes: int = BUCKET_BYTES,
    task_bytes: int = TASK_BYTES,
    fan_out: int = FAN_OUT,
) -> Index:
    """Write the shards of a scattered store from those of one in the order of its text; returns the index."""
    size = len(store.train) * np.dtype(store.index.dtype).itemsize
    buckets, index = max(1, -(-size // bucket_bytes)), replace(store.index, train=(), val=())
    work = Scatter(folder, store.folder, index, size, buckets, seed, by_content, task_bytes, fan_out)
    tokenizers.save(store.tokenizer, folder)
    _copy_val(store, folder)
    counts, removed, removed_tokens = np.zeros(buckets, dtype=np.int64), 0, 0
    for row in _run_levels(work, store.index.train, cpus, advance):
        counts[row["bucket"]] = row["tokens"]
        removed, removed_tokens = removed + row["removed"], removed_tokens + row["removed_tokens"]
    share = removed_tokens / max(1, len(store.train))
    note = f"{removed:,} copies of documents were removed: {removed_tokens:,} tokens, {share:.1%}"
    return replace(
        store.index,
        fingerprint=fingerprint,
        documents=store.index.documents - removed,
        train=Buckets(counts),
        val=(Extent(VAL_SHARD, 0, len(store.val)),) if len(store.val) else (),
        notes=(*store.index.notes, *([note] if by_content else [])),
        version=SCATTERED,
    )


def _copy_val(store: TokenStore, folder: str) -> None:
    uri = storage.join(folder, VAL_SHARD)
    if len(store.val) and not storage.exists(uri):
        header = Header(np.dtype(store.index.dtype), len(store.val), store.index.tokenizer)
        write_shard(uri, store.val.runs(), header)


# Levels


def _run_levels(
    work: Scatter, extents: Sequence[Extent], cpus: float | None, advance: Advance
) -> Iterator[dict[str, Any]]:
    """Run level after level, then merge; yields the counts of each bucket."""
    tasks = [Segments(0, 0, 0, extents=group) for group in _grouped(extents, work)]
    steps = work.steps()
    total, done = len(tasks) * len(steps) + work.buckets, 0
    runs: dict[int, tuple[str, ...]] = {}  # of each range of the level before
    for level, step in enumerate(steps):
        if level:
            tasks = list(_tasks(level, steps[level - 1], runs, work))
        names: dict[int, list[str]] = {}
        for row in pipeline.each(functools.partial(_divide, work=work, step=step), tasks, cpus):
            names.setdefault(row["range"], []).append(row["name"])
            done += 1
            advance(min(done, total - 1), total)
        runs = {number: tuple(sorted(found)) for number, found in names.items()}
    merges = [_segments_of(bucket, len(steps), runs, work) for bucket in range(work.buckets)]
    for row in pipeline.each(functools.partial(_merge, work=work), merges, cpus):
        done += 1
        advance(min(done, total), total)
        yield row


def _grouped(extents: Sequence[Extent], work: Scatter) -> Iterator[tuple[Extent, ...]]:
    """Extents of about a task's size together."""
    group: list[Extent] = []
    size = 0
    for extent in extents:
        if group and size + extent.tokens * work.dtype.itemsize > work.task_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(extent)
        size += extent.tokens * work.dtype.itemsize
    if group:
        yield tuple(group)


def _tasks(level: int, step: int, runs: dict[int, tuple[str, ...]], work: Scatter) -> Iterator[Segments]:
    """The tasks of a level: a range of the level before, which has `step` buckets, of some of its runs each."""
    for number in range(-(-work.buckets // step)):
        whole = _segments_of(number, level, runs, work)
        segment = max(1, work.size * step // work.buckets // max(1, len(whole.runs)))  # hashes are spread evenly
        together = max(1, work.task_bytes // segment)
        for start in range(0, len(whole.runs), together):
            yield whole._replace(runs=whole.runs[start : start + together])


def _segments_of(number: int, level: int, runs: dict[int, tuple[str, ...]], work: Scatter) -> Segments:
    """Range `number` of the level before, in all runs that have it."""
    parent, child = divmod(number, work.fan_out)
    return Segments(level, parent, child, runs.get(parent, ()))


# Tasks


def _divide(task: Segments, work: Scatter, step: int) -> dict[str, Any]:
    """Write a run: the task's documents, sorted by hash and divided into ranges of `step` buckets."""
    number, name = task.parent * work.fan_out + task.child, f"{task.level}-{storage.digest(repr(task))}"
    uri = storage.join(work.folder, RUNS, name)
    if not storage.exists(uri):
        documents = _read(task, work)
        ranges = bucket_of(documents.keys, work.buckets) // step - number * work.fan_out
        _write_run(uri, documents, ranges, work.fan_out)
    return {"range": number, "name": name}


def _merge(task: Segments, work: Scatter) -> dict[str, Any]:
    """Write a bucket: its documents of all runs, sorted by hash, without copies if they are to be removed."""
    bucket = task.parent * work.fan_out + task.child
    uri, counted = (storage.join(work.folder, *name) for name in ([bucket_name(bucket)], [RUNS, f"removed-{bucket}"]))
    if not storage.exists(uri):
        documents = _read(task, work)
        kept = documents.chosen(_first_of_copies(documents)) if work.by_content else documents
        removed = len(documents.keys) - len(kept.keys), len(documents.ids) - len(kept.ids)
        storage.write_bytes(counted, RUN.pack(*removed))
        header = Header(work.dtype, len(kept.ids), work.index.tokenizer, len(kept.keys), version=SCATTERED)
        write_bucket(uri, kept.ids, header)
    copies, copied_tokens = RUN.unpack(storage.read_bytes(counted))
    return {
        "bucket": bucket,
        "tokens": read_header(uri).tokens,
        "removed": copies,
        "removed_tokens": copied_tokens,
    }


def _first_of_copies(documents: Documents) -> NDArray[np.int64]:
    """The documents without later copies. They are sorted: copies have the same hash, and are neighbours."""
    starts = np.cumsum(documents.lengths) - documents.lengths
    kept: list[int] = []
    group: list[bytes] = []  # different contents with the same hash
    for number, (start, length) in enumerate(zip(starts.tolist(), documents.lengths.tolist(), strict=True)):
        content = documents.ids[start : start + length].tobytes()
        if number == 0 or documents.keys[number] != documents.keys[number - 1]:
            group = []
        if content not in group:
            group.append(content)
            kept.append(number)
    return np.array(kept, dtype=np.int64)


def _read(task: Segments, work: Scatter) -> Documents:
    """A task's documents, sorted by hash; equal ones stay in the order of the text."""
    parts = [Documents(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, work.dtype))]
    parts += [_documents_of(extent, work) for extent in task.extents]
    parts += [_read_segment(storage.join(work.folder, RUNS, run), task.child, work) for run in task.runs]
    documents = Documents(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return documents.chosen(np.argsort(documents.keys, kind="stable"))


def _documents_of(extent: Extent, work: Scatter) -> Documents:
    """The documents of an extent, each with its end. One that continues in the next shard is cut there, and ended."""
    dtype, end = work.dtype, work.index.end_of_text
    with storage.open_read(storage.join(work.source, extent.shard)) as file:
        file.seek(HEADER_BYTES + extent.start * dtype.itemsize)
        ids = np.frombuffer(file.read(extent.tokens * dtype.itemsize), dtype)
    if len(ids) and ids[-1] != end:
        ids = np.append(ids, dtype.type(end))
    ends = np.flatnonzero(ids == end) + 1
    lengths = np.diff(ends, prepend=0)
    if work.by_content:
        keys = [_content_key(ids[stop - size : stop], work.seed) for stop, size in zip(ends, lengths, strict=True)]
        return Documents(np.array(keys, dtype=np.uint64), lengths, ids)
    place = int.from_bytes(hashlib.blake2b(extent.shard.encode(), digest_size=6).digest(), "little")
    return Documents(keyed(work.seed, place, extent.start, np.arange(len(ends))), lengths, ids)


def _content_key(ids: Ids, seed: int) -> int:
    digest = hashlib.blake2b(ids.tobytes(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


def bucket_of(keys: Words, buckets: int) -> NDArray[np.int64]:
    """The bucket of each hash: equal ranges of the 64-bit numbers."""
    return ((keys >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)


# Runs


def _write_run(uri: str, documents: Documents, ranges: NDArray[np.int64], count: int) -> None:
    """Documents that are sorted by range, so that one range can be read without the others."""
    firsts = np.searchsorted(ranges, np.arange(count + 1)).astype("<i8")
    starts = np.append(0, np.cumsum(documents.lengths))[firsts].astype("<i8")
    with storage.atomic_write(uri) as path, path.open("wb") as file:
        file.write(RUN.pack(len(documents.keys), len(documents.ids)) + firsts.tobytes() + starts.tobytes())
        file.write(documents.keys.astype("<u8").tobytes() + documents.lengths.astype("<i8").tobytes())
        file.write(documents.ids.tobytes())


def _read_segment(uri: str, child: int, work: Scatter) -> Documents:
    """The documents of one range of a run."""
    table = (work.fan_out + 1) * 8
    with contextlib.closing(storage.open_read(uri)) as file:
        head = file.read(RUN.size + 2 * table)
        count, _ = RUN.unpack(head[: RUN.size])
        first, last = np.frombuffer(head, "<i8", 2, RUN.size + child * 8).tolist()
        start, stop = np.frombuffer(head, "<i8", 2, RUN.size + table + child * 8).tolist()

        def column(offset: int, begin: int, end: int, kind: Any) -> NDArray[Any]:
            file.seek(len(head) + offset + begin * np.dtype(kind).itemsize)
            return np.frombuffer(file.read((end - begin) * np.dtype(kind).itemsize), kind)

        keys, lengths = column(0, first, last, "<u8"), column(8 * count, first, last, "<i8")
        return Documents(keys, lengths, column(16 * count, start, stop, work.dtype))
