"""Every number that follows from a recipe and its corpus, and how a batch is split to fit the devices."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.precision import choose_precision
from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.models import describe
from raygpt.models.memory import row_bytes, state_bytes
from raygpt.recipes.explain import explain_first

LOGITS = 2**28  # at most this many at a time, of 10 bytes each: fp32, their gradient, their exponentials
LOGIT_BYTES = 10
PROCESS_BYTES = 3 * 2**28  # of a worker beside its model: libraries, compiled programs; measured 0.45 to 0.75 GiB
NUMBER_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
USABLE = 0.8  # of a device's memory; the rest is for temporary buffers and fragmentation


@dataclass(frozen=True)
class Plan:
    """The numbers of a run that do not depend on the hardware."""

    parameters: int
    vocab: int
    train_tokens: int | None  # None while the corpus is still being tokenised
    val_tokens: int
    steps: int
    rows: int  # of a batch
    context: int
    flops_per_token: int
    run_folder: str

    @property
    def batch_tokens(self) -> int:
        return self.rows * self.context

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def epochs(self) -> float | None:
        return self.tokens / self.train_tokens if self.train_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {**asdict(self), "batch_tokens": self.batch_tokens, "tokens": self.tokens, "epochs": self.epochs}

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each number, for the console."""
        to_train_on = (
            "tokenised while it trains" if self.train_tokens is None else f"{self.train_tokens:,} tokens to train on"
        )
        epochs = "" if self.epochs is None else f"{self.epochs:.2f} epochs, "
        return [
            ("parameters", f"{self.parameters:,} with {self.vocab:,} tokens in the vocabulary"),
            ("corpus", f"{to_train_on}, {self.val_tokens:,} to validate"),
            (
                "training",
                f"{self.steps:,} steps × {self.rows:,} rows × {self.context:,} tokens = {self.tokens:,} tokens, "
                f"{epochs}{self.tokens / self.parameters:.1f} tokens per parameter",
            ),
            (
                "compute",
                f"{self.flops_per_token / 1e6:,.1f} MFLOPs per token, "
                f"{self.flops_per_token * self.tokens:.2e} FLOPs in all",
            ),
            ("run", self.run_folder),
        ]


def in_steps(recipe: Recipe, windows: int) -> Recipe:
    """The recipe with epochs converted to steps; an epoch is as many steps as it takes to see all windows."""
    training = recipe.training
    epoch = -(-windows // recipe.rows)
    steps = training.steps if training.epochs is None else math.ceil(training.epochs * epoch)
    lengths = {"steps": steps, "epochs": None}
    lengths |= {key: epoch for key in ("eval_every", "checkpoint_every") if getattr(training, key) == "epoch"}
    try:
        return Recipe.model_validate(dict(recipe) | {"training": training.model_copy(update=lengths)})
    except ValidationError as error:  # a warm-up longer than the run
        raise RaygptError(explain_first(error)) from None


def make_plan(recipe: Recipe, *, vocab: int, train_tokens: int | None, val_tokens: int, run_folder: str) -> Plan:
    """The plan of a recipe with its corpus."""
    description = describe(recipe.model, vocab)
    return Plan(
        parameters=description.count,
        vocab=vocab,
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        steps=recipe.steps,
        rows=recipe.rows,
        context=recipe.model.context,
        flops_per_token=description.flops_per_token,
        run_folder=run_folder,
    )


@dataclass(frozen=True)
class Split:
    """How a batch is split: into micro-batches, each distributed over the devices."""

    rows: int
    micro_rows: int  # of a micro-batch, over all devices
    accumulation: int
    devices: int
    memory_bytes: int  # estimated, per device

    def __str__(self) -> str:
        over = "1 device" if self.devices == 1 else f"{self.devices} devices"
        padding = self.micro_rows * self.accumulation - self.rows
        return (
            f"{self.rows} rows = {self.micro_rows} rows over {over} × {self.accumulation} accumulated"
            f"{f', {padding} of them padding' if padding else ''}; about {size(self.memory_bytes)} per device"
        )


def split_batch(recipe: Recipe, vocab: int, devices: Devices) -> Split:
    """Split into as few micro-batches as fit into the devices' memory, or into as many as the recipe says. Refuses a
    model that does not fit even with one row at a time."""
    mesh = recipe.cluster.mesh.over(devices.count)
    across = mesh["data"] * mesh["fsdp"]  # groups of devices, each with different rows
    rows_each = -(-recipe.rows // across)
    description = describe(recipe.model, vocab)
    state = state_bytes(description, mesh["fsdp"] * mesh["tensor"])
    row_logits = recipe.model.context * vocab // (mesh["tensor"] * mesh["context"])

    def logits(rows: int) -> int:
        return min(rows * row_logits, LOGITS) * LOGIT_BYTES

    remat, numbers = recipe.training.remat, devices.number_bytes
    row = row_bytes(description, remat, numbers, devices.keeps_scores, mesh["tensor"]) // mesh["context"]
    least = state + logits(1) + row
    if least > devices.memory_bytes:
        is_enough = least - state + state_bytes(description, devices.count) <= devices.memory_bytes
        raise RaygptError(_does_not_fit(least, state, devices, is_enough))
    room = max(1, (int(devices.memory_bytes * USABLE) - state - logits(rows_each)) // row)
    accumulation = recipe.training.accumulation or -(-rows_each // room)
    micro_each = -(-rows_each // accumulation)
    needed = state + logits(micro_each) + micro_each * row
    return Split(recipe.rows, micro_each * across, accumulation, devices.count, needed)


def _does_not_fit(needed: int, state: int, devices: Devices, fits_sharded: bool) -> str:
    each = "the device has" if devices.count == 1 else f"each of the {devices.count} devices has"
    remedy = "cluster.mesh.fsdp: -1 to shard it over the devices" if fits_sharded else "smaller model.layers or width"
    parts = f"{size(state)} for parameters, gradients and optimizer"
    return (
        f"model: it needs {size(needed)} on a device ({parts}), but {each} {size(devices.memory_bytes)}; write {remedy}"
    )


def cpu_devices(recipe: Recipe, workers: int, beside: int, cores: int, memory: int) -> Devices:
    """The devices that so many CPU workers will find, `beside` of them on each machine with these cores and so much
    memory for workers: with JAX every core is a device, with PyTorch every worker."""
    each = max(1, cores // beside)
    number_bytes = NUMBER_BYTES[choose_precision(recipe.model.precision, "cpu")]
    if recipe.engine == "torch":
        return Devices(workers, memory * each // max(cores, each), number_bytes, keeps_scores=False)
    return Devices(workers * each, memory // max(cores, each), number_bytes, keeps_scores=True)


def worker_bytes(recipe: Recipe, vocab: int, devices: Devices, workers: int) -> int:
    """Memory that a worker needs on a CPU, its process included; refuses a model that does not fit."""
    return split_batch(recipe, vocab, devices).memory_bytes * devices.count // workers + PROCESS_BYTES
