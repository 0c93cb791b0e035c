"""Documents: what comes out of files of every format and compression, and where a document ends."""

import gzip
import json
import lzma
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from raygpt.corpus import documents
from raygpt.corpus.documents import DocumentReader, Piece, row_count
from raygpt.corpus.sources import Source, resolve
from raygpt.errors import RaygptError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: bytes(pa.compress(raw, "zstd", asbytes=True)),
}
TEXTS = ["First.\nTwo lines – and a ‘quote’.\n", "Second: naïve, 日本語, 😀.\n", "Third,\n\nwith a gap.\n"]


def pieces(spec: str | Path, column: str = "text", **options: Any) -> list[Piece]:
    source = resolve(str(spec), column)
    return list(DocumentReader(source, source.files, **options).pieces())


def texts(spec: str | Path, column: str = "text") -> list[str]:
    """Whole documents: pieces joined until one is the last."""
    joined: list[str] = []
    for piece in pieces(spec, column):
        if piece.first:
            joined.append("")
        joined[-1] += piece.text
    return joined


def refusal(spec: str | Path, column: str = "text") -> str:
    with pytest.raises(RaygptError) as caught:
        pieces(spec, column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(path: Path, column: Any, name: str = "text", **options: Any) -> Path:
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), path, **options)
    return path


def as_bytes(ending: str, rows: list[str], folder: Path) -> bytes:
    if ending == ".jsonl":
        return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in rows).encode()
    if ending == ".parquet":
        return parquet(folder / "plain.parquet", rows).read_bytes()
    return "<|endoftext|>\n".join(rows).encode()


# Formats


@pytest.mark.parametrize("packed", list(PACK))
@pytest.mark.parametrize("ending", [".txt", ".md", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_documents_in_every_compression(tmp_path: Path, ending: str, packed: str) -> None:
    path = tmp_path / f"x{ending}{packed}"
    path.write_bytes(PACK[packed](as_bytes(ending, TEXTS, tmp_path)))
    assert pieces(path) == [Piece(text, row, True, True) for row, text in enumerate(TEXTS)]


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_compressed_files_that_were_joined_are_read_to_the_end(tmp_path: Path, packed: str) -> None:
    (tmp_path / f"x.txt{packed}").write_bytes(PACK[packed](b"one\n") + PACK[packed](b"two\n"))
    assert texts(tmp_path) == ["one\ntwo\n"]


@pytest.mark.parametrize("packed", list(PACK))
def test_the_position_counts_bytes_on_disk_and_ends_at_their_sum(tmp_path: Path, packed: str) -> None:
    numbers = [str(random.Random(0).random()) for _ in range(50_000)]
    (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed]("\n<|endoftext|>\n".join(numbers).encode()))
    (tmp_path / f"b.jsonl{packed}").write_bytes(PACK[packed](b'{"text": "x"}\n' * 9))
    parquet(tmp_path / "c.parquet", ["x"] * 3000)
    source = resolve(str(tmp_path))
    reader = DocumentReader(source, source.files)
    positions = [reader.position for _ in reader.pieces()]
    assert positions == sorted(positions)
    assert positions[25_000] < 0.9 * source.size
    assert reader.position == source.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_rows_are_numbered_through_all_files_and_blank_ones_count(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", ["a", "", None, " \n"])
    parquet(tmp_path / "b.parquet", ["b", "c"])
    assert [(piece.row, piece.text) for piece in pieces(tmp_path)] == [(0, "a"), (4, "b"), (5, "c")]
    kept = pieces(tmp_path, first_row=10, keep_blank=True)
    assert [(piece.row, piece.text) for piece in kept] == [
        (10, "a"), (11, ""), (12, ""), (13, " \n"), (14, "b"), (15, "c"),
    ]  # fmt: skip
    assert [row_count(file) for file in resolve(str(tmp_path)).files] == [4, 2]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_text_may_be_of_any_of_arrows_string_types(tmp_path: Path, type_: pa.DataType) -> None:
    path = parquet(tmp_path / "x.parquet", pa.array(["a", None, "b", "a"], type_), "body")
    assert texts(path, "body") == ["a", "b", "a"]


def test_blank_json_lines_and_null_text_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": null}\n  \n{"text": ""}\n{"text": "b"}')
    assert texts(path) == ["a", "b"]


def test_a_json_line_longer_than_a_piece_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "many words " * 100}) + "\n" + json.dumps({"text": "b"}))
    assert pieces(path) == [Piece("many words " * 100, 0, True, True), Piece("b", 1, True, True)]


# Where a document of a text file ends


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n", ["a\nb\n"]),
        ("a\nb", ["a\nb"]),  # the last line may lack its newline
        ("a\n<|endoftext|>\nb\n<|endoftext|>\n", ["a\n", "b\n"]),
        ("a\n<|endoftext|>\nb\n<|endoftext|>", ["a\n", "b\n"]),
        ("<|endoftext|>\na\n<|endoftext|>\n<|endoftext|>\nb", ["a\n", "b"]),
        ("a\r\n<|endoftext|>\r\nb\r\n", ["a\r\n", "b\r\n"]),  # CRLF: the text keeps its bytes
        ("a\n<|endoftext|>  \nb\n", ["a\n", "b\n"]),
        ("a\n \n<|endoftext|>\n\n \t\n<|endoftext|>\nb\n", ["a\n \n", "b\n"]),  # a blank document is none
        ("\ufeffa\n<|endoftext|>\n\ufeffb\n", ["a\n", "\ufeffb\n"]),  # a mark of byte order is one only at the start
        ("a <|endoftext|>\n<|endoftext|> b\n", ["a <|endoftext|>\n<|endoftext|> b\n"]),  # not a line of its own
        ("a\n <|endoftext|>\nb\n", ["a\n <|endoftext|>\nb\n"]),
    ],
)
def test_a_line_of_end_of_text_separates_documents_and_is_never_text(
    tmp_path: Path, content: str, expected: list[str]
) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content.encode())
    assert texts(path) == expected


def test_a_text_file_ends_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert texts(tmp_path) == ["a", "b"]


def test_real_articles_are_those_between_the_separators(shared_data: Path) -> None:
    path = shared_data / "enwiki2014" / "val.txt.xz"
    whole = lzma.decompress(path.read_bytes()).decode()
    assert texts(path) == [part for part in re.split(r"(?m)^<\|endoftext\|>\n", whole) if part.strip()]


# Long texts


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> Callable[[str], list[int]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_CACHE_DIR", str(shared_data / "tiktoken_cache"))
        return tiktoken.get_encoding("gpt2").encode_ordinary


def cut(content: bytes, folder: Path, piece_bytes: int = 48) -> list[Piece]:
    path = folder / "x.txt"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "PIECE_BYTES", piece_bytes)
        return pieces(path)


WORDS = st.sampled_from(["a", "word", "don't", "'s", "12", "§", "é", "日本", "😀", "a-b", "x" * 60, "<|endoftext|>"])
SPACE = st.sampled_from(
    [" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\x0b"]
)


# as OpenAI published it, and as Llama 3 and Qwen have it: a piece may end only where a word does
WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
LATER = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]
PATTERNS = [WORD, *map(regex.compile, LATER)]


@given(st.lists(st.one_of(WORDS, SPACE), min_size=30, max_size=120).map("".join))
@example("some words here\u00a0\n" * 9)
@example("word " * 30 + "\u3000 \nnext" * 20)
@example("x" * 46 + "日 \n")
@example("<|endoftext|> " + "x" * 60)
@example("x" * 48 + "<|endoftext|>\nnext")
def test_words_and_tokens_of_pieces_are_those_of_the_uncut_text(
    gpt2: Callable[[str], list[int]], tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    text = re.sub(r"(?m)^<\|endoftext\|>(?=\s*?$)", "x", text)  # one document
    found = [piece.text for piece in cut(text.encode(), tmp_path_factory.getbasetemp())]
    if text.strip():
        assert "".join(found) == text
        for pattern in PATTERNS:
            assert [word for piece in found for word in pattern.findall(piece)] == pattern.findall(text)
        assert [token for piece in found for token in gpt2(piece)] == gpt2(text)


def test_a_long_text_comes_in_pieces_of_one_document(tmp_path: Path) -> None:
    found = cut(b"A line of words.\n" * 100 + b"<|endoftext|>\nshort\n", tmp_path)
    assert len(found) > 20
    assert max(len(piece.text) for piece in found) <= 2 * 48
    assert [(piece.row, piece.first, piece.last) for piece in found] == [
        (0, True, False), *[(0, False, False)] * (len(found) - 3), (0, False, True), (1, True, True),
    ]  # fmt: skip


def test_a_single_long_line_is_cut_before_spaces(gpt2: Callable[[str], list[int]], tmp_path: Path) -> None:
    chosen = random.Random(0)
    line = "".join(f" {'anarchism'[: chosen.randint(1, 9)]}" for _ in range(2000))  # text8 is one line of 100 MB
    found = cut(line.encode(), tmp_path)
    assert max(len(piece.text) for piece in found) <= 2 * (48 + 9)
    assert all(piece.text.startswith(" ") for piece in found)
    assert "".join(piece.text for piece in found) == line
    assert [token for piece in found for token in gpt2(piece.text)] == gpt2(line)


def test_lines_of_another_script_are_cut_too(tmp_path: Path) -> None:
    assert len(cut("吾輩は猫である。\n".encode() * 100, tmp_path)) > 20


def test_pieces_have_some_megabytes(tmp_path: Path) -> None:
    found = cut(b"A line of words.\n" * 600_000, tmp_path, documents.PIECE_BYTES)  # 10.2 MB
    assert [round(len(piece.text) / 2**20) for piece in found] == [4, 4, 2]


# WikiText


def test_wikitext_has_60_articles_cut_at_titles_and_not_at_sections(shared_data: Path) -> None:
    for name in ("valid", "test"):
        path = shared_data / "wikitext-103" / f"wiki.{name}.tokens"
        found = texts(f"wikitext:{path}")
        assert len(found) == 60
        assert "".join(found).strip() == path.read_text().strip()
        titles = [text.splitlines()[0] for text in found]
        assert all(re.fullmatch(r" = [^=].* = ", title) for title in titles)
        assert sum(" = = " in text for text in found) > 50  # their sections are still in them


ARTICLES = [
    " = One = \n \n Text of one . \n \n = = Section = = \n \n with ωc \n = 1 rad / s and k = \n 1 Ω . \n \n",
    " = Two = 2 = \n \n Text of two . \n \n",
    " = Three = \n \n = = = Deep = = = \n \n The end . \n",
]


def test_wikitexts_articles_go_on_in_the_next_file_and_row(tmp_path: Path) -> None:
    lines = "".join(ARTICLES).splitlines(keepends=True)
    (tmp_path / "text").mkdir()
    (tmp_path / "rows").mkdir()
    for number, (first, last) in enumerate([(0, 5), (5, 11), (11, len(lines))]):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(lines[first:last]))
        # as Hugging Face has it: a row a line, blank lines as empty rows; in several row groups
        rows = ["" if line == " \n" else line for line in lines[first:last]]
        parquet(tmp_path / "rows" / f"{number}.parquet", rows, row_group_size=2)
    assert texts(f"wikitext:{tmp_path / 'text'}") == ARTICLES
    assert texts(f"wikitext:{tmp_path / 'rows'}") == [text.replace(" \n \n", " \n\n") for text in ARTICLES]


def test_an_article_before_the_first_title_and_crlf_are_wikitext_too(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    articles = [" before . \r\n \r\n", " = One = \r\n \r\n text . \r\n \r\n = = S = = \r\n \r\n"]
    path.write_bytes("".join(articles).encode())
    assert texts(f"wikitext:{path}") == articles


def test_a_bad_byte_in_wikitexts_second_file_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf = One = \n text . \n")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf more . \n caf\xe9 . \n")
    assert refusal(f"wikitext:{tmp_path}") == (
        f"{tmp_path}/b.txt: invalid UTF-8 at byte 16; convert it, e.g. iconv -f latin1 -t utf-8"
    )
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf more . \n")
    assert texts(f"wikitext:{tmp_path}") == [" = One = \n text . \n more . \n"]


# What cannot be read: one line with the file and the remedy


@pytest.mark.parametrize("before", ["", "ok\n", "é\n" * 10, "doc\n<|endoftext|>\nnext "])
def test_invalid_utf_8_is_refused_with_the_byte(tmp_path: Path, before: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(before.encode() + b"caf\xe9 is latin1\n")
    offset = len(before.encode()) + 3
    remedy = "convert it, e.g. iconv -f latin1 -t utf-8"
    assert refusal(path) == f"{path}: invalid UTF-8 at byte {offset}; {remedy}"


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_an_encoding_with_a_byte_order_mark_is_named(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text": "café"}\n', encoding)
    said, remedy = encoding.upper(), f"convert it, e.g. iconv -f {encoding.upper()} -t utf-8"
    assert refusal(path) == f"{path}: is {said}, by its byte-order mark; {remedy}"


def test_utf_16_without_a_byte_order_mark_is_recognised_by_its_zeros_but_a_stray_one_is_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("café, and more of it\n", "utf-16-le")
    assert refusal(path) == (
        f"{path}: is no UTF-8 text, its first line is full of zero bytes; if it is UTF-16, convert it, e.g. "
        "iconv -f UTF-16LE -t utf-8"
    )
    path.write_text("caf\0, and more of it\n")
    assert texts(path) == ["caf\0, and more of it\n"]


def test_the_byte_is_right_in_later_pieces_too(tmp_path: Path) -> None:
    with pytest.raises(RaygptError, match=f"invalid UTF-8 at byte {17 * 100};"):
        cut(b"A line of words.\n" * 100 + b"\xff\n" + b"A line of words.\n" * 100, tmp_path)


# Arrow, which reads zstd, has one kind of error for all that may be wrong
BROKEN = {".gz": "is not a complete .gz file", ".xz": "is not a complete .xz file", ".zst": "cannot be read"}


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_a_truncated_file_is_refused(tmp_path: Path, ending: str, packed: str) -> None:
    rows = [str(random.Random(number).random()) for number in range(2000)]
    content = PACK[packed](as_bytes(ending, rows, tmp_path))
    path = tmp_path / f"x{ending}{packed}"
    for size in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        message = refusal(path)
        assert message.startswith(f"{path} {BROKEN[packed]} (")
        assert message.endswith("download or write it again")


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_what_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"x.txt{packed}"
    path.write_text("plain text\n" * 100)
    message = refusal(path)
    assert message.startswith(f"{path} {BROKEN[packed]} (")
    assert message.endswith("download or write it again")


def test_a_flipped_bit_in_gzip_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"some text\n" * 100))
    content[-6] ^= 1  # of the checksum
    path = tmp_path / "x.txt.gz"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} is not a complete .gz file (CRC check failed")


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-8])
    message = refusal(path)
    assert message.startswith(f"{path} cannot be read (Parquet magic bytes not found")
    assert message.endswith("); check it, or download or write it again")
    with pytest.raises(RaygptError, match=r"x\.parquet cannot be read"):
        row_count(resolve(str(path)).files[0])


def test_a_file_that_has_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("text")
    source = resolve(str(path))
    path.unlink()
    with pytest.raises(RaygptError, match=r"x\.txt cannot be read \(.*No such file.*\); check it, or download"):
        list(DocumentReader(source, source.files).pieces())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", ": not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
         "one object per line is expected"),
        ('{"body": "x", "id": 1}', ": no column 'text', there is body, id; set data.column"),
        ('["text"]', ": no column 'text', there is list; set data.column"),
        ('{"text": 5}', ": column 'text' holds int, not text; set data.column"),
        (r'{"text": "\ud83d alone"}', ": half of a surrogate pair is no text; take it out"),
    ],
)  # fmt: skip
def test_a_json_line_without_text_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    assert refusal(path) == f"{path}, line 3{message}"


def test_a_missing_column_of_parquet_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", TEXTS, "content")
    assert refusal(path) == f"{path} has no column 'text', it has id, content; set data.column to one of them"


@pytest.mark.parametrize(
    ("column", "kind"), [([1, 2], "int"), ([b"a"], "bytes"), ([["a"]], "list"), ([{"a": 1}], "dict")]
)
def test_a_column_that_is_not_text_is_refused(tmp_path: Path, column: list[Any], kind: str) -> None:
    path = parquet(tmp_path / "x.parquet", column)
    assert refusal(path) == f"{path}: column 'text' holds {kind}, not text; set data.column"


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(1, ["a\n"]), (4, ["a\nb\n", "c\n"]), (5, ["a\nb\n", "c\n", "d\n"]), (99, ["a\nb\n", "c\n", "d\ne\n"])],
)
def test_a_limit_counts_lines_of_text_through_all_files(tmp_path: Path, limit: int, kept: list[str]) -> None:
    (tmp_path / "1.txt").write_text("a\nb\n<|endoftext|>\nc\n")
    (tmp_path / "2.txt").write_text("d\ne\n")
    source = resolve(str(tmp_path), limit=limit)
    assert [piece.text for piece in DocumentReader(source, source.files).pieces()] == kept


def test_a_limit_counts_rows_of_tables_blank_ones_too_and_wikitexts_lines(tmp_path: Path) -> None:
    table = parquet(tmp_path / "rows.parquet", ["one", "", "two", "three"])
    source = resolve(str(table), limit=3)
    assert [piece.text for piece in DocumentReader(source, source.files).pieces()] == ["one", "two"]
    (tmp_path / "wiki.txt").write_text(" \n = A = \n \n first \n \n = B = \n \n second \n")
    source = resolve(f"wikitext:{tmp_path / 'wiki.txt'}", limit=4)
    assert [piece.text for piece in DocumentReader(source, source.files).pieces()] == [" = A = \n \n first \n"]


def test_no_file_is_left_open_or_behind(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for ending in (".txt", ".jsonl", ".parquet"):
        for packed, pack in PACK.items():
            (tmp_path / f"x{ending}{packed}").write_bytes(pack(as_bytes(ending, TEXTS, tmp_path)))
    source = Source("", resolve(str(tmp_path)).files, "file", "text")
    reader = DocumentReader(source, source.files).pieces()
    next(reader)
    del reader
    assert len(list(DocumentReader(source, source.files).pieces())) == 3 * len(source.files)
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
