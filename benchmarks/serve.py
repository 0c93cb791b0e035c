"""Tokens per second of one stream and of many by the batch of `raygpt serve`, beside Hugging Face's `generate`.

    python benchmarks/serve.py --engines jax --models gpt2 --streams 1 8
    python benchmarks/serve.py --engines jax torch --models gpt2 modern-124m --slots 32 --streams 1 8 32 \
        --tokens 128 --rounds 4 --hf-rounds 1 --name serve-h200   # on a GPU, about four minutes

Each engine with each model is a process of its own, without Ray and without HTTP, which is ended after `--limit`
seconds. Every figure is printed when it is measured, and with `--name` written too: what came before an interruption is
kept. The weights are random, and the same on both sides: raygpt's model is exported, and transformers loads it in the
same precision. Texts have prompts and seeds of their own and the same length; all are drawn at temperature 1.

- `ours N`, `theirs N`: tokens per second of N texts at once, with their prompts, after a first time that compiles
- `first token`: median ms from a request to its first token while 8 others are being written
- `host`: median ms in which Python and the library dispatch a step; the device works meanwhile
- `differ N`: texts that came out otherwise N at once than before, in another round or with fewer at once: none should
"""

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
from raygpt.serving.texts import TextOptions

MODELS = {"gpt2": "gpt2-124m", "modern-124m": "modern-124m", "tiny": "tiny"}  # recipes whose shape it has
VOCAB = 50257


class Bytewise:
    """Decodes to one character a token: text is not what is measured, and nothing ends a text early."""

    vocab, end_of_text = VOCAB, -1

    def decode(self, tokens: Any) -> str:
        return "x" * len(tokens)


def main() -> None:
    arguments = _arguments()
    if arguments.case:
        _measure(*arguments.case, arguments)
    else:
        _measure_all(arguments)


def _measure_all(arguments: argparse.Namespace) -> None:
    figures: dict[str, Any] = {}
    for engine, model in itertools.product(arguments.engines, arguments.models):
        found = figures[f"{engine} {model}"] = {}
        for figure in _measured_elsewhere(engine, model, arguments.limit):
            found.update(figure)
            print(f"{engine:6} {model:12}", *(f"{name}: {_short(value)}" for name, value in figure.items()), flush=True)
            if arguments.name:
                record.save(arguments.name, figures)
    _show(figures, arguments.streams)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=("jax", "torch"), nargs="+", default=["jax"])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["gpt2"])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=2, help="of each; the fastest counts")
    parser.add_argument("--hf-rounds", type=int, help="of Hugging Face's, each of which takes long; else as many")
    parser.add_argument("--no-hf", action="store_true", help="leave out Hugging Face")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one engine with one model")
    parser.add_argument("--name", help="of the results file; none is written without it")
    parser.add_argument("--case", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)  # in this process
    return parser.parse_args()


def _measured_elsewhere(engine: str, model: str, limit: float) -> Iterator[dict[str, Any]]:
    """The figures of an engine and a model, as another process prints them."""
    command = [sys.executable, *sys.argv, "--case", engine, model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        end = threading.Timer(limit, child.kill)
        end.start()
        yield from (json.loads(line) for line in child.stdout or () if line.startswith("{"))
        end.cancel()
    if child.returncode:
        yield {"ended": f"after {limit:g} s" if child.returncode == -signal.SIGKILL else f"with {child.returncode}"}


def _measure(engine: str, name: str, arguments: argparse.Namespace) -> None:
    """Print the figures of an engine and a model, one by one."""
    began = time.perf_counter()
    tell = lambda **figure: print(json.dumps(figure), flush=True)  # noqa: E731
    model, parameters = _random_model(name)
    reader = make_reader(engine, model, VOCAB)
    tell(**reader.describe(), slots=arguments.slots)
    slots = make_slots(engine, reader, arguments.slots)
    served = Served(0, reader.load(parameters))
    batch = Batch(slots, reader.context, Bytewise(), served, most_waiting=10**6)  # type: ignore[arg-type]
    tell(**{"s to load": time.perf_counter() - began})
    began = time.perf_counter()
    _write(batch, _prompts(1, arguments), 4)
    tell(**{"s to compile": time.perf_counter() - began})
    dispatched = _timed_steps(slots)
    first: dict[int, list[int]] = {}  # text of each seed
    for streams in arguments.streams:
        times, written = _timed(
            lambda prompts: _write(batch, prompts, arguments.tokens), streams, arguments.rounds, arguments
        )
        seeded = [each for texts in written for each in enumerate(texts)]
        differing = sum(text != first.setdefault(seed, text) for seed, text in seeded)
        tell(**{f"ours {streams}": _rate(streams, arguments, times), f"differ {streams}": differing})
    tell(**{"host": 1000 * statistics.median(dispatched), "first token": _first_token(batch, arguments)})
    if not arguments.no_hf:
        theirs = Theirs(model, parameters, reader.describe())
        theirs.write(_prompts(1, arguments), 4)
        for streams in arguments.streams:
            rounds = arguments.hf_rounds or arguments.rounds
            times, _ = _timed(lambda prompts: theirs.write(prompts, arguments.tokens), streams, rounds, arguments)
            tell(**{f"theirs {streams}": _rate(streams, arguments, times)})


def _show(figures: dict[str, dict[str, Any]], streams: list[int]) -> None:
    table = Table("", "streams", "tokens/s", "times one", "Hugging Face", "times theirs", "first token, ms")
    for case, found in figures.items():
        for count in streams:
            ours, one, theirs = (found.get(name) for name in (f"ours {count}", "ours 1", f"theirs {count}"))
            ratios = [ours and other and ours / other for other in (one, theirs)]
            shown = [ours, ratios[0], theirs, ratios[1], found.get("first token")]
            table.add_row(case, str(count), *("–" if value is None else _short(value) for value in shown))
    Console().print(table)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


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


def _prompts(streams: int, arguments: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (streams, arguments.prompt))


def _timed(
    write: Callable[[np.ndarray], Any], streams: int, rounds: int, arguments: argparse.Namespace
) -> tuple[list[float], list[Any]]:
    """Seconds of some rounds of so many texts at once, and each round's texts."""
    times, texts = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        texts.append(write(_prompts(streams, arguments)))
        times.append(time.perf_counter() - began)
    return times, texts


def _rate(streams: int, arguments: argparse.Namespace, times: list[float]) -> float:
    """Tokens per second, in the fastest of these rounds."""
    return streams * arguments.tokens / min(times)


def _write(batch: Batch, prompts: np.ndarray, tokens: int) -> list[list[int]]:
    """The ids of a text after each prompt."""
    texts = [
        batch.submit(TextOptions(tuple(prompt), tokens, seed=seed), lambda piece: None)
        for seed, prompt in enumerate(prompts.tolist())
    ]
    while batch.turn():
        pass
    assert all(text.drawn == tokens for text in texts)
    return [text.sample.ids for text in texts]


def _timed_steps(slots: Any) -> list[float]:
    """Seconds that each call of `step` takes from now on; the device has not computed it by then."""
    times: list[float] = []
    step = slots.step

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        drawn = step(*arguments)
        times.append(time.perf_counter() - began)
        return drawn

    slots.step = timed
    return times


def _first_token(batch: Batch, arguments: argparse.Namespace, asked: int = 10) -> float:
    """Median milliseconds from a request to its first token, while 8 others, or all slots but one, are busy."""
    waits = []
    for _ in range(asked):
        *others, prompt = _prompts(min(9, arguments.slots), arguments).tolist()
        running = [batch.submit(TextOptions(tuple(other), 100), lambda piece: None) for other in others]
        while not all(text.drawn > 2 for text in running):
            batch.turn()
        came: list[float] = []
        began = time.perf_counter()
        text = batch.submit(TextOptions(tuple(prompt), 4), lambda piece: came.append(time.perf_counter()))  # noqa: B023
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
