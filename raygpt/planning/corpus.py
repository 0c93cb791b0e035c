"""What is known of a recipe's corpus before a run: from its token store, or assumed if it is not prepared yet."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raygpt import storage
from raygpt.config import Data
from raygpt.corpus.index import INDEX, Index
from raygpt.corpus.mixture import is_prepared, open_prepared
from raygpt.corpus.order import window_count
from raygpt.corpus.sources import is_path, resolve
from raygpt.corpus.store import PLAN, stores_of
from raygpt.corpus.tokenizers import ready_made
from raygpt.errors import RaygptError

VOCABULARIES = {"gpt2": 50257, "bytes": 257, "char": 100}  # char: as many as an English text with some foreign letters
# Bytes of English text that a token stands for, and times that a compression makes a text smaller.
TOKEN_BYTES = {"gpt2": 4.4, "bytes": 1.0, "char": 1.0, "bpe": 3.5}
DATASET_BYTES = {"openwebtext": 39.8e9}  # 9,035,582,198 and 4,434,897 tokens, as nanoGPT counts them
COMPRESSION = {".gz": 2.7, ".xz": 3.6, ".zst": 3.2, "parquet": 1.7}

Store = tuple[Index, Mapping[str, Any]]  # a complete store, with the settings that it was made with


@dataclass(frozen=True)
class Corpus:
    """Its vocabulary and tokens, and what of them is assumed."""

    vocab: int
    train_tokens: int | None  # None: unknown
    val_tokens: int | None
    assumed: tuple[str, ...] = ()
    is_storage_reached: bool = True  # run.storage, where stores and scaling laws are

    def windows(self, context: int) -> int:
        """How many windows it has to train on. Where that is unknown, more than any run takes: runs in epochs are
        refused then."""
        return window_count(10**12 if self.train_tokens is None else self.train_tokens, context)


def look_up(data: Data, home: str, is_here: bool) -> Corpus:
    """The corpus of a recipe whose stores are below `home`; nothing is prepared or downloaded. `is_here`: it will be
    read on this machine."""
    sources = [part.source for part in data.sources]
    stores, damaged, is_reached = list[Store](), list[str](), True
    if not all(map(_is_tokens, sources)):
        try:
            stores, damaged = _read_stores(home)
        except RaygptError as error:  # a plan may be made where the runs' storage cannot be reached
            damaged, is_reached = [f"prepared texts and scaling laws in run.storage are left out: {error}"], False
    found = [_index(source, data, stores) for source in sources]
    indexes = [index for index in found if index is not None]
    if len(indexes) == len(found):
        tokens = [sum(index.tokens(stream) for index in indexes) for stream in ("train", "val")]
        return Corpus(max(index.vocab for index in indexes), tokens[0], tokens[1], tuple(damaged), is_reached)
    notes = [*damaged, *_not_found(data, is_here)]
    vocab = _vocabulary(data.tokenizer, is_here, notes)
    tokens_in = [
        index.tokens("train") + index.tokens("val") if index else _assumed_tokens(part.source, data)
        for index, part in zip(found, data.sources, strict=True)
    ]
    known = [count for count in tokens_in if count is not None]
    total = sum(known) if len(known) == len(tokens_in) else None
    name = ", ".join(part.source for part in data.sources)
    about = f"{total:,} tokens by its size" if total else "as many tokens as the run takes"
    notes.append(f"{name} is not prepared: a vocabulary of {vocab:,} and {about} are assumed")
    share = data.val if isinstance(data.val, float) else 0.0
    val = int(total * share) if total and share else None
    return Corpus(vocab, total and total - (val or 0), val, tuple(notes), is_reached)


def _read_stores(home: str) -> tuple[list[Store], list[str]]:
    """The complete stores of the runs in `home`, and a line for each that cannot be read: it may be another text's, so
    it is no reason to refuse."""
    folder, stores, damaged = stores_of(storage.absolute(home)), [], []
    for name in sorted(storage.folders(folder)):
        store = storage.join(folder, name)
        if storage.exists(storage.join(store, INDEX)):
            try:
                stores.append((Index.read(store), storage.read_json(storage.join(store, PLAN)) or {}))
            except RaygptError as error:
                damaged.append(f"left out: {error}")
    return stores, damaged


def _is_tokens(source: str) -> bool:
    return is_path(source) and is_prepared(source)


def _index(source: str, data: Data, stores: Sequence[Store]) -> Index | None:
    """Of the source's tokens, or of the first store that was made from it as the recipe says."""
    if _is_tokens(source):
        return open_prepared(source, data.tokenizer).index
    for index, settings in stores:
        if index.source == source and _has_settings_of(data, settings):
            return index
    return None


def _has_settings_of(data: Data, made: Mapping[str, Any]) -> bool:
    """Whether a store was made with the recipe's settings, as far as it says. Of several texts only the first has the
    validation text of its own."""
    asked = {key: getattr(data, key) for key in ("tokenizer", "limit", "column", "split", "split_seed")}
    held_out = [data.val, 0.0] if isinstance(data.val, str) else [data.val]
    is_of_recipe = all(made.get(key, value) == value for key, value in asked.items())
    return is_of_recipe and made.get("dedup") == data.dedup and made.get("val", data.val) in held_out


def _vocabulary(tokenizer: str, is_here: bool, notes: list[str]) -> int:
    """Of a tokenizer that is yet to be trained, as many as it may have; of a saved one its own. One that a run would
    not find either is refused, as for texts in `_not_found`."""
    if trained := re.fullmatch(r"bpe:([0-9]+)", tokenizer):
        return int(trained[1])
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]
    try:
        saved = ready_made(tokenizer)
        return saved.vocab if saved else VOCABULARIES["gpt2"]
    except RaygptError:
        if is_here or not (tokenizer.startswith("/") or storage.is_remote(tokenizer)):
            raise
    notes.append(f"{tokenizer} cannot be read on this machine; the nodes that train have to")
    return VOCABULARIES["gpt2"]


def _not_found(data: Data, is_here: bool) -> list[str]:
    """A note for each text that is not here. What a run would not find either is refused: of a run elsewhere only what
    has no absolute path, as for `raygpt submit`."""
    notes = []
    for source in [*(part.source for part in data.sources), data.val]:
        if isinstance(source, str) and is_path(source) and not storage.is_remote(source) and not is_prepared(source):
            try:
                resolve(source, data.column, digests=False)
            except RaygptError:
                path = source.removeprefix("wikitext:")
                if is_here or not path.startswith("/"):
                    raise
                notes.append(f"{path} is not on this machine; the nodes that train have to find it there")
    return notes


def _assumed_tokens(source: str, data: Data) -> int | None:
    """By the size of local files or of a known dataset; None for one that would have to be asked for."""
    if data.limit or not (is_path(source) or source == "stdlib" or source in DATASET_BYTES):
        return None
    try:
        size = DATASET_BYTES.get(source) or _text_bytes(source, data.column)
    except RaygptError:
        return None
    return int(size / TOKEN_BYTES.get(data.tokenizer.partition(":")[0], TOKEN_BYTES["gpt2"]))


def _text_bytes(source: str, column: str) -> float:
    """About, of local files, decompressed."""
    files = resolve(source, column, digests=False).files
    return sum(file.size * COMPRESSION.get(file.compression or file.format, 1.0) for file in files)
