"""Causal attention by what the hardware has: cuDNN on NVIDIA, XLA elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array
Attention = Callable[[Array, Array, Array], Array]  # query, key, value [rows, time, heads, head_dim] to the same shape
KEPT = "attention"  # the name of what a fused kernel's backward pass needs, for jax.checkpoint


def xla(query: Array, key: Array, value: Array) -> Array:
    """As the formula has it, scores and softmax in fp32 at least; XLA fuses what it can."""
    time = query.shape[1]
    return _attend(query, key, value, jnp.tril(jnp.ones((time, time), dtype=bool)))


def _attend(query: Array, key: Array, value: Array, visible: Array) -> Array:
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key, preferred_element_type=accurate) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights.astype(value.dtype), value)


def cudnn(query: Array, key: Array, value: Array) -> Array:
    """NVIDIA's fused attention: never stores the scores. bf16 or fp16 only."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


class Cache(NamedTuple):
    """Keys and values of the tokens so far: [layers, rows, context, heads, head_dim], or without layers inside one."""

    keys: Array
    values: Array

    def updated(self, keys: Array, values: Array, start: Array) -> "Cache":
        """With those of the tokens from `start` on."""
        place = (0, start, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.keys, keys, place),
            jax.lax.dynamic_update_slice(self.values, values, place),
        )


def cached(query: Array, keys: Array, values: Array, start: Array) -> Array:
    """Attention of new queries, the first of them at position `start`, to cached keys and values up to their own."""
    own = start + jnp.arange(query.shape[1])[:, None]  # [time, 1]
    return _attend(query, keys, values, jnp.arange(keys.shape[1]) <= own)


def choose_attention(platform: str, dtype: Any, mesh: Mesh) -> tuple[Attention, str]:
    """The kernel for a device, and its name. A row that is shared out over the context axis needs XLA's."""
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and mesh.shape["context"] == 1:
        return cudnn, "cuDNN"
    return xla, "XLA"
