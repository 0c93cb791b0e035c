"""Benchmarks the bare training step on this hardware, and compares it with recorded speeds.

Random tokens, no feed, no log, no checkpoints: the upper bound of training speed. `speeds.json` has the figures that
benchmarks/step.py recorded, with hardware, versions and date.
"""

import importlib.resources
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raygpt.config import Recipe
from raygpt.engines import devices_of, engine_of, require
from raygpt.errors import RaygptError, first_line
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.training.mfu import mfu

GPT2_VOCAB, CHARACTERS = 50257, 65  # of GPT-2; of Shakespeare, which nanoGPT trains on a CPU
ROUND_STEPS = 10  # timed together: within a round nothing waits for the device
FIRST_STEPS = 5  # whose losses are kept
WARM_UP_STEPS = 10
BATCHES = 4  # used in turn
NANOGPTS_CPU_MODEL = ("model.layers=4", "model.heads=4", "model.width=128")  # of its README, for a laptop
# Two figures are comparable if these are equal.
SAME = ("device", "engine", "kernels", "layers", "width", "context", "vocab", "precision", "unlike_gpt2")
SET_HERE = {  # keys that the benchmark sets, and what to write instead
    "engine": "write --engine",
    "model.preset": "write --preset",
    "model.context": "write --context",
    "training.batch_tokens": "write --batch",
    "model.dropout": "it is 0",
}


@dataclass(frozen=True)
class Work:
    """What a step computes: a preset or given sizes, rows × context tokens."""

    engine: str = "jax"
    preset: str | None = "gpt2"
    batch: int = 64
    context: int = 1024
    steps: int = 50
    kernels: str | None = None  # JAX only: fused, plain, or None for the engine's choice
    vocab: int = GPT2_VOCAB
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in (override.partition("=")[0] for override in self.overrides):
            if key in SET_HERE:
                raise RaygptError(f"{key}: is set by the benchmark; {SET_HERE[key]}")

    @property
    def recipe(self) -> Recipe:
        """The recipe of this work, without dropout."""
        settings = [
            f"engine={self.engine}",
            *([f"model.preset={self.preset}"] if self.preset else []),
            f"model.context={self.context}",
            f"training.batch_tokens={self.batch * self.context}",
        ]
        return load_recipe("gpt2-tiny", [*self.overrides, *settings, "model.dropout=0"])

    @property
    def windows(self) -> NDArray[np.int32]:
        """The rows of a few batches."""
        shape = (BATCHES, self.batch, self.context + 1)
        return np.random.default_rng(0).integers(0, self.vocab, shape).astype(np.int32)


class Steps(NamedTuple):
    """A training step to time: `take(n)` runs step n and returns its metrics, `wait(metrics)` returns its loss."""

    take: Callable[[int], Any]
    wait: Callable[[Any], float]
    peak: Callable[[], int]  # the most bytes in use so far
    about: dict[str, str]


def usual_work(engine: str, preset: str | None = None, overrides: Sequence[str] = ()) -> Work:
    """GPT-2 124M on a GPU or TPU, a small model on a CPU, where a step of GPT-2 takes a minute."""
    if _devices(engine).is_accelerated():
        return Work(engine, preset or "gpt2", overrides=tuple(overrides))
    small = Work(engine, preset, 12, 64, overrides=tuple(overrides))
    if preset or any(word.startswith("model.depth=") for word in overrides):  # which sets layers, heads and width
        return small
    return replace(small, vocab=CHARACTERS, overrides=(*NANOGPTS_CPU_MODEL, *overrides))


def measure(work: Work) -> dict[str, Any]:
    """The figures of some work on an engine, in this process."""
    return timed(engine_steps(work), work)


def timed(steps: Steps, work: Work) -> dict[str, Any]:
    """Median over rounds of ten steps without synchronisation in between, after 15 warm-up steps."""
    began = time.perf_counter()
    losses = [steps.wait(steps.take(0))]
    compile_s = time.perf_counter() - began
    losses += [steps.wait(steps.take(n)) for n in range(1, FIRST_STEPS)]
    steps.wait([steps.take(n) for n in range(WARM_UP_STEPS)][-1])
    rounds = []
    for _ in range(max(1, work.steps // ROUND_STEPS)):
        began = time.perf_counter()
        steps.wait([steps.take(n) for n in range(ROUND_STEPS)][-1])
        rounds.append((time.perf_counter() - began) / ROUND_STEPS)
    speed, model = work.batch * work.context / statistics.median(rounds), work.recipe.model
    return {
        "ms": 1e3 * statistics.median(rounds),
        "tokens_per_s": speed,
        "mfu": mfu(speed, describe(model, work.vocab).flops_per_token, steps.about["device"], 1),
        "peak_gib": steps.peak() / 2**30,
        "compile_s": compile_s,
        "rounds_ms": [round(1e3 * seconds, 2) for seconds in rounds],
        "losses": [round(loss, 4) for loss in losses],
        "rows": work.batch,
        "context": work.context,
        "layers": model.layers,
        "width": model.width,
        "vocab": work.vocab,
        "unlike_gpt2": unlike_gpt2(work.recipe),
        "about": steps.about,
    }


def unlike_gpt2(recipe: Recipe) -> str:
    """What a step computes that GPT-2's with AdamW does not, e.g. `mlp=relu2, optimizer=muon`; empty for that one."""
    training, kind = recipe.training, recipe.optimizer.kind
    other = {"optimizer": (kind, "adamw"), "remat": (training.remat, "none"), "compile": (training.compile, "auto")}
    differs = {key: value for key, (value, usual) in other.items() if value != usual}
    return ", ".join(f"{key}={value}" for key, value in {**recipe.model.unlike_gpt2, **differs}.items())


def together(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Merge two measurements of the same work: all their rounds."""
    rounds = [*first["rounds_ms"], *then["rounds_ms"]]
    speed = first["rows"] * first["context"] / statistics.median(rounds) * 1e3
    share = None if first["mfu"] is None else first["mfu"] * speed / first["tokens_per_s"]
    return {**first, "rounds_ms": rounds, "ms": statistics.median(rounds), "tokens_per_s": speed, "mfu": share}


def engine_steps(work: Work) -> Steps:
    """An engine on one device."""
    engine = _engine(work)
    state, batches = engine.start(), [engine.put(part) for part in work.windows]

    def take(number: int) -> Any:
        nonlocal state
        state, metrics = engine.step(state, batches[number % BATCHES])
        return metrics

    peak = _devices(work.engine).peak_bytes
    return Steps(take, lambda metrics: float(engine.read(metrics)["loss"]), peak, engine.describe())


def _engine(work: Work) -> Any:
    here, module = _devices(work.engine), engine_of(work.engine)
    if work.engine == "jax":  # without `set_up`, which caches compiled programs: compile time is measured, too
        return module.Engine(work.recipe, work.vocab, devices=here.one(), kernels=work.kernels)
    module.set_up()
    return module.Engine(work.recipe, work.vocab)


def _devices(engine: str) -> Any:
    """The engine's devices on this machine, with a CPU's cores used as in training."""
    require(engine)
    try:
        devices = devices_of(engine)
        devices.use_all_cores()
        return devices
    except ImportError as error:
        remedy = f"install it again: pip install --force-reinstall {engine}"
        raise RaygptError(f"engine {engine} cannot be imported ({first_line(error)}); {remedy}") from error


# What was recorded


def entry(figures: dict[str, Any]) -> dict[str, Any]:
    """A measurement as a row of the table."""
    about = figures["about"]
    return {
        "device": about["device"],
        "engine": about["engine"].split()[0],
        "kernels": about.get("kernels", ""),
        **{name: figures[name] for name in ("layers", "width", "vocab", "context", "rows", "unlike_gpt2")},
        "precision": about["precision"],
        "ms": round(figures["ms"], 2),
        "tokens_per_s": round(figures["tokens_per_s"]),
        "peak_gib": round(figures["peak_gib"], 1),
    }


def recorded() -> list[dict[str, Any]]:
    """The shipped table."""
    text = importlib.resources.files("raygpt").joinpath("speeds.json").read_text()
    table: list[dict[str, Any]] = json.loads(text)
    return table


def comparable(figures: dict[str, Any], table: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The recorded figure for the same work on the same kind of device, of the nearest number of rows."""
    ours = entry(figures)
    same = [row for row in table if all(row[name] == ours[name] for name in SAME)]
    return min(same, key=lambda row: abs(row["rows"] - ours["rows"]), default=None)


def verdict(figures: dict[str, Any], table: list[dict[str, Any]]) -> str:
    """How the speed compares with the recorded one, in a sentence."""
    row, device = comparable(figures, table), figures["about"]["device"]
    if row is None:
        known = ", ".join(sorted({f"{row['device']} ({row['engine']})" for row in table}))
        what = f" with {figures['unlike_gpt2']}" if figures["unlike_gpt2"] else ""
        return f"nothing comparable is recorded for {device}{what}; there are figures for: {known}"
    ratio = figures["tokens_per_s"] / row["tokens_per_s"]
    when = f"recorded on {row['date']} with {row['versions']}, {row['rows']} rows"
    opinion = "as expected: devices of one kind differ by 5 %" if abs(ratio - 1) <= 0.05 else _explain(ratio)
    return f"{ratio:.2f} of the {row['tokens_per_s']:,} tokens/s {when}: {opinion}"


def _explain(ratio: float) -> str:
    return "faster" if ratio > 1 else "slower; is something else running, or the device at its power limit?"
