"""Where arrays lie: a mesh of `data`, `fsdp`, `tensor` and `context` axes, and the place of every array on it.

Rows of a batch are shared out over data × fsdp, time over context. Parameters are cut along fsdp (each device keeps a
share, XLA gathers a layer when it is computed) and along tensor (heads, the MLP's hidden layer, the vocabulary).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from raygpt.errors import RaygptError

AXES = ("data", "fsdp", "tensor", "context")
ROWS = ("data", "fsdp")
RESIDUAL = P(ROWS, "context", None)  # [rows, time, width]
BATCH = P(None, ROWS, "context")  # [accumulation, rows, time]

PARAMETERS = {  # stacked ones begin with the axis of layers
    "tokens.embedding": P("tensor", "fsdp"),
    "head.embedding": P("tensor", "fsdp"),
    "positions.embedding": P(None, "fsdp"),
    "blocks.qkv.kernel": P(None, "fsdp", None, "tensor", None),
    "blocks.qkv.bias": P(None, None, "tensor", None),
    "blocks.out.kernel": P(None, "tensor", None, "fsdp"),
    "blocks.up.kernel": P(None, "fsdp", "tensor"),
    "blocks.up.bias": P(None, "tensor"),
    "blocks.down.kernel": P(None, "tensor", "fsdp"),
}  # what is not here is a vector of the model's width: every device has it


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a recipe over all devices; the axis that is -1 takes what the others leave."""
    devices = jax.devices() if devices is None else devices
    fixed = int(np.prod([size for size in sizes.values() if size > 0]))
    resolved = {axis: len(devices) // fixed if size == -1 else size for axis, size in sizes.items()}
    if int(np.prod(list(resolved.values()))) != len(devices):
        wanted = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
        raise RaygptError(
            f"cluster.mesh: {wanted} does not multiply to the {len(devices)} devices there are; "
            "write -1 for the axis that takes what is left, or change cluster.workers"
        )
    return Mesh(_arranged(devices, tuple(resolved[axis] for axis in AXES)), AXES)


def _arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """In their own order; but a TPU's neighbours on a mesh axis are neighbours in its torus."""
    if devices[0].platform == "tpu":
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(shape)


def parameter_shardings(mesh: Mesh, parameters: Any) -> Any:
    """A sharding for every parameter of a tree, or of an optimizer's tree that repeats it."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = ".".join(str(getattr(part, "key", getattr(part, "name", ""))) for part in path)
        spec = next((spec for known, spec in PARAMETERS.items() if f".{known}." in f".{name}."), P())
        return NamedSharding(mesh, _fitting(spec, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, parameters)


def from_this_host(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, put on the devices: each keeps its share."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def on_this_host(array: jax.Array) -> NDArray[Any]:
    """The whole of an array; every process takes part where others have shares of it."""
    return np.asarray(array if array.is_fully_addressable else process_allgather(array, tiled=True))


def shape_at(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """An array that is not there, only its shape and place."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def constrain_residual(mesh: Mesh, x: jax.Array) -> jax.Array:
    """The residual stream [rows, time, width] where it belongs."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, RESIDUAL))


def gather_tables(mesh: Mesh, parameters: Any) -> Any:
    """Parameters with fsdp's shares of the token tables together, as lookup and head need them.

    Left to itself on fsdp × tensor, XLA looks the shares up and brings the whole batch's rows to every device instead.
    """

    def gather(table: Any) -> Any:
        place = NamedSharding(mesh, _fitting(P("tensor", None), table["embedding"].shape, mesh))
        return {"embedding": jax.lax.with_sharding_constraint(table["embedding"], place)}

    return {**parameters, **{name: gather(parameters[name]) for name in ("tokens", "head") if name in parameters}}


def _fitting(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that do not divide their dimension: such an array is repeated there instead."""
    return P(
        *(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    )
