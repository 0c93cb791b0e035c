"""Saving and restoring the JAX engine's state with Orbax: sharded, in the background, onto any mesh."""

from typing import Any

import jax
import orbax.checkpoint as ocp


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
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return ocp.StandardCheckpointer().restore(folder, target)
