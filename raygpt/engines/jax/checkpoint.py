"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh.

Each process writes its shards into its own folder, and none waits for another, even if one cannot write. The files of
all folders together are a checkpoint, so arrays are separate files (Zarr) and not one database (OCDBT), which a process
would have to merge.
"""

import contextlib
import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from raygpt.config import Model
from raygpt.engines.base import PlainState
from raygpt.engines.jax import format1
from raygpt.engines.jax.parameters import to_plain
from raygpt.engines.jax.sharding import from_this_host, shape_at
from raygpt.engines.jax.step import State
from raygpt.engines.loss_scale import LossScale
from raygpt.engines.spikes import Spikes
from raygpt.models import describe


class Saver:
    """Writes one state at a time: `save` starts to copy it to the host, `wait` writes the copy."""

    def __init__(self) -> None:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=_alone())
        self._orbax = ocp.Checkpointer(handler, multiprocessing_options=_alone())
        self._folder, self._copy = Path(), None
        self._cut: Any = None
        self.is_reserved = False

    def reserve(self, state: Any) -> None:
        """Start to allocate host memory for saves: for GPT-2 1.5 GB, which takes 1.1 s if pinned. It happens while the
        first step is compiled, so no step waits for it."""
        self.is_reserved = True
        parts = [(_shared_out(array).shard_shape(array.shape), array) for array in jax.tree.leaves(state)]
        shards = [
            (shape, array.dtype, _on_the_host(shard.data))
            for shape, array in parts
            for shard in array.addressable_shards
        ]

        def make() -> None:
            jax.block_until_ready([jax.device_put(np.zeros(shape, dtype), place) for shape, dtype, place in shards])

        threading.Thread(target=make, daemon=True).start()

    def save(self, state: Any, folder: str) -> None:
        """Start to copy this process's shards. Only the next step waits, on the device, since it changes them."""
        self._folder = Path(folder)
        parts = self._share_out(state)
        self._copy = jax.device_put(parts, jax.tree.map(_on_the_host, parts))

    def _share_out(self, state: Any) -> Any:
        """Divide the saving of replicated arrays among their devices: otherwise every host would save all of them."""
        places = jax.tree.map(_shared_out, state)
        if all(place == array.sharding for place, array in zip(*map(jax.tree.leaves, (places, state)), strict=True)):
            return state
        if self._cut is None:
            self._cut = jax.jit(lambda state: state, out_shardings=places)
        return self._cut(state)

    def wait(self) -> None:
        """Write the copy; raises its error."""
        copy, self._copy = self._copy, None
        self._orbax.save(self._folder, args=ocp.args.PyTreeSave(copy), force=True)
        if jax.process_index() > 0:  # the metadata is in every folder; the first process's is used
            for path in self._folder.glob("*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    path.unlink()


def _alone() -> Any:
    """Orbax's options by which this process waits for no other. Process-wide, so that all uses here are consistent."""
    rank = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={rank}, barrier_sync_key_prefix=f"process-{rank}"
    )


def _on_the_host(array: jax.Array) -> Any:
    return array.sharding.with_memory_kind("pinned_host")


def _shared_out(array: jax.Array) -> Any:
    """A sharding in which devices with the same data each have a part of it; unchanged if it cannot be divided."""
    place = array.sharding
    if not isinstance(place, NamedSharding):
        return place
    sides = [*place.spec, *[None] * (array.ndim - len(place.spec))]
    taken = {axis for side in sides for axis in _axes(side)}
    free = tuple(axis for axis, size in place.mesh.shape.items() if axis not in taken and size > 1)
    for number, side in enumerate(sides):
        axes = (*_axes(side), *free)
        if free and array.shape[number] % prod(place.mesh.shape[axis] for axis in axes) == 0:
            return NamedSharding(place.mesh, P(*sides[:number], axes, *sides[number + 1 :]))
    return place


def _axes(side: Any) -> tuple[str, ...]:
    return side if isinstance(side, tuple) else () if side is None else (side,)


def restore(folder: str, shapes: Any, shardings: Any) -> Any:
    """The state in a folder, each array with its sharding; slots that it does not have are zero."""
    orbax, saved = ocp.StandardCheckpointer(multiprocessing_options=_alone()), _metadata(folder)
    if not format1.is_old(saved) and _names(saved["slots"]) == _names(shapes.slots):
        return orbax.restore(folder, jax.tree.map(shape_at, shapes, shardings))
    # In full on every host, only once: the next checkpoint has today's format and this optimizer's slots.
    saved = _read(folder)
    scale, spikes = LossScale(**saved["scale"]), Spikes(**saved["spikes"])
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes.slots)
    slots = {
        slot: {name: saved["slots"].get(slot, {}).get(name, zero) for name, zero in named.items()}
        for slot, named in zeros.items()
    }
    state = State(**{**saved, "slots": slots, "scale": scale, "spikes": spikes})
    return jax.tree.map(
        lambda array, like, place: from_this_host(array.astype(like.dtype), place), state, shapes, shardings
    )


def _names(slots: Any) -> dict[str, set[str]]:
    """The parameters that each slot has."""
    return {slot: set(arrays) for slot, arrays in slots.items()}


def read_parameters(folder: str, model: Model, vocab: int) -> dict[str, Any]:
    """The parameters in a checkpoint; the optimizer's state is not read."""
    return to_plain(_read(folder, ("parameters",))["parameters"], describe(model, vocab))


def read_plain_state(folder: str, model: Model, vocab: int) -> PlainState:
    """The state in a folder as arrays in host memory, independent of the mesh that wrote it and of the devices here."""
    state, description = _read(folder), describe(model, vocab)
    slots = {name: to_plain(slot, description) for name, slot in state["slots"].items()}
    return PlainState(to_plain(state["parameters"], description), slots, int(state["step"]))


def _metadata(folder: str) -> dict[str, Any]:
    """The tree of what was saved."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        tree: dict[str, Any] = orbax.metadata(folder).item_metadata.tree
        return tree


def _read(folder: str, parts: Sequence[str] = ()) -> dict[str, Any]:
    """A state, or some parts of it, as a tree of NumPy arrays in today's format."""
    saved = _metadata(folder)
    wanted = {name: tree for name, tree in saved.items() if not parts or name in parts}
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        options = ocp.args.PyTreeRestore(wanted, restore_args=as_arrays, partial_restore=True)
        state: dict[str, Any] = orbax.restore(folder, options)
    return format1.converted(state) if format1.is_old(saved) else state
