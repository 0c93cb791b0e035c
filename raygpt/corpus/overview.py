"""What `raygpt data show` shows of a text source or a token store."""

import itertools
import json
from typing import Any

from raygpt.corpus.documents import DocumentReader, open_parquet
from raygpt.corpus.mixture import is_prepared, open_prepared
from raygpt.corpus.sources import File, Source, resolve
from raygpt.corpus.store import TokenStore
from raygpt.corpus.summary import summarise

ROW_TOKENS = 64
ROW_CHARACTERS = 240


def overview(what: str, rows: int, column: str, tokenizer: str) -> dict[str, Any]:
    """The facts about a source or a store, with its first rows, as JSON values."""
    if is_prepared(what):
        return _store(open_prepared(what, tokenizer), rows)
    return _source(resolve(what, column), rows)


def _source(source: Source, rows: int) -> dict[str, Any]:
    documents = (piece.text for piece in DocumentReader(source, source.files).pieces() if piece.first)
    shown = [text[:ROW_CHARACTERS] for text in itertools.islice(documents, rows)]
    return {
        "source": source.spec,
        "files": len(source.files),
        "bytes": source.size,
        "first_file": source.files[0].uri,
        "schema": _schema(source.files[0]),  # after the rows, whose reader explains a bad file
        "rows": shown,
    }


def _schema(file: File) -> dict[str, str]:
    """Columns of a parquet file or of the first JSON line; a text file is just text."""
    if file.format == "parquet":
        with open_parquet(file) as table:
            return {field.name: str(field.type) for field in table.schema_arrow}
    if file.format == "jsonl":
        lines = DocumentReader(Source("", (file,), "file", ""), [file]).lines(file)
        first = json.loads(next((line for line in lines if line.strip()), b"{}"))
        return {name: type(value).__name__ for name, value in first.items()}
    return {"text": "string"}


def _store(store: TokenStore, rows: int) -> dict[str, Any]:
    length = min(ROW_TOKENS, len(store.train))
    starts = [n * length for n in range(min(rows, len(store.train) // max(1, length)))]
    windows = store.train.windows(starts, length)
    return {
        "folder": store.folder,
        **store.index.summary(),
        **summarise(store),
        "rows": [{"tokens": row.tolist(), "text": store.tokenizer.decode(row.tolist())} for row in windows],
    }
