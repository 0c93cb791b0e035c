"""The token store: a corpus as token ids on disk or in an object store, read by memory map.

    stores/stdlib-1f0c3a7b/
      plan.json                    what is being prepared, written first
      tokenizer.json
      train-00000-00000.tokens     shards: a 64-byte header, then the ids as uint16 or uint32
      train-00000-00001.tokens     …unit 0, part 1: a unit is a few files of the source, a part some 16 MB of their text
      val-00000-00000.tokens       held-out documents of that part, where it has any
      val.tokens                   all of them, gathered at the end
      index.json                   written last: a folder without it is not a store yet

A stream (train or val) is the ids of its shards one after another. nanoGPT's `train.bin` and `val.bin` (bare uint16)
make a store as they are.
"""

import mmap
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.extents import Buckets, Extent, token_counts
from raygpt.corpus.fetching import CachedShards, Piece
from raygpt.corpus.index import INDEX, Index
from raygpt.corpus.order import window_count, window_counts
from raygpt.corpus.readahead import ReadAhead
from raygpt.corpus.shards import HEADER_BYTES, SCATTERED, VERSION, Header, Ids
from raygpt.errors import RaygptError

STORES = "stores"  # beside the runs, which share the prepared tokens
TRIALS = "trials.json"  # in a folder of runs that one sweep trains
PLAN = "plan.json"
FAILED = "failed.json"  # why prepare stopped, for readers of an incomplete store


def stores_of(home: str) -> str:
    """The folder of the token stores that the runs in `home` share; the runs of a sweep use those beside the sweep."""
    is_sweep = storage.exists(storage.join(home, TRIALS))
    return storage.join(home.rstrip("/").rpartition("/")[0] if is_sweep else home, STORES)


class TokenStream:
    """The ids of a store's train or val part, one after another; shards are mapped when they are first read."""

    def __init__(self, folder: str, extents: Sequence[Extent], index: Index):
        self.folder, self.index = folder, index
        self._extents = extents
        self._ends = np.cumsum(token_counts(extents))
        self._maps: dict[str, Ids] = {}
        self._cached: CachedShards | None = None
        self.read_ahead: ReadAhead | None = None
        self.cache_bytes: int | None = None  # of the node's disk that shards of an object store may take

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_maps": {},
            "_cached": None,
            "read_ahead": None,
        }  # another process maps the shards itself

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def buckets(self) -> Buckets | None:
        """The shards, if `shuffled` reads them group by group; a single group is permuted whole."""
        extents = self._extents
        return extents if isinstance(extents, Buckets) and len(extents) > extents.group else None

    def window_count(self, context: int) -> int:
        """Windows of context+1 tokens, `context` apart: an epoch."""
        if self.buckets:
            return int(window_counts(self.buckets, context).sum())
        return window_count(len(self), context)

    def wait(self, tokens: int) -> int:
        """The number of readable tokens; a growing store waits until it has `tokens`, or is complete."""
        return len(self)

    def windows(self, starts: Sequence[int] | Ids, length: int) -> NDArray[np.int32]:
        """`length` ids from each start on: int32 [starts, length]. A window may reach over a shard's end."""
        starts = np.asarray(starts, dtype=np.int64)
        outside = (starts < 0) | (starts + length > len(self))
        if outside.any():
            raise IndexError(
                f"a window of {length} tokens at {starts[outside][0]} is outside the {len(self)} of {self.folder}"
            )
        rows = np.empty((len(starts), length), dtype=np.int32)  # [rows, tokens]
        first = np.searchsorted(self._ends, starts, side="right")
        if self.cached:
            self._fill_cached(rows, first, starts, self.cached)
        else:
            for row, (extent, start) in enumerate(zip(first.tolist(), starts.tolist(), strict=True)):
                self._fill(rows[row], extent, start)
        self._check_ids(rows)
        return rows

    def runs(self) -> Iterable[Ids]:
        """All ids, as contiguous runs of the shards."""
        return (self._ids(extent) for extent in self._extents if extent.tokens)

    def _fill(self, row: NDArray[np.int32], extent: int, start: int) -> None:
        filled = 0
        while filled < len(row):
            part = self._extents[extent]
            offset = start + filled - (int(self._ends[extent]) - part.tokens)
            ids = self._ids(part)[offset : min(offset + len(row) - filled, part.tokens)]
            row[filled : filled + len(ids)] = ids
            filled, extent = filled + len(ids), extent + 1

    def _fill_cached(self, rows: NDArray[np.int32], first: Ids, starts: Ids, cached: CachedShards) -> None:
        """All pieces at once, so that what is missing is fetched at the same time."""
        places: list[NDArray[np.int32]] = []
        pieces: list[Piece] = []
        for row, extent, start in zip(rows, first.tolist(), starts.tolist(), strict=True):
            filled = 0
            while filled < len(row):
                offset = start + filled - (int(self._ends[extent]) - self._extents[extent].tokens)
                tokens = min(len(row) - filled, self._extents[extent].tokens - offset)
                pieces.append(Piece(extent, offset, tokens))
                places.append(row[filled : filled + tokens])
                filled, extent = filled + tokens, extent + 1
        for place, ids in zip(places, cached.read(pieces), strict=True):
            place[:] = ids

    @property
    def cached(self) -> CachedShards | None:
        """The node's cache, for a scattered store in an object store; other stores are mapped."""
        if self._cached is None and storage.is_remote(self.folder) and isinstance(self._extents, Buckets):
            self._cached = CachedShards(self.folder, self.index, self.cache_bytes)
            self.read_ahead = ReadAhead(self._cached)
        return self._cached

    def close(self) -> None:
        """Stop reading ahead."""
        if self._cached and self.read_ahead:
            self.read_ahead.stop()
            self._cached.close()
            self._cached = self.read_ahead = None

    def _ids(self, extent: Extent) -> Ids:
        if extent.shard not in self._maps:
            self._maps[extent.shard] = map_shard(storage.join(self.folder, extent.shard), self.index)
        return self._maps[extent.shard][extent.start : extent.start + extent.tokens]

    def _check_ids(self, rows: NDArray[np.int32]) -> None:
        highest = rows.view(np.uint32).max(initial=0)  # a damaged uint32 may be negative as int32
        if highest >= self.index.vocab:
            raise RaygptError(
                f"{self.folder} holds token {highest}, beyond the {self.index.vocab} of its tokenizer; "
                "set data.tokenizer to the one that it was made with, or prepare it again"
            )


class TokenStore:
    """A complete, prepared corpus."""

    def __init__(self, folder: str, index: Index):
        self.folder, self.index = folder, index
        self.train = TokenStream(folder, index.train, index)
        self.val = TokenStream(folder, index.val, index)

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.load(self.folder)


def is_complete(folder: str) -> bool:
    """Whether a folder holds a complete store."""
    return storage.exists(storage.join(folder, INDEX))


def open_store(folder: str) -> TokenStore:
    """Open a prepared store, whose shards must all be there."""
    if not is_complete(folder) and storage.exists(storage.join(folder, PLAN)):
        raise RaygptError(f"{folder} is not complete yet; run the same prepare again, it continues where it stopped")
    if not is_complete(folder):
        raise RaygptError(f"{folder} is no token store, it has no {INDEX}; make one with raygpt prepare")
    store = TokenStore(folder, Index.read(folder))
    if not (isinstance(store.index.train, Buckets) and storage.is_remote(folder)):
        _check_sizes(store, storage.sizes(folder))  # a million names take minutes to list: checked when fetched
    return store


def _check_sizes(store: TokenStore, names: dict[str, int]) -> None:
    """Check now, not after hours of training, that every listed shard exists with its full size."""
    index = store.index
    ends: dict[str, int] = {}
    for extent in (*index.train, *index.val):
        ends[extent.shard] = max(ends.get(extent.shard, 0), extent.start + extent.tokens)
    for shard, tokens in ends.items():
        version = SCATTERED if isinstance(index.train, Buckets) and shard.startswith("train") else VERSION
        header = Header(np.dtype(index.dtype), tokens, index.tokenizer, version=version)
        expected = header.offset + header.size
        if shard not in names:
            raise RaygptError(
                f"{store.folder}: the shard {shard} is missing; copy it again, or prepare the source again"
            )
        if names[shard] < expected:
            raise RaygptError(
                f"{store.folder}/{shard} is truncated: {names[shard]} bytes instead of {expected}; "
                "copy it again, or delete the folder and prepare the source again"
            )


def map_shard(uri: str, index: Index) -> Ids:
    """The ids of a shard, memory-mapped; one in an object store is fetched to this node once."""
    path = storage.fetch_to_node(uri, index.fingerprint)
    if path.suffix == ".bin":
        return _mapped(path, np.dtype("<u2"), 0)
    with path.open("rb") as file:
        header = Header.unpack(file.read(HEADER_BYTES), str(path))
    if header.tokenizer != index.tokenizer:
        raise RaygptError(
            f"{path} was made with another tokenizer ({header.tokenizer}) than its store ({index.tokenizer}); "
            "delete the folder and prepare the source again"
        )
    if path.stat().st_size != header.offset + header.size:
        raise RaygptError(f"{path} is truncated; copy it again, or delete the folder and prepare the source again")
    return _mapped(path, header.dtype, header.offset)


def _mapped(path: Path, dtype: np.dtype[Any], offset: int) -> Ids:
    if path.stat().st_size == offset:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Access is random; by default the kernel reads up to 8 MB around each row (512 rows, cold: 6 s, now 0.01 s).
    memory.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(memory, dtype, offset=offset)
