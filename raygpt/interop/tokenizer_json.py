"""Converts our tokenizers to Hugging Face's `tokenizers` format, with the same ids, and back.

One difference is their convention: a literal `<|endoftext|>` in a text is the special token there, plain text here; and
so is every other special token.
"""

import itertools
import json
from typing import Any

from raygpt.corpus.tokenizers import END_OF_TEXT, ENDS, Bpe, Bytes, Char, Gpt2, Tokenizer, bytes_by_character
from raygpt.errors import RaygptError

UNKNOWN = "<unk>"  # in no vocabulary: an unknown character is an error there as well


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json."""
    if isinstance(tokenizer, Bpe):
        saved: dict[str, Any] = tokenizer.describe()["tokenizer"]
        return saved
    made = _made(tokenizer)
    made.add_special_tokens([END_OF_TEXT])
    if made.token_to_id(END_OF_TEXT) != tokenizer.end_of_text:
        raise RaygptError(f"the tokenizer's {END_OF_TEXT} is not its last token, which a tokenizer.json cannot say")
    built: dict[str, Any] = json.loads(made.to_str())
    return built


def _made(tokenizer: Tokenizer) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    if isinstance(tokenizer, Char):
        made = Theirs(models.WordLevel({c: n for n, c in enumerate(tokenizer.characters)}, unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made
    if isinstance(tokenizer, Gpt2):
        pieces, words = tokenizer.ranks, True
    elif isinstance(tokenizer, Bytes):
        pieces, words = {bytes([byte]): byte for byte in range(256)}, False
    else:
        raise RaygptError(f"a {type(tokenizer).__name__} tokenizer has no form as tokenizer.json yet")
    made = Theirs(models.BPE({_written(piece): rank for piece, rank in pieces.items()}, _merges(pieces)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    made.decoder = decoders.ByteLevel()
    return made


def from_json(saved: dict[str, Any], where: str, end_of_text: int | None = None) -> Tokenizer:
    """Our tokenizer that a tokenizer.json describes; any other byte-level one is used as it is.

    `end_of_text` is the id that separates documents where no token has one of the usual names.
    """
    for candidate in _candidates(saved):
        if _is_same(to_json(candidate), saved):
            return candidate
    try:
        return _bpe(saved, end_of_text)
    except RaygptError as error:
        raise RaygptError(f"{where}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise RaygptError(f"{where} is no tokenizer that can be read ({error}); save it again") from error


def _bpe(saved: dict[str, Any], end_of_text: int | None) -> Bpe:
    made = Bpe(json.dumps(saved), _name_of_end(saved, end_of_text))
    # A text comes in pieces, and goes out token by token: no piece may get a space of its own, as Llama 2's do.
    if (saved.get("decoder") or {}).get("type") != "ByteLevel" or made.decode(made.encode(["a"])[0]) != "a":
        raise RaygptError(
            "this tokenizer is not byte-level as GPT-2's, Llama 3's and Qwen's are, so that texts would not come back "
            "exactly; name a model with such a tokenizer"
        )
    return made


def _name_of_end(saved: dict[str, Any], end_of_text: int | None) -> str | None:
    """None if a token has a usual name; otherwise that of the id."""
    names = {token["id"]: token["content"] for token in saved.get("added_tokens", ())}
    return None if {*names.values()} & {*ENDS} else names.get(end_of_text)


def _candidates(saved: dict[str, Any]) -> list[Tokenizer]:
    """Our tokenizers that could have such a vocabulary; the caller compares them in full."""
    plain = _vocab(saved)
    found: list[Tokenizer] = []
    if len(plain) == 256:
        found.append(Bytes())
    if plain and all(len(piece) == 1 for piece in plain):
        found.append(Char("".join(plain)))
    if len(plain) == Gpt2.vocab - 1 and all(c in BYTES for piece in plain for c in piece):
        found.append(Gpt2({bytes(BYTES[c] for c in piece): rank for piece, rank in plain.items()}))
    return found


def _is_same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both give the same ids, even if written differently."""
    cuts = [saved.get("pre_tokenizer") or {} for saved in (ours, theirs)]
    return (
        _vocab(ours) == _vocab(theirs)
        and _pairs(ours["model"]) == _pairs(theirs["model"])
        and not theirs.get("normalizer")
        and all(cuts[0].get(key) == cuts[1].get(key) for key in ("type", "add_prefix_space", "pattern"))
    )


def _vocab(saved: dict[str, Any]) -> dict[str, int]:
    """Pieces of text; GPT-2's file on the Hub has end-of-text among them."""
    model = saved.get("model") if isinstance(saved, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pieces = vocab.items() if isinstance(vocab, dict) else ()
    return {piece: number for piece, number in pieces if piece != END_OF_TEXT}


def _pairs(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Merges, which older files write as one text: 'a b'."""
    return [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", [])]


BYTES = bytes_by_character()  # character -> byte
CHARACTERS = {byte: character for character, byte in BYTES.items()}


def _written(piece: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in piece)


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The two pieces that each longer piece is merged from, in the order of its rank."""
    longer = sorted((piece for piece in ranks if len(piece) > 1), key=ranks.__getitem__)
    return [(_written(left), _written(right)) for left, right in (_halves(piece, ranks) for piece in longer)]


def _halves(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that are left after every merge but the last, lowest rank first."""
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        place = joined.index(min(joined))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]
