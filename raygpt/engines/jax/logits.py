"""From hidden states to logits: the one place where that is done."""

from typing import Any

import jax
import jax.numpy as jnp

from raygpt.engines.jax.devices import accurate

Array = jax.Array


def scores(hidden: Array, table: Array, dtype: Any = None) -> Array:
    """Logits before their soft-cap: […, padded vocabulary] of hidden states […, width], in fp32 at least or in `dtype`;
    columns that only pad the vocabulary are in it still."""
    exact = accurate(hidden.dtype) if dtype is None else dtype
    return jnp.einsum("...d,vd->...v", hidden, table.astype(hidden.dtype), preferred_element_type=exact)


def capped(scores: Array, softcap: float | None) -> Array:
    """Logits that the soft-cap keeps between -softcap and softcap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def logits(hidden: Array, table: Array, softcap: float | None) -> Array:
    """[…, padded vocabulary] of hidden states […, width]."""
    return capped(scores(hidden, table), softcap)
