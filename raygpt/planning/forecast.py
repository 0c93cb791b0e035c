"""A recipe on a target: whether it fits, how fast it is, how long it takes, what it costs, and which loss comes out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.padding import padded_vocab
from raygpt.errors import RaygptError
from raygpt.models import Description, describe
from raygpt.planning.corpus import Corpus, look_up
from raygpt.planning.earlier_runs import read_earlier_runs
from raygpt.planning.loss import Laws, Loss, read_laws
from raygpt.planning.memory import Memory, step_memory
from raygpt.planning.micro_batch_size import Split, rows_of_group, split_batch, split_into
from raygpt.planning.step_time import StepTime, step_time
from raygpt.planning.target import (
    NAME_OTHERS,
    Target,
    as_overrides,
    devices_on,
    other_hardware_keys,
    precision_on,
    this_cpu,
    worker_keys,
)
from raygpt.recipes.lengths import in_steps

START_S = 60.0  # Ray, compiling, the first batch
CHECKPOINT_BANDWIDTH = 1e9  # bytes/s to a disk or an object store, assumed
LAUNCHES_S = 1e-3  # of a step: below, launching its kernels takes longer than what they compute
LAUNCHES = (
    "a step of less than 1 ms takes longer than planned: the time to launch its kernels is not counted, and decides; "
    "measure it, on one device first"
)
HUGGINGFACE = (
    "model.implementation: huggingface is planned as raygpt's own model; transformers' takes longer and more memory"
)
SHARED = "the memory is the recipe's part of the GPU; the time is that of a run beside which no other uses the GPU"
EVALUATED = 1 / 3  # of a step's time per token: a forward pass


@dataclass(frozen=True)
class Forecast:
    """The numbers of a recipe on a target."""

    recipe: Recipe  # with every length in steps
    original: Recipe  # as it was given, with epochs not converted
    target: Target
    corpus: Corpus
    laws: Laws  # beside its runs
    devices: Devices
    split: Split
    fits: bool
    time: StepTime
    parameters: int
    flops_per_token: int
    loss: Loss | None

    @cached_property
    def description(self) -> Description:
        """Of the model, with the table padded as the engines have it."""
        return describe(self.recipe.model, padded_vocab(self.corpus.vocab))

    @cached_property
    def workers(self) -> Mapping[str, Any]:
        """The keys of `cluster` with which a run uses the whole target."""
        return worker_keys(self.recipe.cluster, self.target)

    @property
    def memory(self) -> Memory:
        return self.split.memory

    @property
    def mesh(self) -> dict[str, int]:
        return self.recipe.mesh_over(self.devices.count)

    @property
    def tokens(self) -> int:
        return self.recipe.steps * self.recipe.training.batch_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.recipe.training.batch_tokens / self.time.total

    @property
    def mfu(self) -> float | None:
        """Of the bf16 peak, as `raygpt train` prints it; None of a CPU, whose peak is only measured."""
        if self.target.device.platform == "cpu":
            return None
        return self.tokens_per_s * self.flops_per_token / (self.target.device.peak * self.target.count)

    @property
    def evaluation_s(self) -> float:
        """One validation."""
        rows, tokens = self.recipe.training.eval_rows, self.corpus.val_tokens
        windows = None if tokens is None else tokens // self.recipe.model.context
        rows = min((count for count in (rows, windows) if count is not None), default=0)
        return rows * self.recipe.model.context * EVALUATED / self.tokens_per_s

    def seconds(self, first: int, last: int) -> float:
        """Of the steps after `first` up to `last`, with their validations: before a run's first step, every so many
        steps, and after its last."""
        every, steps = int(self.recipe.training.eval_every), self.recipe.steps
        at_end = last == steps and steps % every > 0
        evaluations = (first == 0) + last // every - first // every + at_end
        return (last - first) * self.time.total + evaluations * self.evaluation_s

    @property
    def run_s(self) -> float:
        return START_S + self.seconds(0, self.recipe.steps)

    @property
    def unused(self) -> str | None:
        """In one line, how many of the target's devices the recipe's workers would leave idle, and what to write."""
        workers, needed = self.recipe.worker_counts(self.target.device.platform)[-1], self.workers["cluster.workers"]
        if self.target.device.platform == "cpu" or workers >= needed:
            return None
        used = f"{workers * self.target.count // needed} of the {self.target.count} devices"
        return (
            f"cluster.workers: {self.recipe.cluster.workers} would use {used}; train with {as_overrides(self.workers)}"
        )

    @property
    def missing(self) -> str | None:
        """In one line, that the recipe needs more workers than the target has room for, and what to write."""
        cluster, platform = self.recipe.cluster, self.target.device.platform
        room = self.workers["cluster.workers"]
        if platform == "cpu" or self.recipe.worker_counts(platform)[0] <= room:
            return None
        return (
            f"cluster.workers: {cluster.workers} has no room on {self.target}, which takes {room}; the plan is for "
            f"{room}: write cluster.workers={room}, or name more devices by --on"
        )

    @property
    def notes(self) -> list[str]:
        """What was assumed or left out, and what the numbers do not say, each in one line."""
        platform = self.target.device.platform
        hurried = [LAUNCHES] if self.time.total < LAUNCHES_S and platform != "cpu" else []
        shared = [SHARED] if self.recipe.cluster.gpu_share < 1 and platform == "gpu" else []
        other = filter(
            None, [self.other_hardware, self.unused, self.missing, self._not_sharded, self._validations_not_counted]
        )
        return [*self.corpus.assumed, *other, *self._not_fitted, *hurried, *shared, *self.laws.unreadable]

    @property
    def _not_sharded(self) -> str | None:
        """In one line, that `fsdp` shards hardly anything, because it does not divide the model."""
        fsdp, sizes = self.mesh["fsdp"], self.description.sizes
        if fsdp == 1 or sizes["width"] % fsdp == 0:
            return None
        return (
            f"cluster.mesh.fsdp: {fsdp} does not divide model.width {sizes['width']}, so every device has all "
            f"parameters; write {gcd(fsdp, sizes['width'])}, and the rest along data"
        )

    @property
    def _validations_not_counted(self) -> str | None:
        """In one line, that the length of validations is not known."""
        if self.recipe.training.eval_rows is not None or self.corpus.val_tokens is not None:
            return None
        return "validations are not counted: how long the validation text is is not known; write training.eval_rows=N"

    @property
    def _not_fitted(self) -> list[str]:
        """What the formulas were not fitted to, each in one line."""
        training, model = self.recipe.training, self.recipe.model
        is_slow = training.compile == "off" and self.target.device.platform != "cpu"
        return [
            *(["training.compile: off takes longer and more memory than planned"] if is_slow else []),
            *([HUGGINGFACE] if model.implementation == "huggingface" else []),
        ]

    @property
    def other_hardware(self) -> str | None:
        """In one line, that the recipe asks for other hardware than the target, and what to write."""
        keys = other_hardware_keys(self.recipe.cluster, self.target)
        if not keys:
            return None
        names = [key.removeprefix("cluster.") for key in keys]
        asked = ", ".join(f"{name} {getattr(self.recipe.cluster, name)}" for name in names)
        return f"cluster: {asked} is other hardware than {self.target}; write {as_overrides(keys)}"

    def cost(self, price: float) -> float:
        """At so much per device and hour."""
        return price * self.target.count * self.run_s / 3600

    @property
    def checkpoint_bytes(self) -> int:
        """Parameters and the optimizer's averages, over all devices."""
        mesh = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}
        whole = step_memory(self.recipe, self.corpus.vocab, self.devices, mesh, 1, 1)
        return whole.parameters + whole.optimizer

    @property
    def checkpoint_s(self) -> float:
        """Seconds to write one, in the background."""
        return self.checkpoint_bytes / CHECKPOINT_BANDWIDTH

    @property
    def checkpoints(self) -> int:
        return -(-self.recipe.steps // int(self.recipe.training.checkpoint_every))

    def as_dict(self, price: float | None = None) -> dict[str, Any]:
        """Everything as JSON values; bytes and seconds."""
        return {
            "target": str(self.target),
            "device": {**asdict(self.target.device), "reported": list(self.target.device.reported)},
            "engine": self.recipe.engine,
            "fits": self.fits,
            "memory": {**asdict(self.memory), "total": self.memory.total, "limit": self.devices.memory_bytes},
            "mesh": self.mesh,
            "micro_rows": self.split.micro_rows,
            "accumulation": self.split.accumulation,
            "step_s": {**asdict(self.time), "total": self.time.total},
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "parameters": self.parameters,
            "steps": self.recipe.steps,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens / self.parameters,
            "run_s": self.run_s,
            "cost": None if price is None else self.cost(price),
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_s": self.checkpoint_s,
            "checkpoints": self.checkpoints,
            "loss": asdict(self.loss) if self.loss else None,
            "assumed": list(self.corpus.assumed),
        }


def forecast(
    recipe: Recipe,
    target: Target,
    corpus: Corpus | None = None,
    devices: Devices | None = None,
    laws: Laws | None = None,
) -> Forecast:
    """The forecast of a recipe. Unless they are given, its corpus and scaling laws are looked up beside its runs, and
    devices are what an engine would find."""
    if target.is_here and recipe.cluster.accelerator == "cpu" and target.device.platform != "cpu":
        target = Target(this_cpu(), 1)  # the recipe leaves this machine's GPUs alone
    corpus = corpus or look_up(recipe.data, recipe.run.storage, target.is_here)
    if laws is None:
        home = recipe.run.storage
        laws = replace(read_laws(home), earlier=read_earlier_runs(home)) if corpus.is_storage_reached else Laws()
    known = with_steps(recipe, corpus)
    if devices is None:
        worker_keys(known.cluster, target)  # refuses workers that cannot use the target
        devices = devices_on(known, target)
    split, fits = _split(known, corpus.vocab, devices)
    mesh = known.mesh_over(devices.count)
    precision = precision_on(known, target)
    seconds = step_time(known, corpus.vocab, devices, target, mesh, split.micro_rows, split.accumulation, precision)
    description = describe(known.model, corpus.vocab)
    tokens = known.steps * known.training.batch_tokens
    is_fork = known.run.start_from is not None  # laws are of runs from step 0
    loss = None if is_fork else laws.expected_loss(known, description.block_parameters, tokens)
    parameters, flops = description.count, description.flops_per_token
    return Forecast(known, recipe, target, corpus, laws, devices, split, fits, seconds, parameters, flops, loss)


def _split(recipe: Recipe, vocab: int, devices: Devices) -> tuple[Split, bool]:
    """As training would split the batch; if nothing fits, one row at a time, or as the recipe says."""
    mesh = recipe.mesh_over(devices.count, NAME_OTHERS)
    try:
        return split_batch(recipe, vocab, devices), True
    except RaygptError:
        accumulation = recipe.training.accumulation or rows_of_group(recipe, mesh)
        return split_into(accumulation, recipe, vocab, devices, mesh), False


def with_steps(recipe: Recipe, corpus: Corpus) -> Recipe:
    """The recipe with its lengths in steps; refuses one in epochs of a corpus whose length is unknown."""
    training = recipe.training
    if corpus.train_tokens is None and (key := training.in_epochs):
        every = [name for name in ("eval_every", "checkpoint_every") if getattr(training, name) == "epoch"]
        write = " ".join(f"training.{name}=N" for name in [*(["steps"] if training.epochs else []), *every])
        raise RaygptError(f"{key}: its corpus is not prepared, so its length is unknown; write {write}")
    return in_steps(recipe, corpus.windows(recipe.model.context))
