"""Tokens per second of greedy sampling with and without a key-value cache, for GPT-2 small's shape.

    python benchmarks/generate.py --engine jax
    python benchmarks/generate.py --engine torch

The weights are random: the arithmetic is the same. Without a cache every token is a forward pass over all tokens so
far, as nanoGPT samples: over exactly so many with PyTorch; with JAX, which compiles for a length, over a bucket of 128,
256 or 512. Both ways give the same tokens, which are counted.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from raygpt.config import Model
from raygpt.engines import engine_of, make_reader
from raygpt.engines.base import Reader
from raygpt.inference.sampling import stream
from raygpt.recipes import load_recipe

VOCAB = 50257


def main() -> None:
    arguments = _arguments()
    recipe = load_recipe("tiny", {"engine": arguments.engine, "model.preset": "gpt2", "model.context": 1024,
                                  "training.batch_tokens": 1024})  # fmt: skip
    engine = engine_of(arguments.engine).Engine(recipe, VOCAB)
    reader = make_reader(arguments.engine, Model(preset="gpt2", context=1024), VOCAB)
    state = reader.load(engine.gather(engine.start()).parameters)
    prompt = np.random.default_rng(0).integers(0, VOCAB, (1, arguments.prompt)).astype(np.int32)
    with_cache = stream(reader, state, prompt, temperature=0)
    ways = {"cache": with_cache, "no cache": _uncached(reader, state, prompt)}
    figures = _measured(ways, arguments)
    table = Table("", "tokens/s", "ms per token")
    for name in ways:
        table.add_row(name, f"{figures[name]:.2f}", f"{1000 / figures[name]:.1f}")
    Console().print(table)
    print(f"{figures['times']:.1f} times as fast with a cache; the first {figures['same_tokens']} tokens are the same")
    print(f"written to {record.save(f'generate-{arguments.engine}', figures).relative_to(Path.cwd())}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("jax", "torch"), default="jax")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    return parser.parse_args()


def _uncached(reader: Reader, state: Any, ids: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    while True:
        logits, _ = reader.prefill(state, ids)
        drawn = logits.argmax(-1).astype(np.int32)
        yield drawn
        ids = np.concatenate([ids, drawn[:, None]], axis=1)


def _measured(ways: dict[str, Iterator[NDArray[np.int32]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The ways take turns, a token each, so that whatever else the machine does slows them alike."""
    texts: dict[str, list[int]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.tokens):
        for name, tokens in ways.items():
            started = time.perf_counter()
            texts[name].append(int(next(tokens)[0]))
            seconds[name].append(time.perf_counter() - started)
    figures: dict[str, Any] = {"prompt": arguments.prompt, "tokens": arguments.tokens}
    compiled = {n for n in range(arguments.tokens) if n < 2 or arguments.prompt + n in (129, 257, 513)}
    for name, spent in seconds.items():
        counted = [s for n, s in enumerate(spent) if n not in compiled]
        figures[name] = len(counted) / sum(counted)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts.values(), strict=True)))
    return {**figures, "times": figures["cache"] / figures["no cache"], "same_tokens": same}


if __name__ == "__main__":
    main()
