"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh.

Each process writes its shards by itself, in a folder of its own, and none waits for another: what one cannot write
holds up nobody. The folders' files together are a checkpoint, which is why arrays are files of their own (Zarr), and
not in one database (OCDBT), which a process would have to put together.
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
from raygpt.engines.base import Weights
from raygpt.engines.jax import format1
from raygpt.engines.jax.parameters import to_plain
from raygpt.engines.jax.sharding import from_this_host, shape_at
from raygpt.engines.jax.step import State
from raygpt.engines.loss_scale import LossScale
from raygpt.engines.spikes import Spikes
from raygpt.models import describe


class Saver:
    """Writes one state at a time: `save` begins to copy it to the host, `wait` writes the copy."""

    def __init__(self) -> None:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=_alone())
        self._orbax = ocp.Checkpointer(handler, multiprocessing_options=_alone())
        self._folder, self._copy = Path(), None
        self._cut: Any = None
        self.is_reserved = False

    def reserve(self, state: Any) -> None:
        """Begin to make the host's memory for what will be saved: for GPT-2 that is 1.5 GB, and takes 1.1 s if it is
        pinned. Done while the first step is compiled, no step waits for it."""
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
        """Begin to copy this process's shards. Nothing waits but, on the device, the step that would change them."""
        self._folder = Path(folder)
        parts = self._share_out(state)
        self._copy = jax.device_put(parts, jax.tree.map(_on_the_host, parts))

    def _share_out(self, state: Any) -> Any:
        """Of arrays that several devices hold each has a part to save: all of them everywhere would fill the hosts."""
        places = jax.tree.map(_shared_out, state)
        if all(place == array.sharding for place, array in zip(*map(jax.tree.leaves, (places, state)), strict=True)):
            return state
        if self._cut is None:
            self._cut = jax.jit(lambda state: state, out_shardings=places)
        return self._cut(state)

    def wait(self) -> None:
        """Write the copy; raises what went wrong."""
        copy, self._copy = self._copy, None
        self._orbax.save(self._folder, args=ocp.args.PyTreeSave(copy), force=True)
        if jax.process_index() > 0:  # what describes the whole is in every folder; the first process's is taken
            for path in self._folder.glob("*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    path.unlink()


def _alone() -> Any:
    """Of Orbax's options: this process waits for no other. Process-wide, so that everything here says the same."""
    rank = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={rank}, barrier_sync_key_prefix=f"process-{rank}"
    )


def _on_the_host(array: jax.Array) -> Any:
    return array.sharding.with_memory_kind("pinned_host")


def _shared_out(array: jax.Array) -> Any:
    """Where an array lies if the devices that hold the same of it each have a part; as it is if it cannot be cut."""
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
    """The state in a folder, each array laid out as its sharding says."""
    orbax = ocp.StandardCheckpointer(multiprocessing_options=_alone())
    if not format1.is_old(_metadata(folder)):
        return orbax.restore(folder, jax.tree.map(shape_at, shapes, shardings))
    saved = _read(folder)  # whole on every host, this once: the next checkpoint has today's format
    scale, spikes = LossScale(**saved["scale"]), Spikes(**saved["spikes"])
    state = State(**{**saved, "scale": scale, "spikes": spikes})
    return jax.tree.map(
        lambda array, like, place: from_this_host(array.astype(like.dtype), place), state, shapes, shardings
    )


def read_parameters(folder: str, model: Model, vocab: int) -> dict[str, Any]:
    """The parameters in a checkpoint; what the optimizer remembers is not read."""
    return to_plain(_read(folder, ("parameters",))["parameters"], describe(model, vocab))


def read_weights(folder: str, model: Model, vocab: int) -> Weights:
    """The state in a folder as arrays of this host, whatever mesh wrote it and whatever devices are here."""
    state, description = _read(folder), describe(model, vocab)
    slots = {name: to_plain(slot, description) for name, slot in state["slots"].items()}
    return Weights(to_plain(state["parameters"], description), slots, int(state["step"]))


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
