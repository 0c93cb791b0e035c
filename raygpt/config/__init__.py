"""Recipe and its parts: one validated object, made once by `recipes.load_recipe` and passed down.

A recipe is YAML in parts (`model`, `data`, `optimizer`, …), each a frozen pydantic model in a file of this folder. Keys
are written dotted in overrides and in errors: `training.steps`. Validators raise ValueError with the whole line, key
included; `load_recipe` turns it into a RaygptError.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from raygpt.config.cluster import Cluster, Mesh
from raygpt.config.data import Data, Source
from raygpt.config.model import FAMILY_KEYS, PRESETS, SIZE_KEYS, Model
from raygpt.config.optimizer import Optimizer
from raygpt.config.parts import May, Part, multiples_around, shown
from raygpt.config.run import Run, Track
from raygpt.config.schedule import Schedule
from raygpt.config.training import TASKS, Training
from raygpt.errors import RaygptError

__all__ = [
    "FAMILY_KEYS",
    "PRESETS",
    "SIZE_KEYS",
    "TASKS",
    "Cluster",
    "Data",
    "May",
    "Mesh",
    "Model",
    "Optimizer",
    "Part",
    "Recipe",
    "Run",
    "Schedule",
    "Source",
    "Track",
    "Training",
    "keys_with",
    "shown",
]


class Recipe(Part):
    """Everything that determines a run. Made by `load_recipe`."""

    engine: Literal["jax", "torch"] = Field("jax", description="The library that computes: JAX or PyTorch.")
    model: Model = Field(Model(), description="What is trained.")
    data: Data = Field(Data(), description="What it is trained on.")
    optimizer: Optimizer = Field(Optimizer(), description="How weights are updated.")
    schedule: Schedule = Field(Schedule(), description="The learning rate over the steps.")
    training: Training = Field(Training(), description="How long and in what batches.")
    cluster: Annotated[Cluster, May.CHANGE] = Field(Cluster(), description="Where it runs.")
    run: Annotated[Run, May.CHANGE] = Field(Run(), description="Where its results go.")
    track: Annotated[Track, May.CHANGE] = Field(Track(), description="Experiment trackers that get its metrics.")

    @model_validator(mode="after")
    def _batch_is_whole_rows(self) -> Self:
        tokens, context = self.training.batch_tokens, self.model.context
        if tokens % context:
            raise ValueError(
                f"training.batch_tokens: {tokens} is not a multiple of model.context {context}, "
                f"and a batch is whole rows; write {multiples_around(tokens, context)}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        warmup, steps, most = self.schedule.warmup_steps, self.training.steps, self.longest_warmup
        if steps is None or most is None:
            return self  # checked again when epochs have been converted to steps
        if warmup > steps:
            raise ValueError(
                f"schedule.warmup_steps: {warmup} is more than training.steps {steps}; write {steps} or less"
            )
        if warmup > most:
            raise ValueError(
                f"schedule.warmup_steps: {warmup} reaches into the last {steps - most} of training.steps {steps}, "
                f"in which schedule.decay_share lets the rate fall; write {most} or less"
            )
        return self

    @model_validator(mode="after")
    def _transformers_model_fits(self) -> Self:
        if self.model.implementation == "huggingface" and self.engine != "torch":
            raise ValueError(f"model.implementation: huggingface is not for engine {self.engine}; write engine: torch")
        if self.model.implementation == "huggingface" and not self.model.bias:
            raise ValueError("model.bias: transformers' GPT-2 always has biases; write model.implementation: raygpt")
        if self.model.implementation == "huggingface" and self.cluster.mesh.tensor != 1:
            raise ValueError(
                f"cluster.mesh.tensor: {self.cluster.mesh.tensor} is not for transformers' GPT-2; "
                "write cluster.mesh.fsdp instead, or model.implementation: raygpt"
            )
        if self.model.implementation == "huggingface" and self.optimizer.kind == "muon":
            raise ValueError(
                "optimizer.kind: muon is not for transformers' GPT-2, whose queries, keys and values are one matrix; "
                "write model.implementation: raygpt"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_compile_so(self) -> Self:
        how = self.training.compile
        if how == {"jax": "off", "torch": "scanned"}[self.engine]:
            raise ValueError(f"training.compile: {how} is not for engine {self.engine}; write training.compile: auto")
        return self

    @model_validator(mode="after")
    def _engine_can_use_the_cluster(self) -> Self:
        if self.engine != "torch":
            return self
        context = self.cluster.mesh.context
        if context != 1:
            raise ValueError(
                f"cluster.mesh.context: {context} is not for engine torch; write cluster.mesh.tensor instead, "
                "or engine: jax"
            )
        if self.cluster.accelerator == "tpu" or self.cluster.topology:
            key = "accelerator: tpu" if self.cluster.accelerator == "tpu" else f"topology: {self.cluster.topology}"
            raise ValueError(f"cluster.{key} is not for engine torch, which knows no TPU; write engine: jax")
        gpus = self.cluster.resources_per_worker.get("GPU", 1)
        if gpus > 1:
            workers = "..".join(str(int(count) * int(gpus)) for count in str(self.cluster.workers).split(".."))
            raise ValueError(
                f"cluster.resources_per_worker: a worker of engine torch uses one GPU, not {gpus:g}; "
                f"write cluster.workers: {workers} and leave GPU out"
            )
        return self

    @model_validator(mode="after")
    def _mesh_divides_model(self) -> Self:
        mesh = self.cluster.mesh.sizes()
        if indivisible := self.indivisible(mesh):
            axis, key, whole = indivisible
            wrong = f"cluster.mesh.{axis}: {mesh[axis]} does not divide model.{key} {whole}"
            raise ValueError(f"{wrong}; write {gcd(mesh[axis], whole)}")
        return self

    @model_validator(mode="after")
    def _elastic_mesh_can_be_made(self) -> Self:
        try:
            self.worker_counts(self.cluster.accelerator)
        except RaygptError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def reason_not_to_start(self) -> str | None:
        """In one line, a setting with which no run should start; None without one. No validator refuses it,
        because runs of earlier versions have it."""
        cluster, accumulation = self.cluster, self.training.accumulation
        if accumulation and accumulation > self.rows:
            return (
                f"training.accumulation: {accumulation} is more than the {self.rows} rows of a batch; "
                f"write {self.rows} or less"
            )
        may_share = cluster.gpu_share <= 0.5 and cluster.accelerator != "cpu" and cluster.placement != "STRICT_SPREAD"
        if may_share and cluster.max_workers > 1:
            return (
                f"cluster.resources_per_worker: with {cluster.gpu_share:g} of a GPU each, two of cluster.workers "
                f"{cluster.workers} would be on one GPU, where they cannot exchange gradients; "
                "write cluster.workers: 1, or leave GPU out"
            )
        return self.optimizer.without_effect(self.model)

    def indivisible(self, mesh: Mapping[str, int]) -> tuple[str, str, int] | None:
        """An axis of a mesh that does not divide the model, with the key and its value; None if all do."""
        model = self.model
        divided = (
            ("tensor", "heads", model.heads),
            ("tensor", "kv_heads", model.key_heads),
            ("tensor", "hidden", model.size_of_hidden),
            ("context", "context", model.context),
        )
        return next((one for one in divided if mesh[one[0]] > 0 and one[2] % mesh[one[0]]), None)

    def mesh_over(self, devices: int, remedy: str = "change cluster.workers") -> dict[str, int]:
        """Axis -> devices along it, of so many in all; an axis that is -1 takes what is left, if that divides the
        model. `remedy` is how their number is changed."""
        mesh = self.cluster.mesh.over(devices, remedy)
        if indivisible := self.indivisible(mesh):
            axis, key, whole = indivisible
            raise RaygptError(
                f"cluster.mesh.{axis}: {mesh[axis]} devices are left for it, which do not divide model.{key} {whole}; "
                f"write {gcd(mesh[axis], whole)}"
            )
        return mesh

    def worker_counts(self, accelerator: str) -> Sequence[int]:
        """The numbers in `cluster.workers`, ascending; of an elastic run whose workers are known to have a number of
        devices each, those with which the mesh can be made. Refuses a range that has none."""
        cluster, each = self.cluster, self._devices_of_worker(accelerator)
        if each is None or not cluster.is_elastic:
            return range(cluster.min_workers, cluster.max_workers + 1)
        counts = self._counts_that_fill_the_mesh(each)
        if not counts:
            raise RaygptError(
                f"cluster.workers: no number in {cluster.workers} fills cluster.mesh, {cluster.mesh}; "
                f"write {self._other_workers(each)}"
            )
        return counts

    def _devices_of_worker(self, accelerator: str) -> int | None:
        """None where its node decides: JAX takes every core of a CPU, and every chip of a TPU's host."""
        if self.engine == "torch":
            return 1
        return max(1, int(self.cluster.resources_per_worker.get("GPU", 1))) if accelerator == "gpu" else None

    def _counts_that_fill_the_mesh(self, each: int) -> Sequence[int]:
        mesh, most, step = self.cluster.mesh, self.cluster.max_workers, self._worker_step(each)
        first = -(-self.cluster.min_workers // step) * step
        if -1 in (mesh.data, mesh.fsdp):
            return range(first, most + 1, step)
        # `tensor` or `context`, which divides the model's heads or context, and is no larger than they are
        most = min(most, mesh.fixed * max(self.model.heads, self.model.context) // each)
        return [count for count in range(first, most + 1, step) if not self.indivisible(mesh.over(count * each))]

    def _worker_step(self, each: int) -> int:
        """Of so many workers the devices are a multiple of the mesh's fixed axes."""
        return self.cluster.mesh.fixed // gcd(self.cluster.mesh.fixed, each)

    def _other_workers(self, each: int) -> str:
        """What to write instead of a range of workers that has no number with which the mesh can be made."""
        cluster, step = self.cluster, self._worker_step(each)
        if axis := next((axis for axis in ("tensor", "context") if cluster.mesh.sizes()[axis] == -1), None):
            return f"cluster.mesh.data: -1 in place of {axis}: -1"
        nearest = cluster.min_workers // step * step or step
        return f"e.g. cluster.workers: {min(cluster.min_workers, nearest)}..{max(cluster.max_workers, nearest)}"

    @property
    def longest_warmup(self) -> int | None:
        """The most steps of warm-up that the length leaves; None if that is in epochs."""
        steps, schedule = self.training.steps, self.schedule
        falls = schedule.kind == "wsd"
        return steps - round(schedule.decay_share * steps) if steps is not None and falls else steps

    @property
    def rows(self) -> int:
        """Rows of a batch, over all workers."""
        return self.training.batch_tokens // self.model.context

    @property
    def steps(self) -> int:
        """Total optimizer steps; `recipes/lengths.py` computes them if the recipe has epochs."""
        if self.training.steps is None:
            raise RaygptError(
                f"training.epochs: {self.training.epochs} is no number of steps before its corpus is known"
            )
        return self.training.steps

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain YAML and JSON types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Every key with its value; `load_recipe` reads it back as an equal Recipe."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)  # ASCII: PyYAML reads U+0085 in a name as a newline


def keys_with(may: May, part: type[Part] = Recipe, prefix: str = "") -> tuple[str, ...]:
    """Dotted keys whose values may do so, as `str.startswith` takes them: `training.log_every`, or `cluster.` for all
    keys of a part."""
    found: list[str] = []
    for name, field in part.model_fields.items():
        inner = field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, Part) else None
        if may in field.metadata:
            found.append(f"{prefix}{name}{'.' if inner else ''}")
        elif inner:
            found += keys_with(may, inner, f"{prefix}{name}.")
    return tuple(found)
