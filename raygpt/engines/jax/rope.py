"""RoPE: queries and keys are rotated by angles that grow with their positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raygpt.config import Model
from raygpt.engines.jax.devices import accurate

Array = jax.Array
Rotation = tuple[Array, Array]  # cosines and sines [time, 1, head / 2], or with rows before time


def rotation(model: Model, positions: Array, dtype: Any) -> Rotation | None:
    """RoPE's cosines and sines at positions [time] or [rows, time]; None for a model with a table of positions.

    Pair n of a head turns by base^(-2n / head) a token; with `rope_share` only the first, fastest pairs turn.
    """
    if model.position != "rope":
        return None
    head = model.size_of_head
    pairs = np.arange(head // 2)
    turns = np.where(pairs < int(model.rope_share * head // 2), model.rope_base ** (-2.0 * pairs / head), 0.0)
    exact = accurate(dtype)
    angles = positions[..., None, None].astype(exact) * turns.astype(exact)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotation: Rotation) -> Array:
    """x [rows, time, heads, head], in which number n of a head and number n + head / 2 are a pair."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
