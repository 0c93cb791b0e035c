"""Where arrays lie: a mesh of `data`, `fsdp`, `tensor` and `context` axes, and the place of every array on it.

Rows of a batch are shared out over data × fsdp, time over context. Parameters are cut along fsdp (each device keeps a
share, XLA gathers a layer when it is computed) and along tensor (heads, the MLP's hidden layer, the vocabulary).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from raygpt import config
from raygpt.models import Description

AXES = ("data", "fsdp", "tensor", "context")
ROWS = ("data", "fsdp")
RESIDUAL = P(ROWS, "context", None)  # [rows, time, width]
BATCH = P(None, ROWS, "context")  # [accumulation, rows, time]


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a recipe over all devices; the axis that is -1 takes what the others leave."""
    devices = jax.devices() if devices is None else devices
    resolved = config.Mesh(**sizes).over(len(devices))
    return Mesh(_arranged(devices, tuple(resolved[axis] for axis in AXES)), AXES)


def _arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """In their own order; but a TPU's neighbours on a mesh axis are neighbours in its torus."""
    if devices[0].platform == "tpu":
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(shape)


def state_shardings(mesh: Mesh, description: Description, state: Any) -> Any:
    """A sharding for every array of a state: a parameter's own, also for what an optimizer keeps of it in its slots;
    every device has the rest."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        parameter = description.by_name.get(getattr(path[-1], "key", ""))
        return NamedSharding(mesh, _fitting(P(*parameter.mesh_axes) if parameter else P(), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, state)


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


def gather_tables(mesh: Mesh, description: Description, parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters with fsdp's shares of the token tables together, as lookup and head need them.

    Left to itself on fsdp × tensor, XLA looks the shares up and brings the whole batch's rows to every device instead.
    """

    def gather(table: jax.Array) -> jax.Array:
        place = NamedSharding(mesh, _fitting(P("tensor", None), table.shape, mesh))
        return jax.lax.with_sharding_constraint(table, place)

    tables = {p.name for p in description.parameters if "vocabulary" in p.axes}
    return {name: gather(array) if name in tables else array for name, array in parameters.items()}


def _fitting(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that do not divide their dimension: such an array is repeated there instead."""
    return P(
        *(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    )
