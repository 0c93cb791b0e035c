"""What documents a token store has: lengths, copies, scripts; from a sample of its shards, so that a large store takes
seconds too. In a scattered store every shard is a fair sample."""

import hashlib
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.corpus.extents import token_counts
from raygpt.corpus.store import TokenStore
from raygpt.corpus.tokenizers import byte_lengths

SAMPLE_TOKENS = 16_000_000  # whole shards of train, spread over it
DECODED_TOKENS = 1_000_000  # of the sample, for its characters
RARE = 0.001  # scripts with a smaller share are counted together


def summarise(store: TokenStore) -> dict[str, Any]:
    """Facts about a sample of a store's train documents, as JSON values."""
    documents = _sample(store)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)  # with their end
    if not len(lengths):
        return {}
    ids = np.concatenate(documents)
    copies = len(documents) - len({hashlib.blake2b(document.tobytes()).digest() for document in documents})
    return {
        "sampled_documents": len(documents),
        "sampled_tokens": len(ids),
        "bytes_per_token": round(float(np.array(byte_lengths(store.tokenizer))[ids].mean()), 3),
        "median_document": int(np.median(lengths)),
        "longest_document": int(lengths.max()),
        "copies": round(copies / len(documents), 4),
        "characters": _characters(store, documents),
        "lengths": _histogram(lengths),
    }


def _sample(store: TokenStore) -> list[NDArray[np.int32]]:
    """The documents of some train shards. One that reaches over a shard's end counts as two."""
    counts = token_counts(store.index.train)
    firsts = np.cumsum(counts) - counts
    room = max(1, int(SAMPLE_TOKENS // max(1, counts.mean() if len(counts) else 1)))
    chosen = np.unique(np.linspace(0, len(counts) - 1, min(room, len(counts))).round().astype(int))
    documents: list[NDArray[np.int32]] = []
    for shard in chosen.tolist():
        tokens = min(int(counts[shard]), SAMPLE_TOKENS)
        ids = store.train.windows([int(firsts[shard])], tokens)[0]
        ends = np.flatnonzero(ids == store.index.end_of_text) + 1
        documents += [document for document in np.split(ids, ends) if len(document)]
    return documents


def _characters(store: TokenStore, documents: list[NDArray[np.int32]]) -> dict[str, float]:
    """The share of each script among letters and other characters of some documents, the largest first."""
    step = max(1, sum(map(len, documents)) // DECODED_TOKENS)
    counted: Counter[str] = Counter()
    for document in documents[::step]:
        text = document[:DECODED_TOKENS].tolist()
        counted.update(store.tokenizer.decode(text[: len(text) - (text[-1] == store.index.end_of_text)]))
    scripts: Counter[str] = Counter()
    for character, count in counted.items():
        scripts[_script(character)] += count
    total = sum(scripts.values())
    shares = {name: count / total for name, count in scripts.most_common()}
    kept = {name: round(share, 4) for name, share in shares.items() if share >= RARE}
    rare = round(1 - sum(shares[name] for name in kept), 4)
    return {**kept, "other": rare} if rare else kept


def _script(character: str) -> str:
    """A letter's script, e.g. Latin or Cyrillic, from its Unicode name; otherwise what kind of character it is."""
    category = unicodedata.category(character)
    if category.startswith("L"):
        return unicodedata.name(character, "other").split()[0].split("-")[0].capitalize().replace("Cjk", "CJK")
    kinds = {"N": "digits", "P": "punctuation", "S": "symbols", "Z": "spaces", "M": "marks"}
    return "spaces" if character.isspace() else kinds.get(category[0], "control characters")


def _histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Documents, and tokens in them, by length: 1, 2 to 3, 4 to 7, … tokens."""
    classes = np.frexp(lengths)[1] - 1  # of the binary logarithm
    return [
        {"from": 2**n, "documents": int((classes == n).sum()), "tokens": int(lengths[classes == n].sum())}
        for n in range(int(classes.min()), int(classes.max()) + 1)
    ]
