"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh.

Each process writes its shards by itself, in a folder of its own, and none waits for another: what one cannot write
holds up nobody. The folders' files together are a checkpoint, which is why arrays are files of their own (Zarr), and
not in one database (OCDBT), which a process would have to put together.
"""

import contextlib
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
    """Writes one state at a time; `save` returns as soon as the arrays are copied off the devices."""

    def __init__(self) -> None:
        rank = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={rank}, barrier_sync_key_prefix=f"process-{rank}"
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
        # Made in the background, folders are announced under names that all processes share, and one could take away
        # what another still waits for.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone, async_options=options)
        self._folder = Path()

    def save(self, state: Any, folder: str) -> None:
        """Begin to write this process's shards of a state."""
        self._folder = Path(folder)
        self._orbax.save(self._folder, args=ocp.args.PyTreeSave(state), force=True)

    def wait(self) -> None:
        """Until what was begun is written; raises what went wrong."""
        self._orbax.wait_until_finished()
        if jax.process_index() > 0:  # what describes the whole is in every folder; the first process's is taken
            for path in self._folder.glob("*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    path.unlink()


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
