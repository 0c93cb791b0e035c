"""Shards of a token store: a 64-byte header, then token ids; in a scattered store with checksums in between."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.corpus import blocks
from raygpt.errors import RaygptError

MAGIC = b"raygptok"
VERSION = 1
SCATTERED = 2  # version of a scattered store and its shards, which have checksums
# magic, version, bytes per id, count, tokenizer fingerprint, documents, bytes of text, last part of its unit
HEADER = struct.Struct("<8sHHQ16sQQH")
HEADER_BYTES = 64

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
        check_version(version, name)
        if width not in (2, 4):
            raise RaygptError(f"{name} has a damaged header; delete it and prepare the source again")
        fingerprint = tokenizer.decode(errors="replace")
        return cls(np.dtype(f"<u{width}"), tokens, fingerprint, documents, text_bytes, bool(last), version)


def check_version(version: int, name: str) -> None:
    """Refuse a format that is newer than this code."""
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
    content, head = memoryview(ids.astype(header.dtype, copy=False).tobytes()), header.pack()
    with storage.atomic_write(uri) as path, path.open("wb") as file:
        file.write(head + blocks.pack_table(head, content))
        file.write(content)


def read_header(uri: str) -> Header:
    """The header of a shard."""
    with storage.open_read(uri) as stream:
        return Header.unpack(stream.read(HEADER_BYTES), uri)
