"""Token stores: what is written is read back, across shards and from S3; what is damaged is refused in one line."""

import json
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.index import Index
from raygpt.corpus.shards import Header, dtype_for, read_header, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.errors import RaygptError

BYTES = tokenizers.fingerprint(tokenizers.Bytes())
in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_store(
    folder: str, train: Sequence[Sequence[int]], val: Sequence[Sequence[int]] = (), vocab: int = 257
) -> str:
    """A store with these ids in these shards."""
    extents: dict[str, list[Extent]] = {"train": [], "val": []}
    for stream, shards in (("train", train), ("val", val)):
        for number, ids in enumerate(shards):
            name = f"{stream}-{number:05d}.tokens"
            header = Header(dtype_for(vocab), len(ids), BYTES)
            write_shard(storage.join(folder, name), [np.array(ids, dtype=np.uint32)], header)
            extents[stream].append(Extent(name, 0, len(ids)))
    index = Index(
        fingerprint=os.urandom(8).hex(),
        source="test",
        tokenizer=BYTES,
        vocab=vocab,
        end_of_text=vocab - 1,
        dtype=dtype_for(vocab).str,
        documents=1,
        text_bytes=2,
        train=tuple(extents["train"]),
        val=tuple(extents["val"]),
        notes=("a note",),
    )
    tokenizers.save(tokenizers.Bytes(), folder)
    index.write(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A small store: train is 0…99 in shards of 40, 0 and 60 ids, val is 100…109."""
    write_store(str(tmp_path / "store"), [range(40), [], range(40, 100)], [range(100, 110)])
    return tmp_path / "store"


def refusal(folder: Path | str) -> str:
    """The line with which a store is refused, when it is opened or when all of it is first read."""
    with pytest.raises(RaygptError) as caught:
        read_all(str(folder))
    return str(caught.value)


def read_all(folder: str) -> None:
    stream = open_store(folder).train
    stream.windows([0], len(stream))


def edit(path: Path, offset: int, content: bytes) -> None:
    """Damage a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


# Reading back


@in_folder
@given(shards=st.lists(st.lists(st.integers(0, 256), max_size=40), min_size=1, max_size=8), chosen=st.data())
def test_windows_are_slices_of_the_shards_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], chosen: st.DataObject
) -> None:
    ids = np.concatenate([np.array(shard, dtype=np.int32) for shard in shards])
    length = chosen.draw(st.integers(0, len(ids)))
    starts = chosen.draw(st.lists(st.integers(0, len(ids) - length), max_size=10))
    stream = open_store(write_store(str(tmp_path_factory.mktemp("store")), shards)).train
    windows = stream.windows(starts, length)
    assert len(stream) == len(ids)
    assert windows.dtype == np.int32
    assert windows.shape == (len(starts), length)
    assert windows.tolist() == [ids[start : start + length].tolist() for start in starts]


def test_an_extent_may_be_any_part_of_a_shard(store: Path) -> None:
    index = json.loads((store / "index.json").read_bytes())
    index["train"] = [{"shard": "train-00002.tokens", "start": 50, "tokens": 10}, index["train"][0]]
    index["val"] = [{"shard": "train-00002.tokens", "start": 0, "tokens": 50}]
    (store / "index.json").write_text(json.dumps(index))
    opened = open_store(str(store))
    assert opened.train.windows([0], 50).tolist() == [[*range(90, 100), *range(40)]]
    assert opened.val.windows([5], 10).tolist() == [[*range(45, 55)]]


def test_runs_are_the_ids_of_the_shards_in_order(store: Path) -> None:
    opened = open_store(str(store))
    assert [run.tolist() for run in opened.train.runs()] == [[*range(40)], [*range(40, 100)]]
    assert [run.tolist() for run in opened.val.runs()] == [[*range(100, 110)]]


@pytest.mark.parametrize(("vocab", "dtype", "width"), [(257, "<u2", 2), (65536, "<u2", 2), (65537, "<u4", 4)])
def test_ids_take_two_bytes_up_to_a_vocabulary_of_65536_and_four_beyond(
    tmp_path: Path, vocab: int, dtype: str, width: int
) -> None:
    ids = [0, 255, vocab - 1, 1]
    store = open_store(write_store(str(tmp_path), [ids], vocab=vocab))
    raw = (tmp_path / "train-00000.tokens").read_bytes()
    assert dtype_for(vocab) == np.dtype(dtype)
    assert len(raw) == 64 + 4 * width
    assert np.frombuffer(raw[64:], dtype=dtype).tolist() == ids
    assert store.train.windows([0], 4).dtype == np.int32
    assert store.train.windows([0], 4).tolist() == [ids]


def test_a_shard_begins_with_a_header_of_64_bytes(tmp_path: Path) -> None:
    header = Header(np.dtype("<u2"), 3, "0123456789abcdef", documents=2, text_bytes=2**40, last=False)
    write_shard(str(tmp_path / "x.tokens"), [np.array([7, 8]), np.array([9])], header)
    raw = (tmp_path / "x.tokens").read_bytes()
    fields = struct.pack("<8s2HQ16s2QH", b"raygptok", 1, 2, 3, b"0123456789abcdef", 2, 2**40, 0)
    assert raw == fields + bytes(64 - len(fields)) + struct.pack("<3H", 7, 8, 9)
    assert read_header(str(tmp_path / "x.tokens")) == header


def test_the_index_is_read_back_as_it_was_written(store: Path) -> None:
    index = open_store(str(store)).index
    index.write(str(store))
    assert Index.read(str(store)) == index
    assert index.train == (
        Extent("train-00000.tokens", 0, 40),
        Extent("train-00001.tokens", 0, 0),
        Extent("train-00002.tokens", 0, 60),
    )
    assert index.summary() == {
        "source": "test",
        "fingerprint": index.fingerprint,
        "tokenizer": BYTES,
        "vocab": 257,
        "dtype": "uint16",
        "documents": 1,
        "text_bytes": 2,
        "train_tokens": 100,
        "val_tokens": 10,
        "shards": 4,
        "notes": ["a note"],
    }


def test_a_store_brings_its_tokenizer(store: Path) -> None:
    assert open_store(str(store)).tokenizer.decode([104, 105]) == "hi"


def test_a_stream_crosses_to_another_process_without_its_tokens(tmp_path: Path) -> None:
    ids = np.arange(10_000) % 257
    stream = open_store(write_store(str(tmp_path), [ids.tolist()])).train
    assert stream.windows([35], 10).tolist() == [[*range(35, 45)]]
    carried = pickle.dumps(stream)
    assert len(carried) < 2000
    assert pickle.loads(carried).windows([35], 10).tolist() == [[*range(35, 45)]]


@pytest.mark.parametrize(("start", "length"), [(-1, 5), (96, 5), (100, 1), (0, 101)])
def test_a_window_outside_the_stream_is_an_index_error(store: Path, start: int, length: int) -> None:
    stream = open_store(str(store)).train
    with pytest.raises(IndexError, match=f"a window of {length} tokens at {start} is outside the 100 of {store}$"):
        stream.windows([0, start], length)


def test_a_store_in_s3_gives_the_rows_of_a_local_one(
    store: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = f"{s3}/stores/{tmp_path.name}"
    for file in store.iterdir():
        storage.write_bytes(f"{folder}/{file.name}", file.read_bytes())
    local, remote = open_store(str(store)), open_store(folder)
    assert remote.index == local.index
    assert remote.train.windows([40], 60).tolist() == [[*range(40, 100)]]
    fetched = tmp_path / "cache" / "raygpt" / local.index.fingerprint
    assert [file.name for file in fetched.glob("*.tokens")] == ["train-00002.tokens"]  # what was touched, no more
    assert remote.train.windows([0, 35, 60], 40).tolist() == local.train.windows([0, 35, 60], 40).tolist()
    assert remote.val.windows([0], 10).tolist() == [[*range(100, 110)]]
    assert remote.tokenizer.decode([104, 105]) == "hi"


# What is not a whole store is refused, in one line


def test_a_folder_without_an_index_is_no_store(tmp_path: Path) -> None:
    expected = f"{tmp_path} is no token store, it has no index.json; make one with raygpt prepare"
    assert refusal(tmp_path) == expected
    missing = tmp_path / "missing"
    assert refusal(missing) == f"{missing} is no token store, it has no index.json; make one with raygpt prepare"


def test_a_folder_with_a_plan_but_no_index_is_not_whole_yet(store: Path) -> None:
    (store / "plan.json").write_text("{}")
    (store / "index.json").unlink()
    assert refusal(store) == f"{store} is not complete yet; run the same prepare again, it continues where it stopped"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"version": 1, "train": [', "Expecting value: line 1 column 26 (char 25)"),
        (b'{"version": 1}', "'train'"),
        (b"[]", "list indices must be integers or slices, not str"),
        (b"\xff\xfe\x00", "'utf-16-le' codec can't decode byte 0x00 in position 2: truncated data"),
    ],
)
def test_a_damaged_index_is_refused(store: Path, content: bytes, reason: str) -> None:
    (store / "index.json").write_bytes(content)
    assert refusal(store) == f"{store}/index.json is damaged ({reason}); delete it and prepare the source again"


@pytest.mark.parametrize("key", ["train", "val", "notes", "fingerprint", "vocab", "dtype"])
def test_an_index_that_lacks_a_key_is_refused_by_its_name(store: Path, key: str) -> None:
    index = json.loads((store / "index.json").read_bytes())
    del index[key]
    (store / "index.json").write_text(json.dumps(index))
    message = refusal(store)
    assert message.startswith(f"{store}/index.json is damaged (")
    assert f"'{key}'" in message
    assert message.endswith("); delete it and prepare the source again")


def test_an_index_of_another_version_is_refused(store: Path) -> None:
    index = json.loads((store / "index.json").read_bytes())
    (store / "index.json").write_text(json.dumps({**index, "version": 3, "something": "new"}))
    expected = f"{store}/index.json has format version 3, this raygpt reads up to 2; prepare the source again"
    assert refusal(store) == expected


def test_a_missing_shard_is_refused_when_the_store_is_opened(store: Path) -> None:
    (store / "train-00002.tokens").unlink()
    with pytest.raises(RaygptError) as caught:
        open_store(str(store))
    expected = f"{store}: the shard train-00002.tokens is missing; copy it again, or prepare the source again"
    assert str(caught.value) == expected


def test_a_truncated_shard_is_refused_when_the_store_is_opened(store: Path) -> None:
    os.truncate(store / "train-00002.tokens", 100)
    with pytest.raises(RaygptError) as caught:
        open_store(str(store))
    assert str(caught.value) == (
        f"{store}/train-00002.tokens is truncated: 100 bytes instead of 184; "
        "copy it again, or delete the folder and prepare the source again"
    )


def test_a_shard_truncated_after_the_store_was_opened_is_refused_when_it_is_read(store: Path) -> None:
    opened = open_store(str(store))
    os.truncate(store / "train-00002.tokens", 182)
    assert opened.train.windows([0], 40).tolist() == [[*range(40)]]
    with pytest.raises(RaygptError) as caught:
        opened.train.windows([0], 41)
    assert str(caught.value) == (
        f"{store}/train-00002.tokens is truncated; copy it again, or delete the folder and prepare the source again"
    )


@pytest.mark.parametrize("content", [b"x" * 2000, b"raygptok"])
def test_a_foreign_file_in_place_of_a_shard_is_refused(store: Path, content: bytes) -> None:
    opened = open_store(str(store))
    (store / "train-00000.tokens").write_bytes(content)
    with pytest.raises(RaygptError) as caught:
        opened.train.windows([0], 1)
    assert str(caught.value) == (
        f"{store}/train-00000.tokens is not a shard of a token store; delete it and prepare the source again"
    )


def test_a_shard_of_another_version_is_refused(store: Path) -> None:
    edit(store / "train-00000.tokens", 8, struct.pack("<H", 9))
    assert refusal(store) == (
        f"{store}/train-00000.tokens has format version 9, this raygpt reads up to 2; prepare the source again"
    )


def test_a_shard_with_a_damaged_header_is_refused(store: Path) -> None:
    edit(store / "train-00000.tokens", 10, struct.pack("<H", 3))  # bytes per id
    assert refusal(store) == (
        f"{store}/train-00000.tokens has a damaged header; delete it and prepare the source again"
    )


@pytest.mark.parametrize("fingerprint", [b"0123456789abcdef", b"\xff" * 16])
def test_a_shard_of_another_tokenizer_is_refused(store: Path, fingerprint: bytes) -> None:
    edit(store / "train-00002.tokens", 20, fingerprint)
    shown = fingerprint.decode(errors="replace")
    assert refusal(store) == (
        f"{store}/train-00002.tokens was made with another tokenizer ({shown}) than its store ({BYTES}); "
        "delete the folder and prepare the source again"
    )


@pytest.mark.parametrize(("vocab", "token"), [(257, 257), (257, 65535), (70_000, 70_000), (70_000, 2**32 - 1)])
def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path, vocab: int, token: int) -> None:
    write_store(str(tmp_path), [[1, token, 2]], vocab=vocab)
    stream = open_store(str(tmp_path)).train
    assert stream.windows([2], 1).tolist() == [[2]]
    with pytest.raises(RaygptError) as caught:
        stream.windows([2, 1], 1)
    assert str(caught.value) == (
        f"{tmp_path} holds token {token}, beyond the {vocab} of its tokenizer; "
        "set data.tokenizer to the one that it was made with, or prepare it again"
    )


# Writing


def interrupted(ids: Sequence[int]) -> Any:
    yield np.array(ids)
    raise KeyboardInterrupt


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_shard(str(tmp_path / "x.tokens"), interrupted(range(100)), Header(np.dtype("<u2"), 200, BYTES))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_shard_that_was_there(store: Path) -> None:
    before = {file.name: file.read_bytes() for file in store.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        write_shard(str(store / "train-00000.tokens"), interrupted([1]), Header(np.dtype("<u2"), 2, BYTES))
    assert {file.name: file.read_bytes() for file in store.iterdir()} == before


def test_a_reader_never_sees_a_half_written_shard(tmp_path: Path) -> None:
    name = str(tmp_path / "x.tokens")
    half, checked = threading.Event(), threading.Event()

    def slowly() -> Any:
        yield np.zeros(10**5, dtype=np.uint16)
        half.set()
        checked.wait(30)
        yield np.ones(10**5, dtype=np.uint16)

    writer = threading.Thread(target=write_shard, args=(name, slowly(), Header(np.dtype("<u2"), 2 * 10**5, BYTES)))
    writer.start()
    assert half.wait(30)
    seen = [storage.exists(name), "x.tokens" in storage.sizes(str(tmp_path))]
    checked.set()
    writer.join()
    assert seen == [False, False]
    assert storage.sizes(str(tmp_path)) == {"x.tokens": 64 + 4 * 10**5}


# Nine billion tokens

READ_BATCH_A_MILLION = """
import resource, sys
from raygpt.corpus.feed import Feed
from raygpt.corpus.store import open_store
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = open_store(sys.argv[1])
feed = Feed([store.train], context=1024, batch_rows=8, seed=1337)
rows = feed.rows(1_000_000)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
megabyte = 2**20 if sys.platform == "darwin" else 2**10  # there it is counted in bytes
print(len(store.train), *rows.shape, rows.dtype, rows.sum(), grown // megabyte)
"""


def test_a_store_of_nine_billion_tokens_costs_what_a_small_one_costs(tmp_path: Path) -> None:
    tokens, extents = 10**9 + 1, []
    for number in range(9):
        path = tmp_path / f"train-{number:05d}-00000.tokens"
        path.write_bytes(Header(np.dtype("<u2"), tokens, BYTES).pack())
        os.truncate(path, 64 + 2 * tokens)  # a sparse file: 2 GB of zeros that take no room
        extents.append(Extent(path.name, 0, tokens))
    edit(tmp_path / "train-00008-00000.tokens", 64 + 2 * (tokens - 1), b"\x07\0")
    index = Index("0" * 16, "test", BYTES, 257, 256, "<u2", 1, 2, tuple(extents), ())
    index.write(str(tmp_path))
    answer = subprocess.run(
        [sys.executable, "-c", READ_BATCH_A_MILLION, str(tmp_path)], capture_output=True, text=True, check=True
    )
    *found, megabytes = answer.stdout.split()
    assert found == ["9000000009", "8", "1025", "int32", "0"]
    assert int(megabytes) < 50  # a list of its 8.8 million windows would be 70
    assert TokenStore(str(tmp_path), index).train.windows([9 * tokens - 3], 3).tolist() == [[0, 0, 7]]
