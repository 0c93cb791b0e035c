"""Reads documents from files: decompresses, decodes and splits them, a few megabytes at a time.

In a text file a document longer than 4 MiB is split into pieces, so that memory stays bounded. It is split only where
the word patterns of GPT-2, Llama 3 and Qwen split too, so the tokens are those of the unsplit text. A row of jsonl or
parquet is one piece.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import lzma
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from raygpt import storage
from raygpt.corpus.sources import File, Source
from raygpt.corpus.tokenizers import END_OF_TEXT
from raygpt.errors import RaygptError, first_line

if TYPE_CHECKING:
    import pyarrow.parquet

Row = TypeVar("Row", str, bytes)

PIECE_BYTES = 4 * 2**20
SEPARATOR = END_OF_TEXT.encode()  # on a separate line in text files
# UTF-32's before UTF-16's, which begins like it
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
BEGINNINGS = 1000  # files to look into before the start: half a second
WIKITEXT_TITLE = re.compile(rb" = (?!= ).+ = \r?\n?$")  # " = Title = ", not " = = Section = = "


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    row: int  # the document's number in its source
    first: bool
    last: bool


class DocumentReader:
    """Reads files of a source in order. `position` is the number of bytes (as stored, maybe compressed) read so far."""

    def __init__(self, source: Source, files: Sequence[File], first_row: int = 0, keep_blank: bool = False):
        self.position = 0
        self._source, self._files, self._row, self._keep_blank = source, files, first_row, keep_blank
        self._left = source.limit or sys.maxsize  # rows, or lines of text, that may still be read

    def pieces(self) -> Iterator[Piece]:
        """Every document of the files; blank ones are skipped unless they are to be kept, but they count as rows."""
        if self._source.rule == "wikitext":
            yield from self._pieces_of_text(self._limited(self._all_lines()), self._files[0])
            return
        for file in self._files:
            if file.format == "text":
                yield from self._pieces_of_text(self._limited(self.lines(file)), file)
            else:
                for text in self._limited(self._rows(file)):
                    if self._keep_blank or text.strip():
                        yield Piece(text, self._row, first=True, last=True)
                    self._row += 1

    def _limited(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Rows up to the source's limit, which counts all files together."""
        while self._left and (row := next(rows, None)) is not None:
            self._left -= 1
            yield row

    def _pieces_of_text(self, lines: Iterator[bytes], file: File) -> Iterator[Piece]:
        """Split a stream of lines into documents at separators or titles, and long ones into pieces."""
        wikitext = self._source.rule == "wikitext"
        held: list[bytes] = []  # the lines of the current piece
        size, end, first, previous = 0, 0, True, b""
        for line, following in itertools.pairwise(itertools.chain(lines, [b""])):
            separates = line.startswith(SEPARATOR) and _is_separator(line, previous, following)
            if separates or (wikitext and _is_title(line, previous, following)):
                yield from self._piece(held, first, True, file, end)
                held, size, first = [], 0, True
            elif size > PIECE_BYTES and _is_safe_cut(held, line):
                yield from self._piece(held, first, False, file, end)
                held, size, first = [], 0, False
            end, previous = end + len(line), line
            if not separates:
                held.append(line)
                size += len(line)
        yield from self._piece(held, first, True, file, end)

    def _piece(self, lines: list[bytes], first: bool, last: bool, file: File, end: int) -> Iterator[Piece]:
        content = b"".join(lines)
        text = _decode(content, file, end - len(content))
        if text.strip() or not (first and last):
            yield Piece(text, self._row, first, last)
        self._row += bool(content) and last

    def _all_lines(self) -> Iterator[bytes]:
        """Lines of text files, or rows that are lines, across all files: an article may continue in the next."""
        for file in self._files:
            if file.format != "text":
                yield from (text.rstrip("\n").encode() + b"\n" for text in self._rows(file))
                continue
            offset = 0
            for line in self.lines(file):
                yield _decode(line, file, offset).encode()  # here, because only here a bad byte's file is known
                offset += len(line)

    def lines(self, file: File) -> Iterator[bytes]:
        """The lines of a text or jsonl file, decompressed."""
        before = self.position
        with _reading(file), storage.open_read(file.uri) as raw:
            stream = _decompressed(raw, file)
            for number, line in enumerate(_bounded_lines(stream) if file.format == "text" else stream):
                if number == 0:
                    _refuse_utf16(line, file)
                if number % 256 == 0:
                    self.position = before + raw.tell()
                yield line
        self.position = before + file.size

    def _rows(self, file: File) -> Iterator[str]:
        if file.format == "parquet":
            yield from self._parquet_rows(file)
            return
        for number, line in enumerate(self.lines(file), start=1):
            if line.strip():
                yield _json_text(line, self._source.column, f"{file.uri}, line {number}")

    def _parquet_rows(self, file: File) -> Iterator[str]:
        before, column = self.position, self._source.column
        with open_parquet(file) as table:
            if column not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise RaygptError(
                    f"{file.uri} has no column {column!r}, it has {names}; set data.column to one of them"
                )
            rows = max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                self.position += file.size * len(batch) // rows
                for value in batch.column(0).to_pylist():
                    yield _text(value, column, file.uri)
        self.position = before + file.size


def check_beginnings(source: Source) -> None:
    """Read the first document of each file, so that most files that cannot be read are refused before anything starts.
    Of files that are far away only the first."""
    near = [file for file in source.files if not storage.is_remote(file.uri)]
    for file in near[:BEGINNINGS] or source.files[:1]:
        next(DocumentReader(source, [file]).pieces(), None)


@contextlib.contextmanager
def open_parquet(file: File) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """A parquet file. A compressed file is first decompressed to a temporary one: parquet is read from its footer."""
    import pyarrow.parquet

    with _reading(file), storage.open_read(file.uri) as raw, tempfile.TemporaryFile() as aside:
        if file.compression:
            shutil.copyfileobj(_decompressed(raw, file), aside, 2**20)
        yield pyarrow.parquet.ParquetFile(aside if file.compression else raw)


def row_count(file: File) -> int:
    """Rows of a parquet file, from its footer."""
    with open_parquet(file) as table:
        return int(table.metadata.num_rows)


def _is_separator(line: bytes, previous: bytes, following: bytes) -> bool:
    """Whether end-of-text is the whole line."""
    begins, ends = previous.endswith(b"\n") or not previous, line.endswith(b"\n") or not following
    return line.rstrip() == SEPARATOR and begins and ends


def _is_title(line: bytes, previous: bytes, following: bytes) -> bool:
    """A title is between blank lines; the rest of a formula (" = 1 rad / s and k = ") may look like one."""
    return not previous.strip() and not following.strip() and WIKITEXT_TITLE.match(line) is not None


def _bounded_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines; one that is longer than a piece (text8 is a single line of 100 MB) in parts that end before a space."""
    left = b""
    while line := left + stream.readline(PIECE_BYTES):
        left = b""
        if len(line) >= PIECE_BYTES and not line.endswith(b"\n") and (space := line.rfind(b" ", 1)) > 0:
            line, left = line[:space], line[space:]
        yield line


def _is_safe_cut(held: list[bytes], line: bytes) -> bool:
    """Whether no word of GPT-2's pattern, nor of Llama 3's and Qwen's, spans the held lines and this one.

    True where white space begins, and after a single newline between characters that are not white space.
    """
    if not held[-1].endswith(b"\n"):
        return line[:1] == b" " and not _last_character(held[-1]).isspace()
    before, after = _last_character(b"".join(held[-5:])[:-1]), line[:4].decode(errors="ignore")[:1]
    return not before.isspace() and not after.isspace()


def _last_character(content: bytes) -> str:
    return content[-4:].decode(errors="ignore")[-1:]


def _decode(content: bytes, file: File, offset: int) -> str:
    try:
        return content.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise RaygptError(
            f"{file.uri}: invalid UTF-8 at byte {offset + error.start}; convert it, e.g. iconv -f latin1 -t utf-8"
        ) from error


def _refuse_utf16(line: bytes, file: File) -> None:
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if line.startswith(mark):
            raise RaygptError(
                f"{file.uri}: is {encoding}, by its byte-order mark; convert it, e.g. iconv -f {encoding} -t utf-8"
            )
    start = line[:1000]
    if 4 * start.count(0) > len(start):
        raise RaygptError(
            f"{file.uri}: is no UTF-8 text, its first line is full of zero bytes; if it is UTF-16, convert it, e.g. "
            "iconv -f UTF-16LE -t utf-8"
        )


def _json_text(line: bytes, column: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RaygptError(f"{where}: not JSON ({error}); one object per line is expected") from error
    if not isinstance(value, dict) or column not in value:
        names = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise RaygptError(f"{where}: no column {column!r}, there is {names}; set data.column")
    return _text(value[column], column, where)


def _text(value: Any, column: str, where: str) -> str:
    """A row's text; null is blank."""
    if not isinstance(value, str | None):
        raise RaygptError(f"{where}: column {column!r} holds {type(value).__name__}, not text; set data.column")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:  # JSON's escapes can say it, UTF-8 cannot
        raise RaygptError(f"{where}: half of a surrogate pair is no text; take it out") from error
    return value or ""


def _decompressed(raw: BinaryIO, file: File) -> Any:
    if file.compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.compression == ".xz":
        return lzma.LZMAFile(raw)
    if file.compression == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"), 2**20)
    return raw


@contextlib.contextmanager
def _reading(file: File) -> Iterator[None]:
    """Convert any exception of a reader into an error that names the file."""
    try:
        yield
    except RaygptError:
        raise
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise RaygptError(
            f"{file.uri} is not a complete {file.compression} file ({error}); download or write it again"
        ) from error
    except Exception as error:  # those of disks, Arrow and the Hub have no class in common
        reason = first_line(error)
        raise RaygptError(f"{file.uri} cannot be read ({reason}); check it, or download or write it again") from error
