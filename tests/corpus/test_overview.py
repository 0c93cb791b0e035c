"""What `raygpt data show` says of a source or a store: its facts, and its first rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raygpt.corpus import documents, summary
from raygpt.corpus.overview import overview
from raygpt.corpus.prepare import prepare
from raygpt.errors import RaygptError
from raygpt.show.data import write_page
from raygpt.show.data_page import data_page


def shown(what: str | Path, rows: int = 3, column: str = "text", tokenizer: str = "gpt2") -> dict[str, Any]:
    found = overview(str(what), rows, column, tokenizer)
    json.dumps(found)  # --json prints it
    return found


def test_text_shows_its_files_and_first_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n" + "two " * 100)
    (tmp_path / "b.txt").write_text("three\n<|endoftext|>\nfour\n")
    assert shown(tmp_path) == {
        "source": str(tmp_path),
        "files": 2,
        "bytes": 4 + 14 + 400 + 6 + 14 + 5,
        "first_file": str(tmp_path / "a.txt"),
        "schema": {"text": "string"},
        "rows": ["one\n", ("two " * 100)[:240], "three\n"],
    }
    assert shown(tmp_path, rows=9)["rows"][3:] == ["four\n"]


def test_a_long_document_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_text("A line of words.\n" * 100 + "<|endoftext|>\nnext\n")
    first, second = shown(tmp_path)["rows"]
    assert first.startswith("A line of words.\nA line")
    assert second == "next\n"


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_rows_show_their_columns(tmp_path: Path, packed: str) -> None:
    lines = b'\n{"id": 1, "body": "one", "tags": []}\n{"id": 2, "body": "two", "tags": []}\n'
    pq.write_table(pa.table({"id": [1, 2], "body": ["one", "two"]}), tmp_path / "x.parquet")
    columns = {
        ".jsonl": (lines, {"id": "int", "body": "str", "tags": "list"}),
        ".parquet": ((tmp_path / "x.parquet").read_bytes(), {"id": "int64", "body": "string"}),
    }
    for ending, (content, schema) in columns.items():
        path = tmp_path / f"y{ending}{packed}"
        path.write_bytes(gzip.compress(content) if packed else content)
        found = shown(path, column="body")
        assert (found["schema"], found["rows"]) == (schema, ["one", "two"])


@pytest.mark.parametrize("content", ["not json", "[1]", '{"body": "x"}'])
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(RaygptError) as caught:
        shown(path)
    assert str(caught.value).startswith(f"{path}, line 1: ")


def test_a_store_shows_its_counts_and_decoded_rows(tmp_path: Path, ray_cluster: None) -> None:
    text = "".join(f"{number:03}," for number in range(100))
    (tmp_path / "x.txt").write_text(text)
    store = prepare(str(tmp_path / "x.txt"), str(tmp_path / "store"), "bytes", val=0.0)
    found = shown(tmp_path / "store")
    assert found["rows"] == [
        {"tokens": list(text[start : start + 64].encode()), "text": text[start : start + 64]} for start in (0, 64, 128)
    ]
    assert {name: found[name] for name in ("folder", "source", "vocab", "documents", "text_bytes", "dtype")} == {
        "folder": str(tmp_path / "store"),
        "source": str(tmp_path / "x.txt"),
        "vocab": 257,
        "documents": 1,
        "text_bytes": 400,
        "dtype": "uint16",
    }
    assert (found["train_tokens"], found["val_tokens"]) == (401, 0)
    assert found["fingerprint"] == store.index.fingerprint
    assert len(shown(tmp_path / "store", rows=99)["rows"]) == 6


def test_a_store_of_few_tokens_shows_them_all(tmp_path: Path, ray_cluster: None) -> None:
    (tmp_path / "x.txt").write_text("few")
    prepare(str(tmp_path / "x.txt"), str(tmp_path / "store"), "bytes", val=0.0)
    assert shown(tmp_path / "store")["rows"] == [{"tokens": [102, 101, 119, 256], "text": "few<|endoftext|>"}]


def test_nanogpts_files_are_decoded_with_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.frombuffer(b"some text " * 20, np.uint8).astype("<u2").tofile(tmp_path / f"{name}.bin")
    found = shown(tmp_path, rows=1, tokenizer="bytes")
    assert found["rows"][0]["text"] == ("some text " * 20)[:64]
    assert found["train_tokens"] == found["val_tokens"] == 200


def test_a_store_shows_how_long_its_documents_are_which_are_copies_and_their_characters(
    tmp_path: Path, ray_cluster: None
) -> None:
    texts = ["abc", "abc", "Привет", "12", "x" * 300]  # 3, 3, 12, 2 and 300 bytes
    (tmp_path / "x.txt").write_text("<|endoftext|>\n".join(f"{text}\n" for text in texts))
    prepare(str(tmp_path / "x.txt"), str(tmp_path / "store"), "bytes", val=0.0)
    found = shown(tmp_path / "store")
    tokens = 5 + 5 + 14 + 4 + 302  # each with a line's end and the document's
    assert (found["sampled_documents"], found["sampled_tokens"]) == (5, tokens)
    assert (found["median_document"], found["longest_document"]) == (5, 302)
    assert found["share_of_copies"] == 0.2  # one of five
    assert found["bytes_per_token"] == round((tokens - 5) / tokens, 3)
    letters = 3 + 3 + 300
    total = letters + 6 + 2 + 5
    expected = {"Latin": letters, "Cyrillic": 6, "digits": 2, "spaces": 5}
    assert found["shares_of_characters"] == {name: round(count / total, 4) for name, count in expected.items()}
    assert [(row["from"], row["documents"], row["tokens"]) for row in found["lengths"] if row["documents"]] == [
        (4, 3, 14),
        (8, 1, 14),
        (256, 1, 302),
    ]


def test_a_large_stores_summary_reads_a_sample_that_is_spread_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "val"):
        np.tile(np.frombuffer(b"some text\n", np.uint8), 100).astype("<u2").tofile(tmp_path / f"{name}.bin")
    monkeypatch.setattr(summary, "SAMPLE_TOKENS", 250)
    assert shown(tmp_path, tokenizer="bytes")["sampled_tokens"] == 250


def test_the_page_of_a_store_has_its_histograms_and_text(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.frombuffer(b"<b>text</b> ".ljust(63) + b"\n", np.uint8).astype("<u2").tofile(tmp_path / f"{name}.bin")
    page = data_page(shown(tmp_path, tokenizer="bytes"))
    assert "64 to 127" in page  # tokens of its one document
    assert "1 · 100.0%" in page
    assert "&lt;b&gt;text&lt;/b&gt;" in page


def test_text_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(RaygptError, match=r"--page is for a token store, and .*x\.txt is text; prepare it first"):
        write_page(shown(tmp_path / "x.txt"), str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()
