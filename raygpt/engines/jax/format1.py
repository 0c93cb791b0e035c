"""Checkpoints of format 1: nested parameters, queries, keys and values in one array, an Optax chain's state."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {  # where ours is another
    "tokens.embedding": "tokens",
    "positions.embedding": "positions",
    "head.embedding": "head",
    "norm.scale": "norm.gain",
    "blocks.norm1.scale": "blocks.norm1.gain",
    "blocks.norm2.scale": "blocks.norm2.gain",
}


def is_old(saved: Any) -> bool:
    """Whether a checkpoint's tree is of this format."""
    return "optimizer" in saved


def converted(saved: Any) -> dict[str, Any]:
    """Its tree of arrays, whole or without all but the parameters, as `State` is saved now."""
    tree: dict[str, Any] = {"parameters": parameters(saved["parameters"])}
    if len(saved) == 1:
        return tree
    adam, spikes = saved["optimizer"][1], saved["spikes"]
    usual = {f"{of}_{key}": spikes[of][key] for of in ("loss", "norm") for key in ("mean", "variance")}
    found = {"usual_steps": spikes["steps"], "spikes": spikes["found"]}
    return tree | {
        "slots": {"means": parameters(adam["mu"]), "squares": parameters(adam["nu"])},
        "updates": adam["count"],
        "step": saved["step"],
        "scale": saved["scale"],
        "spikes": {name: np.asarray(value, np.float32) for name, value in (usual | found).items()},
    }


def parameters(nested: Any) -> dict[str, NDArray[Any]]:
    """A nested tree by our names."""
    flat = {f"{name}.{key}": array for name, part in nested.items() if name != "blocks" for key, array in part.items()}
    flat |= {f"blocks.{name}.{key}": array for name, part in nested["blocks"].items() for key, array in part.items()}
    named = {NAMES.get(name, name): np.asarray(array) for name, array in flat.items() if "qkv" not in name}
    for kind, axis in (("kernel", 2), ("bias", 1)):  # [layer, width, 3, heads, head] and [layer, 3, heads, head]
        if f"blocks.qkv.{kind}" in flat:
            parts = np.moveaxis(np.asarray(flat[f"blocks.qkv.{kind}"]), axis, 0)
            named |= {
                f"blocks.{name}.{kind}": part for name, part in zip(("query", "key", "value"), parts, strict=True)
            }
    return named
