"""Mixtures: a store for each source, prepared where there is none, all of one tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hugging_face

from raygpt import storage
from raygpt.config import Data
from raygpt.corpus.mixture import Mixture, is_prepared, open_mixture
from raygpt.corpus.prepare import Progress, prepare
from raygpt.corpus.store import TokenStream
from raygpt.errors import RaygptError

pytestmark = pytest.mark.usefixtures("ray_cluster")

FIRST = [f"the first text has number {number} and says so\n" for number in range(40)]
SECOND = [f"another, zweiter Text: №{number}\n" for number in range(30)]
OWN = ["validation: a text of its own – ψ\n"] * 3


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Files of three texts, by name."""
    paths = {}
    for name, documents in (("first", FIRST), ("second", SECOND), ("own", OWN)):
        path = tmp_path / f"{name}.txt"
        path.write_text("<|endoftext|>\n".join(documents))
        paths[name] = str(path)
    return paths


def mixed(tmp_path: Path, *sources: str, **options: Any) -> Mixture:
    weighted = [{"source": source, "weight": number} for number, source in enumerate(sources, start=1)]
    source = sources[0] if len(sources) == 1 else weighted
    return open_mixture(Data(**{"source": source, "tokenizer": "bytes"} | options), str(tmp_path / "stores"))


def refusal(tmp_path: Path, *sources: str, **options: Any) -> str:
    with pytest.raises(RaygptError) as caught:
        mixed(tmp_path, *sources, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def decoded(mixture: Mixture, stream: TokenStream) -> list[str]:
    """The documents of a stream, sorted."""
    text = mixture.tokenizer.decode([int(token) for run in stream.runs() for token in run])
    return sorted(text.split("<|endoftext|>")[:-1])


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "stores").glob("*"))


# Texts


def test_one_source_is_a_mixture_of_one(tmp_path: Path, texts: dict[str, str]) -> None:
    mixture = mixed(tmp_path, texts["first"], val=0.3)
    (store,) = mixture.stores
    assert mixture.weights == (1.0,)
    assert sorted(decoded(mixture, store.train) + decoded(mixture, store.val)) == sorted(FIRST)
    assert (mixture.train_tokens, mixture.val_tokens) == (len(store.train), len(store.val))
    assert mixture.train_tokens + mixture.val_tokens == sum(len(text.encode()) + 1 for text in FIRST)
    assert folders(tmp_path) == [f"first-{store.index.fingerprint[:8]}"]


def test_a_bpe_is_made_from_all_texts_of_a_mixture_and_is_the_same_in_each_store(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    mixture = mixed(tmp_path, texts["first"], texts["second"], tokenizer="bpe:300", val=0.3)
    assert mixture.weights == (1.0, 2.0)
    first, second = mixture.stores
    assert first.index.tokenizer == second.index.tokenizer
    trained = hugging_face.ByteLevelBPETokenizer()
    trained.train_from_iterator([*FIRST, *SECOND], vocab_size=299, show_progress=False)
    for store, documents in zip(mixture.stores, (FIRST, SECOND), strict=True):
        assert sorted(decoded(mixture, store.train) + decoded(mixture, store.val)) == sorted(documents)
        assert len(store.train) + len(store.val) == sum(len(trained.encode(text).ids) + 1 for text in documents)
    assert mixture.train_tokens == len(first.train) + len(second.train)
    assert mixture.val_tokens == len(first.val) + len(second.val)


def test_bytes_of_a_token_are_those_of_the_validation_text(tmp_path: Path, texts: dict[str, str]) -> None:
    mixture = mixed(tmp_path, texts["first"], tokenizer="bpe:300", val=texts["own"])
    (store,) = mixture.stores
    assert mixture.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in OWN) / len(store.val))
    both = mixed(tmp_path, texts["first"], texts["second"], tokenizer="bpe:300", val=0.3)
    documents = [text for store in both.stores for text in decoded(both, store.val)]
    assert both.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in documents) / both.val_tokens)


def test_token_frequencies_alone_give_the_loss_of_a_model_that_knows_those_of_the_text(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    mixture = mixed(tmp_path, texts["first"], tokenizer="bpe:300", val=texts["own"])
    (store,) = mixture.stores
    train, val = (np.concatenate(list(stream.runs())).tolist() for stream in (store.train, store.val))
    total = len(train) + mixture.tokenizer.vocab
    by_hand = [-np.log((train.count(token) + 1) / total) for token in val]
    assert mixture.unigram_loss == pytest.approx(np.mean(by_hand))


def test_rows_come_from_the_stores_by_their_weights(tmp_path: Path, texts: dict[str, str]) -> None:
    mixture = mixed(tmp_path, texts["first"], texts["second"], val=0.3)
    feed = mixture.feed(context=16, batch_rows=10_000, order="random", seed=0)
    rows = feed.rows(0)
    streams = [np.concatenate(list(store.train.runs())) for store in mixture.stores]
    windows = [{stream[start : start + 17].tobytes() for start in range(len(stream) - 16)} for stream in streams]
    shares = [sum(row.astype("<u2").tobytes() in known for row in rows) for known in windows]
    assert shares == [3333, 6667]


def test_validation_text_of_its_own_is_prepared_once(tmp_path: Path, texts: dict[str, str]) -> None:
    mixture = mixed(tmp_path, texts["first"], texts["second"], val=texts["own"], tokenizer="char")
    first, second = mixture.stores
    assert decoded(mixture, first.train) == sorted(FIRST)
    assert decoded(mixture, second.train) == sorted(SECOND)
    assert decoded(mixture, first.val) == OWN  # its ψ is known to the tokenizer of both
    assert len(second.val) == 0
    assert first.index.tokenizer == second.index.tokenizer
    assert mixture.val_tokens == len(first.val)


def test_a_mixture_that_is_there_is_opened_again(tmp_path: Path, texts: dict[str, str]) -> None:
    before = mixed(tmp_path, texts["first"], texts["second"], tokenizer="bpe:300")
    watched: list[Progress] = []
    data = Data(
        source=({"source": texts["first"], "weight": 1}, {"source": texts["second"], "weight": 2}), tokenizer="bpe:300"
    )
    after = open_mixture(data, str(tmp_path / "stores"), watched.append)
    assert [store.folder for store in after.stores] == [store.folder for store in before.stores]
    assert not watched
    assert len(folders(tmp_path)) == 2


def test_a_text_alone_and_in_a_mixture_has_two_stores_where_the_tokenizer_differs(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    alone = {name: mixed(tmp_path, texts["first"], tokenizer=name).stores[0] for name in ("bytes", "bpe:300")}
    both = {
        name: mixed(tmp_path, texts["first"], texts["second"], tokenizer=name).stores[0]
        for name in ("bytes", "bpe:300")
    }
    assert alone["bytes"].folder == both["bytes"].folder
    assert alone["bpe:300"].folder != both["bpe:300"].folder


# Stores that were prepared before


def test_a_store_is_a_source(tmp_path: Path, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    store = prepare(texts["first"], str(folder), "bpe:300", val=0.3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in (str(folder), "mine", "./mine/", "~/mine"):
        for tokenizer in ("bpe:300", "bpe:4096", str(folder)):  # training may end before N
            mixture = mixed(tmp_path, spec, tokenizer=tokenizer)
            assert mixture.stores[0].folder == str(folder)  # Ray's workers run in other folders
            assert (mixture.train_tokens, mixture.val_tokens) == (len(store.train), len(store.val))
    assert folders(tmp_path) == []


def test_a_store_and_a_text_are_mixed_when_the_text_takes_its_tokenizer(tmp_path: Path, texts: dict[str, str]) -> None:
    folder = str(tmp_path / "mine")
    prepare(texts["first"], folder, "bpe:300", val=0.3)
    mixture = mixed(tmp_path, folder, texts["second"], tokenizer=folder, val=texts["own"])
    stored, made = mixture.stores
    assert stored.folder == folder
    assert made.index.tokenizer == stored.index.tokenizer
    assert decoded(mixture, made.train) == sorted(SECOND)
    assert decoded(mixture, made.val) == OWN  # with the first text that is prepared here
    assert refusal(tmp_path, folder, texts["second"], tokenizer="bpe:300") == (
        f"data.tokenizer: bpe:300 would be made anew for {texts['second']}, but {folder} has one already; "
        f"write data.tokenizer: {folder}"
    )


def test_nanogpts_files_are_a_source(tmp_path: Path, texts: dict[str, str]) -> None:
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(folder / "val.bin")
    mixture = mixed(tmp_path, texts["first"], str(folder))
    made, stored = mixture.stores  # in the recipe's order, as the weights are
    assert len(stored.train) == 100
    assert stored.val.windows([10], 5).tolist() == [[10, 11, 12, 13, 14]]
    assert decoded(mixture, made.train) + decoded(mixture, made.val)
    assert made.index.tokenizer == stored.index.tokenizer
    assert refusal(tmp_path, str(folder), tokenizer="char").startswith(f"{folder} has nanoGPT's bare files, which do")


def test_a_store_of_another_tokenizer_is_refused_with_its_own(tmp_path: Path, texts: dict[str, str]) -> None:
    stores = {name: str(tmp_path / name[:4]) for name in ("bytes", "char", "bpe:300")}
    vocab = {name: prepare(texts["first"], folder, name, val=0.3).index.vocab for name, folder in stores.items()}
    for name, folder in stores.items():
        for other in {"bytes", "char", "bpe:300", "bpe:260"} - {name}:
            assert refusal(tmp_path, folder, tokenizer=other) == (
                f"data.tokenizer: {other} does not match {folder}, whose tokens were made by a {name.split(':')[0]} "
                f"tokenizer of {vocab[name]}; write data.tokenizer: {folder}"
            )
        assert mixed(tmp_path, folder, tokenizer=name).tokenizer.vocab == vocab[name]


def test_stores_of_two_tokenizers_are_not_mixed(tmp_path: Path, texts: dict[str, str]) -> None:
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    prepare(texts["first"], first, "bpe:300")
    prepare(texts["second"], second, "bpe:300")
    assert refusal(tmp_path, first, second, tokenizer="bpe:300") == (
        f"data.source: {first} and {second} were made by different tokenizers; "
        f"prepare one again with the other's, e.g. --tokenizer {first}"
    )


def test_validation_text_beside_nothing_but_stores_is_refused(tmp_path: Path, texts: dict[str, str]) -> None:
    folder = str(tmp_path / "mine")
    prepare(texts["first"], folder, "bytes", val=0.3)
    assert refusal(tmp_path, folder, val=texts["own"]) == (
        f"data.val: {texts['own']} has no effect, since data.source is tokens with validation tokens of their own; "
        "leave data.val out"
    )


def test_a_store_that_is_not_whole_is_refused_and_not_read_as_text(tmp_path: Path, texts: dict[str, str]) -> None:
    folder = tmp_path / "mine"
    prepare(texts["first"], str(folder), "bytes", val=0.3)
    (folder / "index.json").unlink()
    assert refusal(tmp_path, str(folder)) == (
        f"{folder} is not complete yet; run the same prepare again, it continues where it stopped"
    )


def test_what_is_prepared_is_told_from_text(tmp_path: Path, texts: dict[str, str], s3: str) -> None:
    prepare(texts["first"], str(tmp_path / "mine"), "bytes")
    prepare(texts["first"], f"{s3}/mixture/mine", "bytes")
    storage.write_bytes(f"{s3}/mixture/text/a.txt", b"text")
    assert is_prepared(str(tmp_path / "mine"))
    assert is_prepared(f"{s3}/mixture/mine")
    for text in (texts["first"], str(tmp_path), "stdlib", "hf:some/texts", "openwebtext", str(tmp_path / "none")):
        assert not is_prepared(text)
    for text in (f"{s3}/mixture/text", f"{s3}/mixture/text/a.txt", f"{s3}/mixture", f"{s3}/none"):
        assert not is_prepared(text)


def test_a_limit_is_refused_where_the_source_is_tokens_already(tmp_path: Path, texts: dict[str, str]) -> None:
    store = prepare(texts["first"], str(tmp_path / "store"), "bytes")
    assert refusal(tmp_path, store.folder, limit=5) == (
        f"data.limit: 5 has no effect on {store.folder}, which is tokens already; leave data.limit out"
    )
