"""How arrays are sharded: a mesh of `data`, `fsdp`, `tensor` and `context` axes, and every array's sharding on it.

Rows of a batch are divided over data × fsdp, time over context. Parameters are sharded along fsdp (each device keeps a
shard, XLA gathers a layer when it is computed) and along tensor (heads, the MLP's hidden layer, the vocabulary).
"""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from raygpt import config
from raygpt.errors import RaygptError
from raygpt.models import Description

AXES = ("data", "fsdp", "tensor", "context")
ROWS = ("data", "fsdp")
RESIDUAL = P(ROWS, "context", None)  # [rows, time, width]
BATCH = P(None, ROWS, "context")  # [accumulation, rows, time]
# At most, when matrices are divided: with more, computing them twice costs less than sending zeros.
DEVICES_PER_MATRIX = 4


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a recipe over all devices; the axis that is -1 takes what the others leave."""
    devices = jax.devices() if devices is None else devices
    resolved = config.Mesh(**sizes).over(len(devices))
    return Mesh(_arranged(devices, tuple(resolved[axis] for axis in AXES)), AXES)


def _arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """In their own order; but a TPU's neighbours on a mesh axis are neighbours in its torus, and its slices, between
    which it is slow, are along the outermost axes: `data`, then `fsdp`."""
    if devices[0].platform != "tpu":
        return np.asarray(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if slices == 1:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data = gcd(shape[0], slices)
    fsdp = gcd(shape[1], slices // data)
    if data * fsdp != slices:
        raise RaygptError(
            f"cluster.mesh: data={shape[0]} × fsdp={shape[1]} does not divide among {slices} slices of TPUs; "
            f"write cluster.mesh.data: {slices}"
        )
    inner = shape[0] // data, shape[1] // fsdp, *shape[2:]
    return create_hybrid_device_mesh(inner, (data, fsdp, 1, 1), devices, allow_split_physical_axes=True)


def state_shardings(mesh: Mesh, description: Description, state: Any) -> Any:
    """A sharding for every array of a state: that of a parameter, also for its slots in the optimizer; the rest is
    replicated."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        parameter = description.by_name.get(getattr(path[-1], "key", ""))
        return NamedSharding(mesh, _fitting(P(*parameter.mesh_axes) if parameter else P(), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, state)


def from_this_host(array: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array that every process has on the devices: each keeps its shard."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def on_this_host(array: jax.Array) -> NDArray[Any]:
    """A full array in host memory; every process takes part if it is sharded over processes."""
    return np.asarray(array if array.is_fully_addressable else process_allgather(array, tiled=True))


def shape_at(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """An abstract array: only its shape and sharding."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def constrain_residual(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Constrain the sharding of the residual stream [rows, time, width]."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, RESIDUAL))


def spreading(mesh: Mesh, cut: tuple[Any, Any], shape: tuple[int, int, int]) -> tuple[list[P], int]:
    """Shardings of [matrices, rows, columns], from rows and columns that are cut along two axes of the mesh to whole
    matrices, each on one device; and over how many devices, of whose number there must be a multiple.

    Along an axis that cuts nothing devices have the same matrices. These are divided there too, unless each device has
    at most one already, or there are so few that most of what is sent would be padding. The first step is a slice, the
    others are all-to-alls along one axis each: in one step, XLA would send all matrices to every device.
    """
    _, rows, columns = _fitting(P(None, *cut), shape, mesh)
    devices = prod(mesh.shape[axis] for axis in (rows, columns) if axis)
    copies: tuple[str, ...] = ()
    for axis in reversed(AXES):
        more = devices * mesh.shape[axis]
        if axis not in (rows, columns) and devices < shape[0] and more <= DEVICES_PER_MATRIX * shape[0]:
            copies, devices = (axis, *copies), more
    by_rows = (*copies, rows) if rows else copies
    steps = [
        P(None, rows, columns),
        P(copies, rows, columns),
        P(by_rows, None, columns),
        P((*by_rows, columns) if columns else by_rows, None, None),
    ]
    return steps, devices


def constrain_in_turn(mesh: Mesh, specs: Sequence[P], array: jax.Array) -> jax.Array:
    """An array with one sharding after the other."""
    for spec in specs:
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    return array


def gather_tables(mesh: Mesh, description: Description, parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters with the token tables gathered over fsdp, as lookup and head need them.

    By default on fsdp × tensor, XLA looks up the shards and sends the whole batch's rows to every device instead.
    """
    is_fsdp_alone = mesh.shape["fsdp"] == mesh.size

    def gather(table: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        whole, shard = (NamedSharding(mesh, _fitting(P(*spec), table.shape, mesh)) for spec in (("tensor", None), axes))
        # The constraint holds for the gradient, too: all of it is summed on every device. Along fsdp alone each gets
        # only its columns; with other axes XLA would gather the whole batch's rows for that.
        of_gradient = shard if is_fsdp_alone else whole
        gathered = jax.custom_vjp(lambda table: jax.lax.with_sharding_constraint(table, whole))
        gathered.defvjp(
            lambda table: (jax.lax.with_sharding_constraint(table, whole), None),
            lambda _, gradient: (jax.lax.with_sharding_constraint(gradient, of_gradient),),
        )
        return gathered(table)

    tables = {p.name: p.mesh_axes for p in description.parameters if "vocabulary" in p.axes}
    return {name: gather(array, tables[name]) if name in tables else array for name, array in parameters.items()}


def _fitting(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that do not divide their dimension: the array is replicated along those."""
    return P(
        *(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    )
