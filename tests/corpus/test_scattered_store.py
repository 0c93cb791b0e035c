"""Scattered stores: read by memory map, permuted, and what is damaged refused."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from test_store import BYTES, refusal, write_store

from raygpt import storage
from raygpt.corpus import blocks, tokenizers
from raygpt.corpus.extents import Buckets, bucket_name
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.shards import SCATTERED, Header, dtype_for, write_bucket
from raygpt.corpus.store import open_store
from raygpt.errors import DamagedError


def write_scattered(folder: str, buckets: Sequence[Sequence[int]], group: int = 8, vocab: int = 257) -> str:
    """A scattered store with these ids in its shards."""
    for number, ids in enumerate(buckets):
        header = Header(dtype_for(vocab), len(ids), BYTES, version=SCATTERED)
        write_bucket(storage.join(folder, bucket_name(number)), np.array(ids), header)
    counts = Buckets(np.array([len(ids) for ids in buckets]), group)
    tokenizers.save(tokenizers.Bytes(), folder)
    index = Index("5" * 16, "test", BYTES, vocab, vocab - 1, dtype_for(vocab).str, 1, 2, counts, (), (), SCATTERED)
    index.write(folder)
    return folder


def test_a_scattered_store_is_read_by_memory_map_from_a_disk(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 257, (10, 200_000))  # two blocks a shard
    folder = write_scattered(str(tmp_path / "store"), ids.tolist())
    store = open_store(folder)
    assert store.train.windows([199_990, 1_234_567], 20).tolist() == [
        ids.ravel()[start : start + 20].tolist() for start in (199_990, 1_234_567)
    ]
    assert store.index.summary()["shards"] == 10
    assert store.train.window_count(100) == 10 * 1999
    assert Index.read(folder) == store.index


def test_a_scattered_store_of_one_group_is_permuted_whole_as_before(tmp_path: Path) -> None:
    ids = np.arange(256).reshape(8, 32)
    grouped = open_store(write_scattered(str(tmp_path / "a"), ids.tolist()))
    plain = open_store(write_store(str(tmp_path / "b"), [range(256)]))
    feeds = [Feed([store.train], context=10, batch_rows=5, seed=3) for store in (grouped, plain)]
    assert feeds[0].rows(7).tolist() == feeds[1].rows(7).tolist()
    four = open_store(write_scattered(str(tmp_path / "c"), ids.tolist(), group=4))
    assert four.train.window_count(10) == 8 * 3
    assert plain.train.window_count(10) == 25


def test_a_scattered_stores_missing_or_short_shard_is_refused(tmp_path: Path) -> None:
    folder = write_scattered(str(tmp_path / "store"), [range(100)] * 9)
    shard = tmp_path / "store" / "train-0000004.tokens"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "train-0000004.tokens is truncated" in refusal(folder)
    shard.unlink()
    assert "the shard train-0000004.tokens is missing" in refusal(folder)


def test_the_checksums_of_a_shard_are_those_of_its_blocks(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 257, 200_000).astype("<u2")
    folder = write_scattered(str(tmp_path / "store"), [ids.tolist()])
    raw = (Path(folder) / "train-0000000.tokens").read_bytes()
    header = Header.unpack(raw, "it")
    head, content = raw[: header.offset], raw[header.offset :]
    assert content == ids.tobytes()
    sums = blocks.unpack_table(head, header.size, 64, "it")
    assert sums.tolist() == [zlib.crc32(content[: 2**18]), zlib.crc32(content[2**18 :])]
    for place in (20, 66, 71):
        damaged = bytearray(head)
        damaged[place] ^= 1
        with pytest.raises(DamagedError, match="damaged header"):
            blocks.unpack_table(bytes(damaged), header.size, 64, "it")
