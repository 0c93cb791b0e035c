"""nanoGPT's train.bin and val.bin, as numpy writes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.nanogpt import is_nanogpt, open_nanogpt, write_nanogpt
from raygpt.corpus.shards import Header, dtype_for, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.errors import RaygptError

TRAIN = np.random.default_rng(0).integers(0, 257, 1000, dtype=np.uint16)
VAL = np.random.default_rng(1).integers(0, 257, 100, dtype=np.uint16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As nanoGPT's prepare.py leaves it."""
    TRAIN.tofile(tmp_path / "train.bin")
    VAL.tofile(tmp_path / "val.bin")
    return tmp_path


def refusal(folder: Path, tokenizer: str = "bytes") -> str:
    with pytest.raises(RaygptError) as caught:
        open_nanogpt(str(folder), tokenizer)
    return str(caught.value)


def test_files_that_numpy_wrote_are_read_as_they_are(folder: Path) -> None:
    store = open_nanogpt(str(folder), "bytes")
    assert len(store.train) == 1000
    assert len(store.val) == 100
    assert store.train.windows([0, 991, 5], 9).tolist() == [
        TRAIN[:9].tolist(),
        TRAIN[991:].tolist(),
        TRAIN[5:14].tolist(),
    ]
    assert store.val.windows([0], 100).tolist() == [VAL.tolist()]
    assert store.tokenizer.decode([104, 105]) == "hi"
    assert sorted(file.name for file in folder.iterdir()) == ["train.bin", "val.bin"]


def test_a_feed_gives_the_rows_that_numpy_gives(folder: Path) -> None:
    feed = Feed([open_nanogpt(str(folder), "bytes").train], context=16, batch_rows=4, order="sequential")
    expected = [TRAIN[n * 16 : n * 16 + 17].tolist() for n in range(8)]
    assert feed.rows(0).tolist() + feed.rows(1).tolist() == expected


def test_files_in_s3_are_read_as_they_are(
    folder: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = f"{s3}/{tmp_path.name}"
    for name in ("train.bin", "val.bin"):
        storage.write_bytes(f"{remote}/{name}", (folder / name).read_bytes())
    assert is_nanogpt(remote)
    store = open_nanogpt(remote, "bytes")
    assert store.train.windows([0], 1000).tolist() == [TRAIN.tolist()]
    assert store.index.fingerprint == open_nanogpt(str(folder), "bytes").index.fingerprint


def test_ids_of_all_of_uint16_are_read(tmp_path: Path) -> None:
    ids = np.array([0, 256, 50256], dtype=np.uint16)
    ids.tofile(tmp_path / "train.bin")
    ids.tofile(tmp_path / "val.bin")
    tokenizers.save(tokenizers.Char("".join(map(chr, range(32, 50288)))), str(tmp_path))
    assert open_nanogpt(str(tmp_path), str(tmp_path)).train.windows([0], 3).tolist() == [[0, 256, 50256]]


def test_a_folder_is_nanogpts_by_its_train_file(folder: Path, tmp_path: Path) -> None:
    assert is_nanogpt(str(folder))
    assert not is_nanogpt(str(tmp_path / "missing"))
    (folder / "train.bin").unlink()
    assert not is_nanogpt(str(folder))


def test_the_fingerprint_changes_with_either_file(folder: Path) -> None:
    prints = {open_nanogpt(str(folder), "bytes").index.fingerprint}
    for name, ids in (("train.bin", TRAIN), ("val.bin", VAL)):
        changed = ids.copy()
        changed[-1] += 1 if changed[-1] < 256 else -1
        for content in (changed, ids[:-1]):
            content.tofile(folder / name)
            prints.add(open_nanogpt(str(folder), "bytes").index.fingerprint)
        ids.tofile(folder / name)
    assert len(prints) == 5
    assert open_nanogpt(str(folder), "bytes").index.fingerprint in prints


@pytest.mark.parametrize("place", [0, 1_999_999])
def test_the_fingerprint_of_a_large_file_is_of_its_beginning_and_its_end(folder: Path, place: int) -> None:
    ids = np.zeros(2_000_000, dtype=np.uint16)  # 4 MB, of which the first and the last are read
    ids.tofile(folder / "train.bin")
    before = open_nanogpt(str(folder), "bytes").index.fingerprint
    ids[place] = 1
    ids.tofile(folder / "train.bin")
    assert open_nanogpt(str(folder), "bytes").index.fingerprint != before


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_an_odd_number_of_bytes_is_refused(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"x")
    assert refusal(folder) == (
        f"{folder}/{name} has an odd number of bytes: truncated, or not nanoGPT's uint16; copy it again"
    )


def test_a_missing_val_file_is_refused(folder: Path) -> None:
    (folder / "val.bin").unlink()
    assert refusal(folder) == f"{folder} has no val.bin; write both files, as nanoGPT's prepare.py does"


@pytest.mark.parametrize("tokenizer", ["char", "bpe:8192"])
def test_a_tokenizer_that_would_be_made_from_text_is_refused(folder: Path, tokenizer: str) -> None:
    assert refusal(folder, tokenizer) == (
        f"{folder} has nanoGPT's bare files, which do not say how they were made; set data.tokenizer to gpt2, "
        f"bytes or a saved tokenizer ({tokenizer} would be made from text that is not here)"
    )


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_a_file_shorter_than_a_window_is_refused_by_its_name(folder: Path, tokens: int) -> None:
    TRAIN[:tokens].tofile(folder / "train.bin")
    feed = Feed([open_nanogpt(str(folder), "bytes").train], context=16, batch_rows=1)
    with pytest.raises(RaygptError) as caught:
        feed.rows(0)
    assert str(caught.value) == (
        f"{folder} has {tokens} tokens, fewer than a window of 17; set model.context lower, or use more text"
    )


def test_a_token_of_another_tokenizer_is_refused(folder: Path) -> None:
    np.array([1, 2, 50256], dtype=np.uint16).tofile(folder / "train.bin")
    with pytest.raises(RaygptError) as caught:
        open_nanogpt(str(folder), "bytes").train.windows([0], 3)
    assert str(caught.value) == (
        f"{folder} holds token 50256, beyond the 257 of its tokenizer; "
        "set data.tokenizer to the one that it was made with, or prepare it again"
    )


def write_store(folder: str, vocab: int, train: list[Any], val: list[Any]) -> TokenStore:
    """A store of raygpt's with these shards."""
    tokenizer, dtype = tokenizers.fingerprint(tokenizers.Bytes()), dtype_for(vocab)
    extents: dict[str, list[Extent]] = {"train": [], "val": []}
    for stream, shards in (("train", train), ("val", val)):
        for number, ids in enumerate(shards):
            name = f"{stream}-{number}.tokens"
            write_shard(storage.join(folder, name), [ids], Header(dtype, len(ids), tokenizer))
            extents[stream].append(Extent(name, 0, len(ids)))
    streams = tuple(extents["train"]), tuple(extents["val"])
    index = Index("0" * 16, "test", tokenizer, vocab, vocab - 1, dtype.str, 1, 1, *streams)
    index.write(folder)
    return open_store(folder)


def test_written_files_have_the_bytes_that_numpy_writes(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), 257, [TRAIN[:300], TRAIN[:0], TRAIN[300:]], [VAL])
    write_nanogpt(store)
    TRAIN.tofile(tmp_path / "train.reference")
    VAL.tofile(tmp_path / "val.reference")
    assert (tmp_path / "train.bin").read_bytes() == (tmp_path / "train.reference").read_bytes()
    assert (tmp_path / "val.bin").read_bytes() == (tmp_path / "val.reference").read_bytes()
    again = open_nanogpt(str(tmp_path), "bytes")
    assert again.train.windows([0], 1000).tolist() == store.train.windows([0], 1000).tolist()


def test_a_store_without_validation_text_has_an_empty_val_file(tmp_path: Path) -> None:
    write_nanogpt(write_store(str(tmp_path), 257, [TRAIN], []))
    assert (tmp_path / "val.bin").read_bytes() == b""
    assert len(open_nanogpt(str(tmp_path), "bytes").val) == 0


def test_a_vocabulary_beyond_uint16_cannot_be_written(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), 65537, [TRAIN], [VAL])
    with pytest.raises(RaygptError) as caught:
        write_nanogpt(store)
    expected = "nanoGPT's files are uint16 and this store has 65537 ids; use a smaller tokenizer"
    assert str(caught.value) == expected
    assert not list(tmp_path.glob("*.bin"))
