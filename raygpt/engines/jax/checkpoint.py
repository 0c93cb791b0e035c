"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh."""

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
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(self, state: Any, folder: str) -> None:
        """Begin to write a state. Orbax renames the folder into place when all processes have written."""
        self._orbax.save(folder, args=ocp.args.StandardSave(state), force=True)

    def wait(self) -> None:
        """Until what was begun is written; raises what went wrong."""
        self._orbax.wait_until_finished()


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
