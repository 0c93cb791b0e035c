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
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.corpus import blocks, tokenizers
from raygpt.corpus.extents import Buckets, Extent, token_counts
from raygpt.corpus.order import window_count, window_counts
from raygpt.errors import RaygptError

MAGIC = b"raygptok"
VERSION = 1
SCATTERED = 2  # version of a scattered store and its shards, which have checksums
# magic, version, bytes per id, count, tokenizer fingerprint, documents, bytes of text, last part of its unit
HEADER = struct.Struct("<8sHHQ16sQQH")
HEADER_BYTES = 64
STORES = "stores"  # beside the runs, which share the prepared tokens
INDEX, PLAN = "index.json", "plan.json"
FAILED = "failed.txt"  # why prepare stopped, for readers of an incomplete store

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Header:
    """The header of a shard."""

    dtype: np.dtype[Any]
    tokens: int
    tokenizer: str
    documents: int = 0
    text_bytes: int = 0
    last: bool = True  # the last part of its unit
    version: int = VERSION

    @property
    def size(self) -> int:
        """Bytes of the ids."""
        return self.tokens * self.dtype.itemsize

    @property
    def offset(self) -> int:
        """Where the ids begin."""
        return HEADER_BYTES if self.version == VERSION else blocks.head_bytes(self.size, HEADER_BYTES)

    def pack(self) -> bytes:
        fields = (self.dtype.itemsize, self.tokens, self.tokenizer.encode(), self.documents, self.text_bytes, self.last)
        return HEADER.pack(MAGIC, self.version, *fields).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes, name: str) -> "Header":
        if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
            raise RaygptError(f"{name} is not a shard of a token store; delete it and prepare the source again")
        _, version, width, tokens, tokenizer, documents, text_bytes, last = HEADER.unpack(raw[: HEADER.size])
        _check_version(version, name)
        if width not in (2, 4):
            raise RaygptError(f"{name} has a damaged header; delete it and prepare the source again")
        fingerprint = tokenizer.decode(errors="replace")
        return cls(np.dtype(f"<u{width}"), tokens, fingerprint, documents, text_bytes, bool(last), version)


def _check_version(version: int, name: str) -> None:
    if version not in (VERSION, SCATTERED):
        raise RaygptError(
            f"{name} has format version {version}, this raygpt reads up to {SCATTERED}; prepare the source again"
        )


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The narrowest type that holds every id."""
    return np.dtype("<u2") if vocab <= 2**16 else np.dtype("<u4")


def shard_name(stream: str, unit: int, part: int) -> str:
    """Shards are numbered by the position of their text in the source, so their order is known before they exist."""
    return f"{stream}-{unit:05d}-{part:05d}.tokens"


def write_shard(uri: str, ids: Iterable[Ids], header: Header) -> None:
    """Write a shard atomically."""
    with storage.atomic_write(uri) as path, path.open("wb") as file:
        file.write(header.pack())
        for part in ids:
            # not tofile: it does not report a full disk
            file.write(part.astype(header.dtype, copy=False).data)


def write_bucket(uri: str, ids: Ids, header: Header) -> None:
    """Write a shard of a scattered store, with checksums, atomically."""
    content, head = ids.astype(header.dtype, copy=False).data.cast("B"), header.pack()
    with storage.atomic_write(uri) as path, path.open("wb") as file:
        file.write(head + blocks.pack_table(head, content))
        file.write(content)


def read_header(uri: str) -> Header:
    """The header of a shard."""
    with storage.open_read(uri) as stream:
        return Header.unpack(stream.read(HEADER_BYTES), uri)


@dataclass(frozen=True)
class Index:
    """`index.json`: the store's contents; its existence shows that the store is complete."""

    fingerprint: str  # of source, tokenizer and settings
    source: str
    tokenizer: str  # fingerprint
    vocab: int
    end_of_text: int
    dtype: str
    documents: int
    text_bytes: int
    train: Sequence[Extent]
    val: Sequence[Extent]
    notes: tuple[str, ...] = ()  # for the user, e.g. how validation was held out
    version: int = VERSION

    def tokens(self, stream: str) -> int:
        return int(token_counts(getattr(self, stream)).sum())

    def summary(self) -> dict[str, Any]:
        """The index without its lists of shards."""
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "vocab": self.vocab,
            "dtype": np.dtype(self.dtype).name,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "train_tokens": self.tokens("train"),
            "val_tokens": self.tokens("val"),
            "shards": self._shards,
            "notes": list(self.notes),
        }

    @property
    def _shards(self) -> int:
        if isinstance(self.train, Buckets):
            return len(self.train) + len(self.val)
        return len({extent.shard for extent in (*self.train, *self.val)})

    def write(self, folder: str) -> None:
        fields = asdict(self)
        if isinstance(self.train, Buckets):
            fields["train"] = self.train.to_json()
        storage.write_json(storage.join(folder, INDEX), fields)

    @classmethod
    def read(cls, folder: str) -> "Index":
        uri, remedy = storage.join(folder, INDEX), "delete it and prepare the source again"
        fields = storage.read_json(uri, remedy)
        try:
            _check_version(fields["version"], uri)
            streams = {s: _extents(fields[s]) for s in ("train", "val")}
            return cls(**{**fields, **streams, "notes": tuple(fields["notes"])})
        except (KeyError, TypeError) as error:
            raise RaygptError(f"{uri} is damaged ({error}); {remedy}") from error


def _extents(listed: Any) -> Sequence[Extent]:
    return Buckets.from_json(listed) if isinstance(listed, dict) else tuple(Extent(**extent) for extent in listed)


class TokenStream:
    """The ids of a store's train or val part, one after another; shards are mapped when they are first read."""

    def __init__(self, folder: str, extents: Sequence[Extent], index: Index):
        self.folder, self.index = folder, index
        self._extents = extents
        self._ends = np.cumsum(token_counts(extents))
        self._maps: dict[str, Ids] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # another process maps the shards itself

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
    names = storage.sizes(folder)
    if INDEX not in names and PLAN in names:
        raise RaygptError(f"{folder} is not complete yet; run the same prepare again, it continues where it stopped")
    if INDEX not in names:
        raise RaygptError(f"{folder} is no token store, it has no {INDEX}; make one with raygpt prepare")
    store = TokenStore(folder, Index.read(folder))
    _check_sizes(store, names)
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
