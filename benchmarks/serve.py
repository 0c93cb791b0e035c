"""Tokens per second of one stream and of many by the batch of `raygpt serve`, beside Hugging Face's `generate`.

    python benchmarks/serve.py --engine jax --model gpt2 --streams 1 8
    python benchmarks/serve.py --engine torch --model modern-124m --slots 32 --streams 1 8 32   # on a GPU

One process, no Ray and no HTTP. The weights are random, and the same on both sides: raygpt's model is exported, and
transformers loads it in the same precision. Every text starts after a prompt of its own and has the same length; texts
are drawn at temperature 1, with the same number of tokens. Rounds of both alternate, and the medians are compared. With
--first-token, how long a request waits for its first token while 8 others are being written.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
from rich.console import Console
from rich.table import Table

from raygpt.config import Model
from raygpt.engines import make_reader, make_slots
from raygpt.interop.families import family_of
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.serving.batching import Batch, Served
from raygpt.serving.texts import Request

MODELS = {"gpt2": "gpt2-124m", "modern-124m": "modern-124m", "tiny": "tiny"}  # recipes whose shape it has
VOCAB = 50257


class Bytewise:
    """Decodes to one character a token: text is not what is measured, and nothing ends a text early."""

    vocab, end_of_text = VOCAB, -1

    def decode(self, tokens: Any) -> str:
        return "x" * len(tokens)


def main() -> None:
    arguments = _arguments()
    model, parameters = _random_model(arguments.model)
    reader = make_reader(arguments.engine, model, VOCAB)
    batch = Batch(
        make_slots(arguments.engine, reader, arguments.slots),
        reader.context,
        Bytewise(),  # type: ignore[arg-type]
        Served(0, reader.load(parameters)),
        most_waiting=10**6,
    )
    theirs = None if arguments.no_hf else Theirs(model, parameters, reader.describe())
    figures: dict[str, Any] = {**vars(arguments), **reader.describe(), "streams": {}}
    for streams in arguments.streams:
        figures["streams"][streams] = _compared(batch, theirs, streams, arguments)
    one = figures["streams"].get(1)
    table = Table("streams", "tokens/s", "times one", "Hugging Face", "times theirs")
    for streams, found in figures["streams"].items():
        times_one = f"{found['ours'] / one['ours']:.2f}" if one else "–"
        others = [f"{found['theirs']:.1f}", f"{found['ours'] / found['theirs']:.2f}"] if theirs else ["–", "–"]
        table.add_row(str(streams), f"{found['ours']:.1f}", times_one, *others)
    Console().print(table)
    if arguments.first_token:
        figures["first_token_ms"] = _first_token(batch, arguments)
        print(f"first token after {figures['first_token_ms']:.1f} ms, the median, with 8 streams running")
    name = f"serve-{arguments.model}-{arguments.engine}-{figures['device'].split()[-1].lower()}"
    print(f"written to {record.save(name, figures)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("jax", "torch"), default="jax")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-hf", action="store_true", help="leave out Hugging Face")
    parser.add_argument("--first-token", action="store_true", help="also the time to the first token")
    return parser.parse_args()


def _random_model(name: str) -> tuple[Model, dict[str, np.ndarray]]:
    model, random = load_recipe(MODELS[name]).model, np.random.default_rng(0)
    shapes = describe(model, VOCAB).shapes
    return model, {
        name: ("gain" in name) + 0.02 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


class Theirs:
    """Hugging Face's model with the same weights, on the same device in the same precision."""

    def __init__(self, model: Model, parameters: Any, about: dict[str, str]):
        import torch
        import transformers
        from safetensors.numpy import save_file

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(about["precision"], torch.float32)
        self._device = "cpu" if about["device"].lower() == "cpu" else "cuda"
        with tempfile.TemporaryDirectory() as folder:
            family = family_of(model)
            Path(folder, "config.json").write_text(json.dumps(family.full_config(model, VOCAB, VOCAB - 1)))
            save_file(family.exported(parameters, model, VOCAB), f"{folder}/model.safetensors", {"format": "pt"})
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = loaded.to(self._device).eval()
        self._torch = torch

    def write(self, prompts: np.ndarray, tokens: int) -> None:
        ids = self._torch.tensor(prompts, device=self._device)
        mask = self._torch.ones_like(ids)
        self._model.generate(
            ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=True, pad_token_id=0
        )
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def _compared(batch: Batch, theirs: Theirs | None, streams: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of so many texts at once: medians of alternating rounds, after one that compiles."""
    prompts = np.random.default_rng(0).integers(0, VOCAB, (streams, arguments.prompt))
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(arguments.rounds + 1):
        began = time.perf_counter()
        _write(batch, prompts, arguments.tokens)
        times["ours"].append(time.perf_counter() - began)
        if theirs:
            began = time.perf_counter()
            theirs.write(prompts, arguments.tokens)
            times["theirs"].append(time.perf_counter() - began)
    count = streams * arguments.tokens
    return {name: count / statistics.median(found[1:]) for name, found in times.items() if found}


def _write(batch: Batch, prompts: np.ndarray, tokens: int) -> None:
    unfinished = []
    for seed, prompt in enumerate(prompts.tolist()):
        request = Request(tuple(prompt), tokens, seed=seed)
        unfinished.append(batch.submit(request, lambda piece: None))
    while batch.turn():
        pass
    assert all(text.drawn == tokens for text in unfinished)


def _first_token(batch: Batch, arguments: argparse.Namespace, asked: int = 20) -> float:
    """Median milliseconds from a request to its first token, while 8 others, or all slots but one, are busy."""
    random = np.random.default_rng(1)
    waits = []
    for _ in range(asked):
        prompts = random.integers(0, VOCAB, (9, arguments.prompt)).tolist()
        running = [
            batch.submit(Request(tuple(p), 100), lambda piece: None) for p in prompts[: min(8, arguments.slots - 1)]
        ]
        while not all(text.drawn > 2 for text in running):
            batch.turn()
        came: list[float] = []
        began = time.perf_counter()
        text = batch.submit(Request(tuple(prompts[8]), 4), lambda piece: came.append(time.perf_counter()))  # noqa: B023
        while not came:
            batch.turn()
        waits.append(1000 * (came[0] - began))
        for each in (*running, text):
            batch.cancel(each)
        while batch.turn():
            pass
    return statistics.median(waits)


if __name__ == "__main__":
    main()
