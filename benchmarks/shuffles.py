"""What the order of a scattered store costs in loss, beside a full permutation and a shuffle over a part of the corpus.

    python benchmarks/shuffles.py TEXT TEXT …           # sorted by source: one after the other

A small model learns one epoch of the texts, five seeds for each order, in one process without Ray:

full       all windows permuted: the order of a store that is not scattered
scattered  documents scattered over shards, windows permuted over groups of shards
window     windows of the sorted texts permuted within 1/16 of the corpus at a time, as loaders with a buffer do
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray

from raygpt.corpus import pipeline, scatter, tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.permutation import keyed, permute
from raygpt.corpus.shards import Header, dtype_for, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.engines import devices_of, engine_of
from raygpt.recipes import load_recipe

VAL_SHARE = 20  # every 20th document
BUCKETS, GROUP_SHARE = 24, 16
DOCUMENT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="plain text")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of each text")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--override", action="append", default=[], help="of the recipe tiny")
    parser.add_argument("--name", help="write results/NAME.json")
    words = parser.parse_args()
    documents = [text for path in words.texts for text in documents_of(Path(path), words.bytes)]
    tokenizer = tokenizers.make("bpe:1024", iter(documents))
    train = [text for number, text in enumerate(documents) if number % VAL_SHARE]
    val = [text for number, text in enumerate(documents) if number % VAL_SHARE == 0]
    with tempfile.TemporaryDirectory() as folder:
        plain = write_plain(Path(folder) / "plain", train, tokenizer)
        scattered = write_scattered(Path(folder) / "scattered", plain)
        held_out = ids_of(val, tokenizer)
        figures = compare(plain, scattered, held_out, words)
    record.show(figures, words.name)


def documents_of(path: Path, limit: int) -> list[str]:
    """The beginning of a text in pieces of 1,000 characters: a shard must hold many documents, as large ones do."""
    text = path.read_bytes()[:limit].decode(errors="ignore")
    return [text[start : start + DOCUMENT] for start in range(0, len(text), DOCUMENT)]


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


def write_scattered(folder: Path, plain: TokenStore) -> TokenStore:
    pipeline.each = lambda task, items, cpus: map(task, items)  # without Ray
    size = 2 * len(plain.train) // BUCKETS
    scatter.scatter(plain, str(folder), "2" * 16, seed=1, by_content=False, bucket_bytes=size).write(str(folder))
    return open_store(str(folder))


class InWindows(Feed):
    """Windows permuted within one sixteenth of the corpus after the other."""

    def windows(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        (stream,) = self.streams
        size = stream.window_count(self.context) // GROUP_SHARE
        part, place = np.divmod(positions, size)
        places = permute(place, size, keyed(self.seed, part))
        return stream.windows((part % GROUP_SHARE * size + places) * self.context, self.context + 1)


def compare(
    plain: TokenStore, scattered: TokenStore, val: NDArray[np.uint32], words: argparse.Namespace
) -> dict[str, Any]:
    losses: dict[str, list[float]] = {"full": [], "scattered": [], "window": []}
    for seed in range(words.seeds):
        for order, kind, store in (("full", Feed, plain), ("scattered", Feed, scattered), ("window", InWindows, plain)):
            losses[order].append(final_loss(kind, store, val, seed, words.override))
            print(f"seed {seed}  {order:10}{losses[order][-1]:.4f}", flush=True)
    means = {order: statistics.mean(found) for order, found in losses.items()}
    gaps = {
        f"{order} - full": statistics.mean(a - b for a, b in zip(losses[order], losses["full"], strict=True))
        for order in ("scattered", "window")
    }
    errors = {
        f"standard error of {order} - full": statistics.stdev(
            a - b for a, b in zip(losses[order], losses["full"], strict=True)
        )
        / words.seeds**0.5
        for order in ("scattered", "window")
        if words.seeds > 1
    }
    return {"tokens": len(plain.train), **means, **gaps, **errors, "losses": losses}


def final_loss(kind: type[Feed], store: TokenStore, val: NDArray[np.uint32], seed: int, overrides: list[str]) -> float:
    """The validation loss after one epoch."""
    settings = ["model.layers=2", "model.width=64", "model.heads=2", "model.context=64", "training.batch_tokens=2048"]
    recipe = load_recipe("tiny", [*settings, *overrides, f"training.seed={seed}", "model.dropout=0"])
    rows, context = recipe.rows, recipe.model.context
    steps = store.train.window_count(context) // rows - 1
    recipe = load_recipe(
        "tiny", [*settings, *overrides, f"training.seed={seed}", "model.dropout=0", f"training.steps={steps}"]
    )
    engine = engine_of(recipe.engine).Engine(recipe, store.index.vocab, devices=devices_of(recipe.engine).one())
    feed = kind([store.train], context=context, batch_rows=rows, seed=seed)
    state = engine.start()
    for step in range(steps):
        state, _ = engine.step(state, engine.put(feed.rows(step)))
    starts = np.arange(0, len(val) - context - 1, context)
    windows = np.stack([val[start : start + context + 1] for start in starts]).astype(np.int32)
    return float(np.mean(engine.window_losses(state, windows)))


if __name__ == "__main__":
    main()
