"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh.

Each process writes its shards by itself, in a folder of its own, and none waits for another: what one cannot write
holds up nobody. The folders' files together are a checkpoint, which is why arrays are files of their own (Zarr), and
not in one database (OCDBT), which a process would have to put together.
"""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from raygpt.config import Model
from raygpt.engines.base import Weights
from raygpt.engines.jax.names import to_hugging_face, to_weights
from raygpt.engines.jax.sharding import shape_at


class Saver:
    """Writes one state at a time: `save` begins to copy it to the host, `wait` writes the copy."""

    def __init__(self) -> None:
        rank = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={rank}, barrier_sync_key_prefix=f"process-{rank}"
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
        self._orbax = ocp.Checkpointer(handler, multiprocessing_options=alone)
        self._folder, self._copy = Path(), None
        self.is_reserved = False

    def reserve(self, state: Any) -> None:
        """Begin to make the host's memory for what will be saved: for GPT-2 that is 1.5 GB, and takes 1.1 s if it is
        pinned. Done while the first step is compiled, no step waits for it."""
        self.is_reserved = True
        shards = [shard.data for array in jax.tree.leaves(state) for shard in array.addressable_shards]
        places = [(shard.shape, shard.dtype, _on_the_host(shard)) for shard in shards]

        def make() -> None:
            jax.block_until_ready([jax.device_put(np.zeros(shape, dtype), place) for shape, dtype, place in places])

        threading.Thread(target=make, daemon=True).start()

    def save(self, state: Any, folder: str) -> None:
        """Begin to copy this process's shards. Nothing waits but, on the device, the step that would change them."""
        self._folder = Path(folder)
        self._copy = jax.device_put(state, jax.tree.map(_on_the_host, state))

    def wait(self) -> None:
        """Write the copy; raises what went wrong."""
        copy, self._copy = self._copy, None
        self._orbax.save(self._folder, args=ocp.args.PyTreeSave(copy), force=True)
        if jax.process_index() > 0:  # what describes the whole is in every folder; the first process's is taken
            for path in self._folder.glob("*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    path.unlink()


def _on_the_host(array: jax.Array) -> Any:
    return array.sharding.with_memory_kind("pinned_host")


def restore(folder: str, shapes: Any, shardings: Any) -> Any:
    """The state in a folder, each array laid out as its sharding says."""
    return ocp.StandardCheckpointer().restore(folder, jax.tree.map(shape_at, shapes, shardings))


def read_parameters(folder: str, model: Model, vocab: int) -> dict[str, Any]:
    """The parameters in a checkpoint under Hugging Face's names; AdamW's averages are not read."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        saved = orbax.metadata(folder).item_metadata.tree["parameters"]
        as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        wanted = ocp.args.PyTreeRestore(
            {"parameters": saved}, restore_args={"parameters": as_arrays}, partial_restore=True
        )
        return to_hugging_face(orbax.restore(folder, wanted)["parameters"], model, vocab)


def read_weights(folder: str, model: Model, vocab: int) -> Weights:
    """The state in a folder as arrays of this host, whatever mesh wrote it and whatever devices are here."""
    orbax = ocp.PyTreeCheckpointer()
    saved = orbax.metadata(folder).item_metadata.tree
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    state = orbax.restore(folder, restore_args=as_arrays)
    means, squares = (optax.tree.get(state["optimizer"], name) for name in ("mu", "nu"))
    return to_weights(state["parameters"], means, squares, state["step"], model, vocab)
