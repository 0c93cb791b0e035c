"""One parameter of a model: its name, its named axes, what it is for, and how its initial values are drawn."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["embedding", "matrix", "head", "head_gate", "gain", "bias"]

# Along which axis of a mesh each axis of a parameter is sharded. Along `tensor` these are whole heads, hidden units
# and tokens; fsdp takes the residual stream's axis of everything larger than a vector.
MESH_AXES = {"heads": "tensor", "kv_heads": "tensor", "hidden": "tensor", "vocabulary": "tensor", "width": "fsdp"}


@dataclass(frozen=True)
class InitialValues:
    """Values before the first step: a constant, or draws around zero."""

    kind: Literal["constant", "uniform", "normal"]
    size: float  # the constant; the largest value of a uniform draw; the standard deviation of a normal one


@dataclass(frozen=True)
class Parameter:
    """`blocks.query.kernel` stands for one array of each layer; its first axis is `layer`."""

    name: str
    axes: tuple[str, ...]  # layer, width, heads, kv_heads, head_size, hidden, vocabulary, context, …
    role: Role
    initial: InitialValues
    fan_in: tuple[str, ...] = ()  # the axes that a product sums over

    @property
    def is_stacked(self) -> bool:
        """Whether there is one in every layer."""
        return self.axes[0] == "layer"

    @property
    def own_axes(self) -> tuple[str, ...]:
        """Those of one layer's array."""
        return self.axes[1:] if self.is_stacked else self.axes

    @property
    def is_kernel(self) -> bool:
        """Of a linear layer in a block: [layer, *in, *out]."""
        return self.role in ("matrix", "head_gate")

    @property
    def is_vector(self) -> bool:
        """A gain or a bias: it is added or multiplied element by element."""
        return self.role in ("gain", "bias")

    @property
    def mesh_axes(self) -> tuple[str | None, ...]:
        """The axis of a mesh along which each axis is sharded; vectors of the residual stream are replicated."""
        cut = (MESH_AXES.get(axis) for axis in self.axes)
        return tuple(None if self.is_vector and axis == "fsdp" else axis for axis in cut)
