"""Prepare: the store of a source is what one plain loop over its documents gives, however it came about."""

import gzip
import hashlib
import json
import lzma
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizers as hugging_face
from numpy.typing import NDArray

from raygpt import storage
from raygpt.corpus.documents import DocumentReader, Piece
from raygpt.corpus.pipeline import Holdout, Marked, Unit, _marked, _parts
from raygpt.corpus.prepare import Progress, prepare
from raygpt.corpus.sources import Source, resolve
from raygpt.corpus.store import TokenStore, TokenStream
from raygpt.errors import RaygptError

Ids = NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _cluster(ray_cluster: None) -> None:
    """Every test here runs on the session's cluster, but for those that start a process of their own."""


# References, written out again


def of_gpt2(documents: list[str], shared_data: Path) -> Ids:
    """tiktoken's own GPT-2 from the files that OpenAI published, end-of-text after each document."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_CACHE_DIR", str(shared_data / "tiktoken_cache"))
        encode = tiktoken.get_encoding("gpt2").encode_ordinary
    return np.array([token for text in documents for token in [*encode(text), 50256]], dtype=np.int64)


def of_bytes(documents: list[str]) -> Ids:
    """Every byte a token, 256 after each document."""
    raw = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in documents]
    return np.concatenate([np.empty(0, np.int64), *(np.append(part, 256) for part in raw)])


def is_val(text: str, share: float, seed: int = 2357) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def sides(documents: list[str], share: float, seed: int = 2357) -> tuple[list[str], list[str]]:
    val = [is_val(text, share, seed) for text in documents]
    train = [text for text, held_out in zip(documents, val, strict=True) if not held_out]
    return train, [text for text, held_out in zip(documents, val, strict=True) if held_out]


def ids(stream: TokenStream) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *stream.runs()]).astype(np.int64)


def check(store: TokenStore, train: Ids, val: Ids) -> None:
    np.testing.assert_array_equal(ids(store.train), train)
    np.testing.assert_array_equal(ids(store.val), val)


# Texts


def articles(path: Path) -> list[str]:
    whole = lzma.decompress(path.read_bytes()).decode()
    return [part for part in re.split(r"(?m)^<\|endoftext\|>\n", whole) if part.strip()]


def words(seed: int, count: int) -> str:
    chosen = np.random.default_rng(seed).choice(["river", "a", "stone", "don't", "1987", "–", "é", "walks.\n"], count)
    return " ".join(chosen.tolist()).replace("\n ", "\n") + "\n"


def text_file(path: Path, documents: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<|endoftext|>\n".join(documents))
    return str(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """15 MB in three files, each more than a unit has, and their documents."""
    folder = tmp_path_factory.mktemp("large")
    documents = [words(seed, 3000) for seed in range(900)]
    for number, (first, last) in enumerate([(0, 250), (250, 600), (600, 900)]):
        text_file(folder / f"{number}.txt", documents[first:last])
    return str(folder), documents


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if not path.name.startswith(".")}


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(RaygptError) as caught:
        prepare(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The store is what a plain loop gives


def test_the_store_is_what_one_loop_over_the_documents_gives(shared_data: Path, tmp_path: Path) -> None:
    watched: list[Progress] = []
    path = shared_data / "enwiki2014" / "val.txt.xz"
    store = prepare(str(path), str(tmp_path / "store"), "gpt2", val=0.1, watch=watched.append)
    documents = articles(path)
    train, val = (of_gpt2(side, shared_data) for side in sides(documents, 0.1))
    check(store, train, val)
    assert len(train) + len(val) == 455_197
    assert store.index.documents == watched[-1].documents == len(documents)
    assert store.index.text_bytes == watched[-1].text_bytes == sum(len(text.encode()) for text in documents)
    assert watched[-1].tokens == 455_197
    assert watched[-1].source_bytes == watched[-1].source_total == 619_320  # as it lies there, compressed


def test_units_and_parts_do_not_show_in_the_store(large: tuple[str, list[str]], tmp_path: Path) -> None:
    source, documents = large
    watched: list[Progress] = []
    store = prepare(source, str(tmp_path / "store"), "bytes", val=0.2, watch=watched.append)
    check(store, *map(of_bytes, sides(documents, 0.2)))
    shards = {path.name for path in (tmp_path / "store").glob("train-*")}
    assert {name[:11] for name in shards} == {"train-00000", "train-00001", "train-00002"}
    assert {"train-00001-00000.tokens", "train-00001-00001.tokens"} <= shards
    assert [p.source_bytes for p in watched] == sorted(p.source_bytes for p in watched)
    assert watched[-1].source_bytes == watched[-1].source_total == sum(p.stat().st_size for p in Path(source).iterdir())
    assert watched[-1].documents == store.index.documents == 900
    assert watched[-1].tokens == len(store.train) + len(store.val)


def test_the_same_text_gives_the_same_bytes_and_a_store_that_is_there_is_opened(
    large: tuple[str, list[str]], tmp_path: Path
) -> None:
    source, _ = large
    shutil.copytree(source, tmp_path / "copy")
    first, second = tmp_path / "one", tmp_path / "two"
    prepare(source, str(first), "bytes", val=0.2)
    prepare(str(tmp_path / "copy"), str(second), "bytes", val=0.2)
    ours, theirs = contents(first), contents(second)
    for name in ("plan.json", "index.json"):  # they say where the text was
        ours[name], theirs[name] = (json.loads(files[name]) | {"source": ""} for files in (ours, theirs))
    assert ours == theirs
    before, watched = times(first), []
    store = prepare(source, str(first), "bytes", val=0.2, watch=watched.append)
    assert times(first) == before
    assert not watched
    assert store.index.documents == 900


def test_parts_are_the_pieces_in_order_whatever_their_size() -> None:
    pieces = [Marked(words(seed, seed % 7), seed % 3 == 0, seed % 2 == 0) for seed in range(50)]

    def size(part: list[Marked]) -> int:
        return sum(len(piece.text.encode()) for piece in part)

    for target in (1, 10, 100, size(pieces), 10 * size(pieces)):
        parts = list(_parts(iter(pieces), target))
        assert [piece for part, _ in parts for piece in part] == pieces
        assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
        assert all(size(part) >= target for part, last in parts if not last)
        assert all(size(part[:-1]) < target for part, _ in parts)
    assert list(_parts(iter([]), 10)) == [([], True)]


# Validation by documents


def test_a_document_in_pieces_goes_where_its_first_piece_goes() -> None:
    texts = [words(seed, 20) for seed in range(40)]
    unit = Unit("train", 0, Source("", (), "file", "text"), (), 0)
    pieces = [Piece(text, row // 4, first=row % 4 == 0, last=row % 4 == 3) for row, text in enumerate(texts)]
    marked = list(_marked(iter(pieces), unit, Holdout(0.5, 7)))
    assert [mark.val for mark in marked] == [is_val(texts[row // 4 * 4], 0.5, 7) for row in range(40)]
    assert len({mark.val for mark in marked}) == 2
    assert [(mark.text, mark.ends) for mark in marked] == [(piece.text, piece.last) for piece in pieces]


def test_a_long_document_is_whole_on_one_side(tmp_path: Path) -> None:
    long = words(1, 1_700_000)  # 8 MB
    around = [words(seed, 50) for seed in range(10, 90)]
    source = text_file(tmp_path / "x.txt", [*around[:40], long, *around[40:]])
    found = resolve(source)
    assert sum(piece.row == 40 for piece in DocumentReader(found, found.files).pieces()) == 2
    store = prepare(source, str(tmp_path / "store"), "bytes", val=0.3)
    assert len(list((tmp_path / "store").glob("train-*"))) == 2  # each has a part of it
    train, val = sides(around[:40], 0.3)
    more_train, more_val = sides(around[40:], 0.3)
    if len(store.val) > len(store.train):
        val.append(long)
    else:
        train.append(long)
    check(store, of_bytes(train + more_train), of_bytes(val + more_val))


def test_copies_of_a_document_are_on_one_side(tmp_path: Path) -> None:
    documents = [words(seed, 20) for seed in range(40)]
    for name in ("a", "b", "c"):
        text_file(tmp_path / "texts" / f"{name}.txt", documents if name != "b" else documents[::-1])
    store = prepare(str(tmp_path / "texts"), str(tmp_path / "store"), "bytes", val=0.4)
    train, val = sides(documents, 0.4)
    assert train
    assert val
    check(store, of_bytes(train + train[::-1] + train), of_bytes(val + val[::-1] + val))


def test_the_share_and_the_seed_decide_which_documents_are_held_out(tmp_path: Path) -> None:
    documents = [words(seed, 20) for seed in range(400)]
    source = text_file(tmp_path / "x.txt", documents)
    held_out = {}
    for share, seed in ((0.1, 2357), (0.3, 2357), (0.1, 1)):
        store = prepare(source, str(tmp_path / f"{share}-{seed}"), "bytes", val=share, split_seed=seed)
        check(store, *map(of_bytes, sides(documents, share, seed)))
        held_out[share, seed] = set(sides(documents, share, seed)[1])
    assert held_out[0.1, 2357] < held_out[0.3, 2357]  # a larger share only adds
    assert held_out[0.1, 2357] != held_out[0.1, 1]


def test_validation_text_of_its_own_is_the_whole_of_val(large: tuple[str, list[str]], tmp_path: Path) -> None:
    source, documents = large
    own = [words(seed, 20) for seed in range(5000, 5020)]
    text_file(tmp_path / "val" / "a.txt", own[:15])
    text_file(tmp_path / "val" / "b.txt", own[15:])
    watched: list[Progress] = []
    store = prepare(source, str(tmp_path / "store"), "bytes", val=str(tmp_path / "val"), watch=watched.append)
    check(store, of_bytes(documents), of_bytes(own))
    assert store.index.documents == watched[-1].documents == 920
    assert watched[-1].source_bytes == watched[-1].source_total


def test_where_no_document_is_drawn_the_end_is_held_out_with_a_note(tmp_path: Path) -> None:
    text = next(text for text in (words(seed, 2000) for seed in range(100)) if not is_val(text, 0.1))
    store = prepare(text_file(tmp_path / "x.txt", [text]), str(tmp_path / "store"), "bytes", val=0.1)
    cut = int(len(text.encode()) * 0.9)
    check(store, of_bytes([text])[:cut], of_bytes([text])[cut:])
    assert store.index.notes == (
        "no document of 1 was drawn for validation: the last 10.0% of the tokens are held out",
    )


def test_where_every_document_is_drawn_the_end_is_held_out_all_the_same(tmp_path: Path) -> None:
    texts = [text for text in (words(seed, 2000) for seed in range(100)) if is_val(text, 0.2)][:2]
    store = prepare(text_file(tmp_path / "x.txt", texts), str(tmp_path / "store"), "bytes", val=0.2)
    ids = of_bytes(texts)
    cut = int((len(ids) - 1) * 0.8)
    check(store, ids[:cut], ids[cut:])
    assert store.index.notes == (
        "each document of 2 was drawn for validation: the last 20.0% of the tokens are held out",
    )


# Validation off the end


def test_the_tail_of_shakespeare_is_nanogpts(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "tinyshakespeare.txt"
    store = prepare(str(path), str(tmp_path / "store"), "char", val=0.1, split="tail")
    text = path.read_text()  # what follows is nanoGPT's data/shakespeare_char/prepare.py
    stoi = {character: number for number, character in enumerate(sorted(set(text)))}
    train, val = text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]
    assert (len(train), len(val)) == (1_003_854, 111_540)
    check(store, np.array([stoi[c] for c in train]), np.array([*(stoi[c] for c in val), 65]))  # and end-of-text
    assert store.index.vocab == 66
    assert store.index.notes == (
        "no document begins near enough to the cut: the last 10.0% of the tokens are held out, "
        "from within a document on",
    )


@pytest.mark.parametrize(
    ("lengths", "train_tokens"),
    [
        ([100] * 20, 18 * 101),  # 2,020 tokens, cut at 1,817: the nearest document begins at 1,818
        ([100] * 10, 9 * 101),  # cut at 908 of 1,010, just before the last
        ([900, 30, 30, 30], 901),  # cut at 893: the second begins at 901
        ([10, 980], int((11 + 981 - 1) * 0.9)),  # 99 % or 0 % would be held out: cut within the document
        ([980, 10], int((11 + 981 - 1) * 0.9)),
    ],
)
def test_the_tail_begins_with_a_document_where_that_keeps_its_share(
    tmp_path: Path, lengths: list[int], train_tokens: int
) -> None:
    documents = [chr(97 + number) * (length - 1) + "\n" for number, length in enumerate(lengths)]
    source = text_file(tmp_path / "x.txt", documents)
    store = prepare(source, str(tmp_path / "store"), "bytes", val=0.1, split="tail")
    whole = of_bytes(documents)
    check(store, whole[:train_tokens], whole[train_tokens:])
    assert bool(store.index.notes) == (whole[train_tokens - 1] != 256)


def test_the_tail_is_found_across_shards(large: tuple[str, list[str]], tmp_path: Path) -> None:
    source, documents = large
    store = prepare(source, str(tmp_path / "store"), "bytes", val=0.5, split="tail")
    whole = of_bytes(documents)
    starts = np.flatnonzero(whole == 256) + 1
    cut = starts[np.abs(starts - int((len(whole) - 1) * 0.5)).argmin()]
    check(store, whole[:cut], whole[cut:])


# Hugging Face's own split


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """Three files, and all their rows, some of them blank."""
    folder = tmp_path_factory.mktemp("parquet")
    rows = ["" if row % 50 == 7 else " \n" if row % 60 == 8 else words(row, 400) for row in range(6500)]
    for number, (first, last) in enumerate([(0, 2000), (2000, 2001), (2001, 6500)]):
        pq.write_table(
            pa.table({"text": rows[first:last]}), folder / f"{number}.parquet", row_group_size=300, compression="none"
        )
    return str(folder), rows


def test_the_rows_held_out_and_their_order_are_those_of_datasets(
    parquet: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    source, rows = parquet
    store = prepare(source, str(tmp_path / "store"), "bytes", val=0.0123, split="huggingface")
    numbered = datasets.Dataset.from_dict({"row": list(range(len(rows)))})
    theirs = numbered.train_test_split(test_size=0.0123, seed=2357, shuffle=True, keep_in_memory=True)
    assert len(theirs["test"]) == 80
    assert any(not rows[row].strip() for row in theirs["test"]["row"])
    train, val = sorted(theirs["train"]["row"]), list(theirs["test"]["row"])
    check(store, of_bytes([rows[row] for row in train]), of_bytes([rows[row] for row in val]))
    assert len({path.name[:11] for path in (tmp_path / "store").glob("train-*")}) == 2  # units
    assert store.index.documents == 6500


@pytest.mark.parametrize("prefix", ["", "wikitext:"])
def test_hugging_faces_split_of_anything_but_rows_is_refused(
    parquet: tuple[str, list[str]], tmp_path: Path, prefix: str
) -> None:
    source = f"wikitext:{parquet[0]}" if prefix else text_file(tmp_path / "x.txt", ["text"])
    assert refusal(source, str(tmp_path / "store"), "bytes", val=0.1, split="huggingface") == (
        "data.split: huggingface needs parquet files whose rows are documents, and a fraction as data.val; "
        "use data.split: documents"
    )
    assert not (tmp_path / "store").exists()


# Tokenizers


def test_a_bpe_is_trained_on_the_corpus_and_kept_with_it(tmp_path: Path) -> None:
    documents = [words(seed, 200) for seed in range(50)]
    source = text_file(tmp_path / "x.txt", documents)
    store = prepare(source, str(tmp_path / "store"), "bpe:300", val=0.2)
    trained = hugging_face.ByteLevelBPETokenizer()  # the library's own recipe for such a tokenizer
    trained.train_from_iterator(documents, vocab_size=299, show_progress=False)
    end = trained.get_vocab_size()  # the corpus has fewer merges than were asked for
    note = f"bpe:300 came out with {end + 1} tokens: the text has no more pairs to merge"
    assert store.index.notes == (note,)
    expected = [np.array([*trained.encode(text).ids, end]) for text in documents]
    val = [is_val(text, 0.2) for text in documents]
    np.testing.assert_array_equal(
        ids(store.train), np.concatenate([e for e, v in zip(expected, val, strict=True) if not v])
    )
    np.testing.assert_array_equal(ids(store.val), np.concatenate([e for e, v in zip(expected, val, strict=True) if v]))
    assert (store.index.vocab, store.index.end_of_text) == (end + 1, end)


def test_a_char_tokenizer_knows_every_character_of_train_and_val(tmp_path: Path) -> None:
    source = text_file(tmp_path / "x.txt", ["abc\n", "cd"])
    store = prepare(source, str(tmp_path / "store"), "char", val=text_file(tmp_path / "v.txt", ["daé"]))
    assert store.tokenizer.decode(range(6)) == "\nabcdé"
    check(store, np.array([1, 2, 3, 0, 6, 3, 4, 6]), np.array([4, 1, 5, 6]))


def test_more_than_65536_ids_take_four_bytes_each(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"?": 70_000}
    saved = hugging_face.Tokenizer(hugging_face.models.WordLevel(vocabulary, unk_token="?"))
    saved.pre_tokenizer = hugging_face.pre_tokenizers.WhitespaceSplit()
    saved.add_special_tokens(["<|endoftext|>"])
    saved.save(str(tmp_path / "tokenizer.json"))
    source = text_file(tmp_path / "x.txt", ["w0 w65536 w69999\n", "w1 what\n"])
    store = prepare(source, str(tmp_path / "store"), str(tmp_path / "tokenizer.json"), val=0.0)
    assert store.index.dtype == "<u4"
    check(store, np.array([0, 65_536, 69_999, 70_001, 1, 70_000, 70_001]), np.array([]))


# An object store


def test_a_store_in_an_object_store_has_the_same_rows(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    documents = [words(seed, 200) for seed in range(200)]
    storage.write_bytes(f"{s3}/prepare/texts/a.txt", "<|endoftext|>\n".join(documents[:150]).encode())
    storage.write_bytes(f"{s3}/prepare/texts/b.txt.gz", gzip.compress("<|endoftext|>\n".join(documents[150:]).encode()))
    local = prepare(f"{s3}/prepare/texts", str(tmp_path / "store"), "bytes", val=0.2)
    remote = prepare(f"{s3}/prepare/texts", f"{s3}/prepare/store", "bytes", val=0.2)
    for store in (local, remote):
        check(store, *map(of_bytes, sides(documents, 0.2)))
    starts = [0, 64, len(local.train) - 65]
    np.testing.assert_array_equal(remote.train.windows(starts, 65), local.train.windows(starts, 65))
    names = contents(tmp_path / "store")
    assert storage.sizes(f"{s3}/prepare/store") == {name: len(raw) for name, raw in names.items()}
    again: list[Progress] = []
    prepare(f"{s3}/prepare/texts", f"{s3}/prepare/store", "bytes", val=0.2, watch=again.append)
    assert not again


# A limit


def test_a_limit_takes_the_first_rows_of_many_files_and_is_a_store_of_its_own(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(f"file {number} line {line}\n" for line in range(4)))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "own.txt").write_text("validation\n" * 9)
    options = {"tokenizer": "bytes", "val": str(tmp_path / "val" / "own.txt")}
    store = prepare(str(tmp_path / "?.txt"), str(tmp_path / "store"), limit=6, **options)
    first, second = "".join(f"file 0 line {line}\n" for line in range(4)), "file 1 line 0\nfile 1 line 1\n"
    assert ids(store.train).tolist() == of_bytes([first, second]).tolist()
    assert ids(store.val).tolist() == of_bytes(["validation\n" * 9]).tolist()  # the limit is of the source alone
    with pytest.raises(RaygptError, match="holds tokens of another source, tokenizer or setting"):
        prepare(str(tmp_path / "?.txt"), str(tmp_path / "store"), limit=5, **options)
