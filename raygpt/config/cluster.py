"""`cluster`: where a recipe runs, and how its devices are arranged."""

import re
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from raygpt.config.parts import Integer, Number, Part, shown
from raygpt.errors import RaygptError


class Mesh(Part):
    """How devices are arranged. One axis may be -1, the remaining devices; by default that is `data`."""

    data: Integer = Field(-1, description="Copies of the model; each computes a part of the batch.")
    fsdp: Integer = Field(1, description="Devices that one copy's parameters, and its rows, are sharded over.")
    tensor: Integer = Field(1, description="Devices that each matrix is split over; must divide model.heads.")
    context: Integer = Field(
        1, description="Devices that each row is split over; must divide model.context. Engine jax only."
    )

    @model_validator(mode="before")
    @classmethod
    def _only_one_takes_what_is_left(cls, value: object) -> object:
        if isinstance(value, Mapping) and "data" not in value and "-1" in map(str, value.values()):
            return {"data": 1, **value}
        return value

    @field_validator("data", "fsdp", "tensor", "context")
    @classmethod
    def _size(cls, size: int, info: ValidationInfo) -> int:
        if size < 1 and size != -1:
            raise ValueError(
                f"cluster.mesh.{info.field_name}: {size} is no number of devices; write 1 or more, "
                "or -1 for what is left"
            )
        return size

    @model_validator(mode="after")
    def _at_most_one_open_axis(self) -> Self:
        open_axes = [axis for axis, size in self.sizes().items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"cluster.mesh: {', '.join(open_axes)} are -1, and only one axis can be; "
                f"write e.g. cluster.mesh.{open_axes[0]}: 1"
            )
        return self

    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, in the order data, fsdp, tensor, context."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor, "context": self.context}

    @property
    def is_data_alone(self) -> bool:
        """Whether every device has a full copy of the model."""
        return self.fsdp == self.tensor == self.context == 1

    @property
    def fixed(self) -> int:
        """Devices along the axes whose sizes are given."""
        return prod(size for size in self.sizes().values() if size > 0)

    def __str__(self) -> str:
        """data=-1 × fsdp=2."""
        return " × ".join(f"{axis}={size}" for axis, size in self.sizes().items() if size != 1) or "data=1"

    def over(self, devices: int, remedy: str = "change cluster.workers") -> dict[str, int]:
        """The sizes for a number of devices: the axis that is -1 takes what the others leave. `remedy` is how their
        number is changed."""
        sizes = {axis: devices // self.fixed if size == -1 else size for axis, size in self.sizes().items()}
        if prod(sizes.values()) != devices:
            change = "change one" if -1 in self.sizes().values() else "write -1 for the axis that takes what is left"
            raise RaygptError(
                f"cluster.mesh: {self} does not multiply to the {devices} devices there are; {change}, or {remedy}"
            )
        return sizes


def _count_or_range(workers: object) -> object:
    """'4' -> 4, and '1..4' stays."""
    text = str(workers)
    ends = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text)
    if not ends:
        raise ValueError(
            f"cluster.workers: {shown(workers)} is neither a whole number nor min..max; "
            "write e.g. cluster.workers: 1..4"
        )
    low, high = int(ends[1]), int(ends[2] or ends[1])
    if low < 1:
        raise ValueError(f"cluster.workers: {text!r} asks for none; write e.g. cluster.workers: 1")
    if low > high:
        raise ValueError(f"cluster.workers: {text!r} has min above max; write cluster.workers: {high}..{low}")
    return f"{low}..{high}" if ends[2] else low


class Cluster(Part):
    """Where it runs."""

    workers: Annotated[int | str, BeforeValidator(_count_or_range), "int or min..max"] = Field(
        1, description="Ray Train processes; min..max is elastic. The batches are the same for any number."
    )
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        "auto", description="What a worker computes on; auto takes a TPU or GPU if the cluster has one."
    )
    accelerator_type: str | None = Field(
        None, description="The model by Ray's name, e.g. H100 or TPU-V6E; null takes any. A TPU slice needs it."
    )
    topology: str | None = Field(None, description="Chips of a TPU slice along each axis, e.g. 4x4.")
    resources_per_worker: dict[str, Annotated[Number, Field(ge=0)]] = Field(
        {}, description="Resources by Ray's names; unless given, 1 CPU, and 1 GPU or the chips of a TPU's host."
    )
    placement: Literal["auto", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "auto", description="Ray's strategy for where workers go; auto spreads TPU hosts and packs the rest."
    )
    runtime_env: dict[str, Any] = Field(  # not written to the run: it may contain secrets
        {}, exclude=True, description="Ray's runtime environment for the workers, e.g. {env_vars: {NAME: value}}."
    )
    max_faults: Integer = Field(
        100, ge=0, description="How often lost workers are restarted; a node that was announced to go does not count."
    )
    mesh: Mesh = Field(Mesh(), description="How the devices of all workers are arranged.")

    @model_validator(mode="after")
    def _topology_is_a_tpus(self) -> Self:
        if self.topology and self.accelerator not in ("auto", "tpu"):
            raise ValueError(
                f"cluster.topology: {shown(self.topology)} is a TPU slice's, but cluster.accelerator is "
                f"{self.accelerator}; write cluster.accelerator: tpu, or leave cluster.topology out"
            )
        if self.topology and not self.accelerator_type:
            raise ValueError(
                f"cluster.accelerator_type: is missing for the slice {shown(self.topology)}; "
                "write e.g. cluster.accelerator_type: TPU-V6E"
            )
        return self

    @model_validator(mode="after")
    def _elastic_mesh_has_an_open_axis(self) -> Self:
        if self.is_elastic and -1 not in self.mesh.sizes().values():
            raise ValueError(
                f"cluster.mesh: every axis is fixed, but cluster.workers is {self.workers}; "
                "write cluster.mesh.data: -1, or one number of workers"
            )
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers < self.max_workers

    @property
    def gpu_share(self) -> float:
        """The part of a GPU that a worker has: less than 1 where `resources_per_worker` has a fraction."""
        return min(1.0, self.resources_per_worker.get("GPU") or 1.0)

    @property
    def min_workers(self) -> int:
        """The fewest workers that the run may have; equal to max_workers unless it is elastic."""
        return int(str(self.workers).split("..")[0])

    @property
    def max_workers(self) -> int:
        """The most workers that the run may have."""
        return int(str(self.workers).split("..")[-1])
