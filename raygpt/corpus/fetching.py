"""Reads a scattered store in an object store through the node's cache: fetches blocks ahead of training, verifies them.

A block that is not there is requested at once, with its neighbours; `readahead.py` fetches what the next groups need.
Every block is compared with its checksum when it arrives, and when a process reads it from the disk for the first time.
"""

import contextlib
import fcntl
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from raygpt import storage
from raygpt.corpus import blocks
from raygpt.corpus.blocks import BLOCK, Checksums
from raygpt.corpus.cache import Block, BlockCache, Need, now
from raygpt.corpus.extents import bucket_name, token_counts
from raygpt.corpus.index import Index
from raygpt.corpus.lanes import Group
from raygpt.corpus.shards import HEADER_BYTES, SCATTERED, Header, Ids
from raygpt.errors import DamagedError, RaygptError, StorageError, first_line

REQUEST = 16  # blocks at most: 4 MiB, at 50 ms a request 80 MB/s on each of the connections
CONNECTIONS = 16  # requests at a time
DAMAGED_TRIES = 5  # before a block is reported as damaged in the store
PAUSES_S = (0.2, 0.5, 1, 2, 5, 10, 20, 30)  # before a failed request is sent again; the last one is repeated
SAY_AFTER_S, SAY_EVERY_S = 10.0, 60.0
POLL_S = 0.01  # between two tries to claim what another process fetches
HANDLES, HEADS = 64, 1024  # of shards, kept open and in memory
VERIFIED = 1_000_000  # blocks to remember as verified

Result = TypeVar("Result")
Report = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(f"raygpt: {text}", file=sys.stderr, flush=True)


class Piece(NamedTuple):
    """Tokens of a shard."""

    shard: int
    first: int
    tokens: int


class BlockRange(NamedTuple):
    """Blocks first…end-1 of a shard."""

    shard: int
    first: int
    end: int


class CachedShards:
    """The train shards of a store, by blocks."""

    def __init__(self, folder: str, index: Index, limit: int | None = None, report: Report = to_stderr):
        self.folder, self.index, self.report = folder, index, report
        self.cache = BlockCache(limit)
        self._dtype = np.dtype(index.dtype)
        self._per_block = BLOCK // self._dtype.itemsize
        self._requests = _Requests(folder, index, lambda text: self.report(text))
        self._pool = _Threads(CONNECTIONS)
        self._pending: dict[Block, Future[dict[Block, bytes]]] = {}
        self.is_waiting = False  # a batch waits for blocks: the link is for these
        self._lock = threading.Lock()
        self._verified: set[Block] = set()
        self._heads: dict[int, Checksums] = {}
        self._node = (self.cache.folder / f"{index.fingerprint}.lock").open("w")  # locked by ranges: what is in flight

    # Reading

    def read(self, pieces: Sequence[Piece]) -> list[Ids]:
        """The ids of pieces of shards."""
        wanted = {block for piece in pieces for block in self._blocks(piece)}
        fetched = self._ensure(sorted(wanted))
        return [self._ids(piece, fetched) for piece in pieces]

    def _blocks(self, piece: Piece) -> list[Block]:
        numbers = range(piece.first // self._per_block, -(-(piece.first + piece.tokens) // self._per_block))
        return [Block(self.index.fingerprint, piece.shard, number) for number in numbers]

    def _ids(self, piece: Piece, fetched: dict[Block, bytes]) -> Ids:
        parts = []
        for block in self._blocks(piece):
            first = piece.first - block.number * self._per_block  # in the block
            begin = max(first, 0) * self._dtype.itemsize
            end = min(first + piece.tokens, self._per_block) * self._dtype.itemsize
            parts.append(np.frombuffer(self._bytes(block, begin, end, fetched), self._dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _bytes(self, block: Block, begin: int, end: int, fetched: dict[Block, bytes]) -> bytes:
        """Part of a block. One that another process has evicted since, or that is cut off, is fetched again."""
        while block not in fetched:
            raw = self.cache.read(block, begin, end - begin)
            if raw is not None and len(raw) == end - begin:
                return raw
            self._verified.discard(block)
            fetched |= self._ensure([block])
        return fetched[block][begin:end]

    def _ensure(self, wanted: Sequence[Block]) -> dict[Block, bytes]:
        """Have these blocks, verified, in the cache. What had to be fetched is returned: it may not have fitted in."""
        missing = [block for block in wanted if not self._is_verified(block)]
        if not missing:
            return {}
        wanted_now = set(wanted)
        fetched: dict[Block, bytes] = {}
        self.is_waiting = True
        try:
            futures = [self.fetch(run, now()) for run in request_runs(missing)]
            for future in itertools.chain.from_iterable(futures):
                fetched |= {block: raw for block, raw in future.result().items() if block in wanted_now}
        finally:
            self.is_waiting = False
        return fetched

    def _is_verified(self, block: Block) -> bool:
        """Whether the cache has a block; it is compared with its checksum the first time."""
        if block in self._verified:
            return self.cache.path(block).exists()
        return self._cached(block) is not None

    def _cached(self, block: Block) -> bytes | None:
        """A block of the cache, if it is there and matches its checksum; another one is deleted."""
        raw = self.cache.read(block, 0, BLOCK)
        if raw is None:
            return None
        try:
            blocks.check_block(raw, block.number, self._checksums(block.shard), bucket_name(block.shard))
        except DamagedError:
            self.cache.remove(block)
            return None
        self._remember([block])
        return raw

    def _remember(self, verified: Sequence[Block]) -> None:
        if len(self._verified) > VERIFIED:
            self._verified = set()
        self._verified.update(verified)

    # Fetching

    def fetch(self, run: Sequence[Block], when: float) -> list["Future[dict[Block, bytes]]"]:
        """Request neighbouring blocks of a shard that are needed at `when`, but for those that are on their way."""
        with self._lock:
            under_way = {id(f): f for f in (self._pending.get(block) for block in run) if f}
            rest = [block for block in run if block not in self._pending]
            for part in request_runs(rest):
                future = self._pool.submit(partial(self._fetch, part, when))
                under_way[id(future)] = future
                self._pending |= dict.fromkeys(part, future)
        return list(under_way.values())

    def _fetch(self, run: Sequence[Block], when: float) -> dict[Block, bytes]:
        try:
            with self._claimed(run[0]):
                sums = self._checksums(run[0].shard)
                got = {block: raw for block in run if (raw := self._cached(block))}
                for part in request_runs([block for block in run if block not in got]):
                    arrived = self._requests.blocks(part, sums)
                    self.cache.add(arrived, when)
                    got |= arrived
            self._remember(run)
            return got
        finally:
            with self._lock:
                for block in run:
                    self._pending.pop(block, None)

    @contextlib.contextmanager
    def _claimed(self, block: Block) -> Iterator[None]:
        """Wait while another process of this node fetches the same, to find it in the cache then."""
        place = block.shard * 2**20 + block.number // REQUEST
        while not self._claim(place) and not self._requests.closed.wait(POLL_S):
            pass
        try:
            yield
        finally:
            fcntl.lockf(self._node, fcntl.LOCK_UN, 1, place)

    def _claim(self, place: int) -> bool:
        # Tried, not waited for: the system sees a deadlock where two processes wait with several threads each.
        try:
            fcntl.lockf(self._node, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return False
        return True

    def _checksums(self, shard: int) -> Checksums:
        """The checksums of a shard's blocks, from its head, which is cached like a block."""
        known = self._heads.get(shard)
        if known is None:
            head = Block(self.index.fingerprint, shard, -1)
            try:
                known = self._requests.unpack(shard, self.cache.read(head, 0, BLOCK) or b"")
            except RaygptError:  # not here, or damaged
                self.cache.remove(head)
                raw = self._requests.head(shard)
                known = self._requests.unpack(shard, raw)
                self.cache.add({head: raw}, now())
            kept = self._heads if len(self._heads) < HEADS else {}
            self._heads = {**kept, shard: known}  # replaced, not changed: other threads read it
        return known

    def ranges(self, group: Group, context: int) -> list[BlockRange]:
        """The blocks of a group's windows, without repeats: neighbours may share a block."""
        found: list[BlockRange] = []
        for span in group.spans:
            first, last = span.first * context, (span.first + span.windows) * context  # the last target included
            begin, end = first // self._per_block, last // self._per_block + 1
            if found and found[-1].shard == span.shard and found[-1].end > begin:
                begin = found[-1].end
            found.append(BlockRange(span.shard, begin, end))
        return found

    def missing(self, need: Need) -> list[Block]:
        """The blocks that the cache does not have."""
        wanted = (Block(need.store, need.shard, number) for number in range(need.first, need.end))
        return [block for block in wanted if not self.cache.path(block).exists()]

    def close(self) -> None:
        """End the threads, and take back what was published as needed; blocks stay in the cache."""
        self._requests.closed.set()
        self._pool.close()
        self._node.close()
        self.cache.close()


class _Threads:
    """Runs calls in daemon threads: a process may end while a store is away, which an executor's threads prevent."""

    def __init__(self, count: int):
        self._count = count
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while entry := self._calls.get():
            future, call = entry
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


def request_runs(wanted: Sequence[Block]) -> Iterator[list[Block]]:
    """Neighbouring blocks together, up to a request's size and not over its multiples."""
    run: list[Block] = []
    for block in wanted:
        follows = run and block.shard == run[-1].shard and block.number == run[-1].number + 1
        if run and not (follows and block.number % REQUEST):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


class _Requests:
    """Ranged reads of shards that do not fail: they are repeated until the right bytes arrive."""

    def __init__(self, folder: str, index: Index, report: Report):
        self._folder, self._index, self._report = folder, index, report
        self._counts = token_counts(index.train)
        self._system, self._path = storage.filesystem(folder)
        self._handles: dict[int, Any] = {}
        self._said = 0.0
        self.closed = threading.Event()

    def header(self, shard: int) -> Header:
        """The header that a shard must have by the index."""
        index = self._index
        return Header(np.dtype(index.dtype), int(self._counts[shard]), index.tokenizer, version=SCATTERED)

    def head(self, shard: int) -> bytes:
        """A shard's header and checksums."""

        def attempt() -> bytes:
            raw = self._read(shard, 0, self.header(shard).offset)
            self.unpack(shard, raw)
            return raw

        return self._repeat(shard, attempt)

    def blocks(self, run: Sequence[Block], sums: Checksums) -> dict[Block, bytes]:
        """Neighbouring blocks of a shard, verified."""
        shard = run[0].shard
        header, name = self.header(shard), storage.join(self._folder, bucket_name(shard))
        first, end = run[0].number * BLOCK, min((run[-1].number + 1) * BLOCK, header.size)

        def attempt() -> dict[Block, bytes]:
            raw = self._read(shard, header.offset + first, end - first)
            parts = [raw[start : start + BLOCK] for start in range(0, len(raw), BLOCK)]
            for block, part in zip(run, parts, strict=True):
                blocks.check_block(part, block.number, sums, name)
            return dict(zip(run, parts, strict=True))

        return self._repeat(shard, attempt)

    def unpack(self, shard: int, raw: bytes) -> Checksums:
        """The checksums in a shard's head; raises if it is damaged, or of another store."""
        name, expected = storage.join(self._folder, bucket_name(shard)), self.header(shard)
        if raw[:36] != expected.pack()[:36]:  # all but the counts of documents and bytes
            raise DamagedError(f"{name} is not the shard that the store's index lists; copy the store again")
        return blocks.unpack_table(raw, expected.size, HEADER_BYTES, name)

    def _read(self, shard: int, start: int, length: int) -> bytes:
        header, uri = self.header(shard), storage.join(self._folder, bucket_name(shard))
        handle = self._handles.get(shard)
        if handle is None:
            with storage.reached(uri):
                handle = self._system.open_input_file(f"{self._path}/{bucket_name(shard)}")
            if handle.size() != header.offset + header.size:
                raise DamagedError(
                    f"{uri} has {handle.size()} bytes instead of {header.offset + header.size}; copy it again"
                )
            if len(self._handles) >= HANDLES:
                self._handles = {}
            self._handles[shard] = handle
        with storage.reached(uri):
            raw = bytes(handle.read_at(length, start))
        if len(raw) != length:
            raise StorageError(f"{uri} delivered {len(raw)} bytes instead of {length}")
        return raw

    def _repeat(self, shard: int, attempt: Callable[[], Result]) -> Result:
        """Try until it works; a store that is away for minutes is waited for. What stays damaged is raised."""
        started, damaged = time.monotonic(), 0
        for pause in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                return attempt()
            except FileNotFoundError as error:
                raise RaygptError(
                    f"{self._folder}: the shard {bucket_name(shard)} is missing; copy it there again, or prepare the "
                    "source again"
                ) from error
            except DamagedError:
                damaged += 1
                if damaged == DAMAGED_TRIES:
                    raise
            except (StorageError, OSError) as error:
                self._say(first_line(error), time.monotonic() - started)
            self._handles.pop(shard, None)
            if self.closed.wait(pause):
                break
        raise StorageError(f"{self._folder} is no longer read")

    def _say(self, reason: str, waited: float) -> None:
        if waited > SAY_AFTER_S and not self.closed.is_set() and time.monotonic() > self._said + SAY_EVERY_S:
            self._said = time.monotonic()
            self._report(f"waiting for {self._folder} for {waited:.0f} s: {reason}")
