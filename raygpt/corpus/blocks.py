"""Blocks of a scattered store's shard, each with a checksum: the least that a node fetches, keeps and verifies.

After the 64-byte header come the CRC-32 of each 256 KiB of ids, then one of header and table, filled up to a multiple
of 64 bytes. With these a part of a shard can be verified without the rest.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from raygpt.errors import DamagedError

BLOCK = 256 * 2**10  # bytes: 128 windows of 1,024 tokens. Smaller ones would be too many files, and slow to request
ALIGNMENT = 64

Checksums = NDArray[np.uint32]


def block_count(size: int) -> int:
    """The blocks of so many bytes of ids."""
    return -(-size // BLOCK)


def head_bytes(size: int, header: int) -> int:
    """Length of header and table, for so many bytes of ids."""
    return -(-(header + 4 * block_count(size) + 4) // ALIGNMENT) * ALIGNMENT


def pack_table(header: bytes, ids: memoryview) -> bytes:
    """The table that follows this header."""
    sums = [zlib.crc32(ids[start : start + BLOCK]) for start in range(0, len(ids), BLOCK)]
    table = np.array(sums, dtype="<u4").tobytes()
    table += zlib.crc32(header + table).to_bytes(4, "little")
    return table.ljust(head_bytes(len(ids), len(header)) - len(header), b"\0")


def unpack_table(head: bytes, size: int, header: int, name: str) -> Checksums:
    """The checksums of a shard's blocks, from header and table; raises if these are damaged themselves."""
    end = header + 4 * block_count(size)
    if len(head) < end + 4 or zlib.crc32(head[:end]).to_bytes(4, "little") != head[end : end + 4]:
        raise DamagedError(f"{name} has a damaged header; copy it again, or prepare the source again")
    return np.frombuffer(head, dtype="<u4", count=block_count(size), offset=header).astype(np.uint32)


def check_block(block: bytes | memoryview, number: int, checksums: Checksums, name: str) -> None:
    """Raise if a block's bytes are not those that prepare wrote."""
    if zlib.crc32(block) != checksums[number]:
        raise DamagedError(
            f"{name} is damaged: block {number} does not match its checksum; copy it again, or prepare the source again"
        )
