"""What the order of a scattered store costs in loss, beside a full permutation and a shuffle over a part of the corpus.

    python benchmarks/shuffles.py TEXT TEXT …           # sorted by source: one after the other

A small model learns one epoch of the texts, the same five seeds for each order, in one process without Ray:

full       all windows permuted: the order of a store that is not scattered
scattered  documents scattered over shards, windows permuted over groups of shards
permuted   documents scattered over shards, all windows permuted: what the groups cost is the difference
window     windows of the sorted texts permuted within 1/16 of the corpus at a time, as loaders with a buffer do
packed     full, but every window begins at a document's start, and what is left of its last document is cut

The loss is that of the first tokens of held-out documents: in a window over two documents the second one's source is
no surprise in sorted text, and one in scattered text, so such windows would compare corpora instead of orders.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray

from raygpt.config import Recipe
from raygpt.corpus import pipeline, scatter, tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.order import window_count
from raygpt.corpus.permutation import keyed, permute
from raygpt.corpus.shards import Header, dtype_for, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.engines import devices_of, engine_of
from raygpt.recipes import load_recipe

VAL_SHARE = 10  # every tenth document
PARTS = 16  # of the corpus, of which a loader with a buffer has one in memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="plain text")
    parser.add_argument("--bytes", type=int, default=300_000, help="of each text")
    parser.add_argument("--document", type=int, default=150, help="characters of a document")
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--orders", nargs="+", default=["full", "scattered", "permuted", "window"])
    parser.add_argument("--override", action="append", default=[], help="of the recipe tiny")
    parser.add_argument("--name", help="write results/NAME.json")
    words = parser.parse_args()
    documents = [text for path in words.texts for text in documents_of(Path(path), words)]
    tokenizer = tokenizers.make("bpe:1024", iter(documents))
    train = [text for number, text in enumerate(documents) if number % VAL_SHARE]
    val = [text for number, text in enumerate(documents) if number % VAL_SHARE == 0]
    with tempfile.TemporaryDirectory() as folder:
        plain = write_plain(Path(folder) / "plain", train, tokenizer)
        scattered = write_scattered(Path(folder) / "scattered", plain, words.shards)
        figures = compare(plain, scattered, tokenizer.encode(val), words)
    record.show(figures, words.name)


def documents_of(path: Path, words: argparse.Namespace) -> list[str]:
    """The beginning of a text in short pieces: a shard must hold many documents, as large ones do.

    They are in a random order: a document does not continue the one before.
    """
    text = path.read_bytes()[: words.bytes].decode(errors="ignore")
    documents = [text[start : start + words.document] for start in range(0, len(text), words.document)]
    random.Random(1).shuffle(documents)
    return documents


def ids_of(texts: list[str], tokenizer: tokenizers.Tokenizer) -> NDArray[np.uint32]:
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    return np.concatenate([part for ids in tokenizer.encode(texts) for part in (ids, end)])


def write_plain(folder: Path, texts: list[str], tokenizer: tokenizers.Tokenizer) -> TokenStore:
    ids, dtype, fingerprint = ids_of(texts, tokenizer), dtype_for(tokenizer.vocab), tokenizers.fingerprint(tokenizer)
    write_shard(str(folder / "train-00000-00000.tokens"), [ids], Header(dtype, len(ids), fingerprint))
    tokenizers.save(tokenizer, str(folder))
    extents = (Extent("train-00000-00000.tokens", 0, len(ids)),)
    facts = (tokenizer.vocab, tokenizer.end_of_text, dtype.str, len(texts), 0)
    Index("1" * 16, "texts", fingerprint, *facts, extents, ()).write(str(folder))
    return open_store(str(folder))


def write_scattered(folder: Path, plain: TokenStore, shards: int) -> TokenStore:
    pipeline.each = lambda task, items, cpus: map(task, items)  # without Ray
    size = -(-2 * len(plain.train) // shards)
    scatter.scatter(plain, str(folder), "2" * 16, seed=1, by_content=False, bucket_bytes=size).write(str(folder))
    return open_store(str(folder))


class InParts(Feed):
    """Windows permuted within one part of the corpus after the other."""

    parts = PARTS

    def windows(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        (stream,) = self.streams
        size = window_count(len(stream), self.context) // self.parts
        part, place = np.divmod(positions, size)
        places = permute(place, size, keyed(self.seed, part))
        return stream.windows((part % self.parts * size + places) * self.context, self.context + 1)


class Permuted(InParts):
    """All windows permuted."""

    parts = 1


class Packed(Feed):
    """All windows permuted; each begins at the first document that starts after the window before."""

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        (stream,) = self.streams
        ids = np.concatenate(list(stream.runs()))
        begins = np.append(0, np.flatnonzero(ids == stream.index.end_of_text) + 1)
        found, end = [], 0
        for begin in begins[begins + self.context < len(ids)].tolist():
            if begin >= end:
                found.append(begin)
                end = begin + self.context
        return np.array(found)

    def windows(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        epoch, place = np.divmod(positions, len(self.starts))
        chosen = self.starts[permute(place, len(self.starts), keyed(self.seed, epoch))]
        return self.streams[0].windows(chosen, self.context + 1)


def compare(
    plain: TokenStore, scattered: TokenStore, val: Sequence[NDArray[np.uint32]], words: argparse.Namespace
) -> dict[str, Any]:
    known = {
        "full": (Feed, plain),
        "scattered": (Feed, scattered),
        "permuted": (Permuted, scattered),
        "window": (InParts, plain),
        "packed": (Packed, plain),
    }
    orders = {order: known[order] for order in words.orders}
    losses: dict[str, list[float]] = {order: [] for order in orders}
    for seed in words.seeds:
        recipe = recipe_for(seed, (plain, scattered), words.override)
        engine = engine_of(recipe.engine).Engine(recipe, plain.index.vocab, devices=devices_of(recipe.engine).one())
        for order, (kind, store) in orders.items():
            feed = kind([store.train], context=recipe.model.context, batch_rows=recipe.rows, seed=seed)
            losses[order].append(final_loss(engine, feed, recipe, val))
            print(f"seed {seed}  {order:10}{losses[order][-1]:.4f}", flush=True)
    figures: dict[str, Any] = {"tokens": len(plain.train), "documents": plain.index.documents}
    figures |= {order: statistics.mean(found) for order, found in losses.items()}
    pairs = (("scattered", "full"), ("scattered", "permuted"), ("window", "full"), ("packed", "full"))
    for order, base in (pair for pair in pairs if set(pair) <= set(orders)):
        gaps = [a - b for a, b in zip(losses[order], losses[base], strict=True)]
        figures[f"{order} - {base}"] = statistics.mean(gaps)
        figures[f"{order} - {base}, standard error"] = statistics.stdev(gaps) / len(gaps) ** 0.5
    return {**figures, "losses": losses}


def recipe_for(seed: int, stores: Sequence[TokenStore], overrides: list[str]) -> Recipe:
    """A small model that learns one epoch, the same number of steps in every order."""
    settings = ["model.layers=1", "model.width=32", "model.heads=1", "model.context=32", "training.batch_tokens=1024"]
    settings += [*overrides, f"training.seed={seed}"]
    recipe = load_recipe("tiny", settings)
    steps = min(store.train.window_count(recipe.model.context) // recipe.rows for store in stores)
    return load_recipe("tiny", [*settings, f"training.steps={steps}"])


def final_loss(engine: Any, feed: Feed, recipe: Recipe, val: Sequence[NDArray[np.uint32]]) -> float:
    """The validation loss after one epoch."""
    state, context = engine.start(), recipe.model.context
    for step in range(recipe.training.steps or 0):
        state, _ = engine.step(state, engine.put(feed.rows(step)))
    windows = np.stack([ids[: context + 1] for ids in val if len(ids) > context]).astype(np.int32)
    return float(np.mean(engine.window_losses(state, windows)))


if __name__ == "__main__":
    main()
