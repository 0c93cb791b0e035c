"""Tokens per second of greedy sampling with and without a key-value cache, for GPT-2 small's shape.

    python benchmarks/generate.py --engine jax
    python benchmarks/generate.py --engine torch

The weights are random: the arithmetic is the same. Without a cache every token is a forward pass over all tokens so
far, as nanoGPT samples: over exactly so many with PyTorch; with JAX, which compiles for a length, over a bucket of 128,
256 or 512. That is timed for every 16th token, in turn with the cache, and should give the token that came through it.
Beside the clock's time stands the processor's, all threads together: what to look at where others use the machine.
"""

import argparse
import time
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
from raygpt.engines.padding import bucket
from raygpt.inference.sampling import stream
from raygpt.recipes import load_recipe

VOCAB, EVERY = 50257, 16
MODEL = Model(preset="gpt2", context=1024)


def main() -> None:
    arguments = _arguments()
    changes = {"model.preset": "gpt2", "model.context": 1024, "training.batch_tokens": 1024}
    recipe = load_recipe("tiny", {"engine": arguments.engine, **changes})
    engine = engine_of(arguments.engine).Engine(recipe, VOCAB)
    reader = make_reader(arguments.engine, MODEL, VOCAB)
    state = reader.load(engine.gather(engine.start()).parameters)
    shape = (arguments.samples, arguments.prompt)
    prompt = np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)
    _compile(reader, state, arguments)
    figures = {**_measured(reader, state, prompt, arguments.tokens), "prompt": arguments.prompt, "samples": len(prompt)}
    table = Table("", "tokens/s", "per second of processor time")
    for name in ("cache", "no cache", "times"):
        table.add_row(name, f"{figures['clock'][name]:.2f}", f"{figures['processor'][name]:.2f}")
    Console().print(table)
    print(f"{figures['same']} of {figures['compared']} tokens are the same")
    name = f"generate-{arguments.engine}" + (f"-{len(prompt)}-samples" if len(prompt) > 1 else "")
    print(f"written to {record.save(name, figures).relative_to(Path.cwd())}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("jax", "torch"), default="jax")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    parser.add_argument("--samples", type=int, default=1, help="texts in one batch")
    return parser.parse_args()


def _compile(reader: Reader, state: Any, arguments: argparse.Namespace) -> None:
    """Every length once, and a single token, before anything is timed."""
    for length in sorted({bucket(arguments.prompt + n, reader.context) for n in range(arguments.tokens)}):
        _, cache = reader.prefill(state, np.zeros((arguments.samples, length), dtype=np.int32))
        reader.decode(state, np.zeros((arguments.samples, 1), dtype=np.int32), length, cache)


def _measured(reader: Reader, state: Any, prompt: NDArray[np.int32], tokens: int) -> dict[str, Any]:
    drawn = stream(reader, state, prompt, temperature=0)
    with_cache, without, same, ids = Times(), Times(), 0, prompt
    for place in range(tokens):
        with with_cache:
            token = next(drawn)
        if place % EVERY == 0:
            with without:
                logits, _ = reader.prefill(state, ids)
            same += int((logits.argmax(-1) == token).sum())
        ids = np.concatenate([ids, token[:, None]], axis=1)
    rows = len(prompt)
    figures: dict[str, Any] = {"tokens": tokens, "compared": without.count * rows, "same": same}
    for clock in ("clock", "processor"):
        fast, slow = with_cache.per_second(clock) * rows, without.per_second(clock) * rows
        figures[clock] = {"cache": fast, "no cache": slow, "times": fast / slow}
    return figures


class Times:
    """How often something was done, and how long it took by the clock and on the processor."""

    def __init__(self) -> None:
        self.count, self._spent = 0, {"clock": 0.0, "processor": 0.0}

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *error: object) -> None:
        self.count += 1
        self._spent = {name: self._spent[name] + now - self._began[name] for name, now in self._now().items()}

    def per_second(self, clock: str) -> float:
        return self.count / self._spent[clock]

    def _now(self) -> dict[str, float]:
        return {"clock": time.perf_counter(), "processor": time.process_time()}


if __name__ == "__main__":
    main()
