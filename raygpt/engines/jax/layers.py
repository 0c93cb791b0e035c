"""The layers of a model in plain JAX. Each finds its parameters by name in a mapping; what it computes has x's dtype.

Parameters are fp32 and rounded where they are used; norms, softmax and loss are computed in fp32 at least.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from raygpt.config import Model
from raygpt.engines.jax.attention import Attention
from raygpt.engines.jax.logits import accurate

Array = jax.Array
Parameters = Mapping[str, Array]


def recompute_elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """Element-wise work of which only the input is kept for the backward pass, not every number on the way.

    A scanned block would keep six arrays for GELU and three in fp32 for a norm. Unrolled, XLA sees that both passes
    compute the same and is free to keep or to compute again.
    """
    return jax.checkpoint(function, prevent_cse=False)


def norm(parameters: Parameters, name: str, x: Array, model: Model) -> Array:
    """LayerNorm over the last axis, with a bias or without."""

    @recompute_elementwise
    def compute(x: Array, gain: Array, bias: Array | None) -> Array:
        exact = x.astype(accurate(x.dtype))
        centred = exact - exact.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        normed = centred * (jax.lax.rsqrt(variance + model.norm_epsilon) * gain)
        return (normed if bias is None else normed + bias).astype(x.dtype)

    return compute(x, parameters[f"{name}.gain"], parameters.get(f"{name}.bias"))


def linear(parameters: Parameters, name: str, x: Array, axes: int = 1) -> Array:
    """x [rows, time, *in] by a kernel [*in, *out], of which `axes` are summed over; and a bias [*out]."""
    return _product(x, parameters[f"{name}.kernel"], parameters.get(f"{name}.bias"), axes)


def _product(x: Array, kernel: Array, bias: Array | None, axes: int = 1) -> Array:
    y = jnp.tensordot(x, kernel.astype(x.dtype), axes)
    return y if bias is None else y + bias.astype(x.dtype)


def project(parameters: Parameters, x: Array) -> tuple[Array, Array, Array]:
    """Queries [rows, time, heads, head], keys and values [rows, time, kv_heads, head] of x [rows, time, width].

    One product for those of one shape: their kernels are stacked along a new axis, which no mesh cuts.
    """

    def together(*names: str) -> tuple[Array, ...]:
        biases = [parameters[f"{name}.bias"] for name in names if f"{name}.bias" in parameters]
        kernel = jnp.stack([parameters[f"{name}.kernel"] for name in names], axis=1)  # [width, names, heads, head]
        return tuple(jnp.moveaxis(_product(x, kernel, jnp.stack(biases) if biases else None), 2, 0))

    if parameters["query.kernel"].shape == parameters["key.kernel"].shape:
        query, key, value = together("query", "key", "value")
    else:
        query, (key, value) = linear(parameters, "query", x), together("key", "value")
    return query, key, value


def mlp(parameters: Parameters, x: Array) -> Array:
    """To the hidden layer, GPT-2's GELU by tanh, and back."""
    hidden = recompute_elementwise(jax.nn.gelu)(linear(parameters, "up", x))  # [rows, time, hidden]
    return linear(parameters, "down", hidden)


def dropout(x: Array, keys: Array | None, site: Array | int, rate: float) -> Array:
    """Zero a share of x [rows, time, width] and scale the rest; each row has its own key, so any mesh and any
    accumulation drop the same."""
    if keys is None or not rate:
        return x
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, site)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0)


def block(
    parameters: Parameters,
    x: Array,
    attention: Attention,
    model: Model,
    keys: Array | None = None,
    layer: Array | int = 0,
) -> Array:
    """x + attention(norm(x)), then x + mlp(norm(x)). `keys` [rows] turn dropout on."""
    mixed = linear(parameters, "out", attention(*project(parameters, norm(parameters, "norm1", x, model))), axes=2)
    x = x + dropout(mixed, keys, 2 * layer + 1, model.dropout)
    update = mlp(parameters, norm(parameters, "norm2", x, model))
    return x + dropout(update, keys, 2 * layer + 2, model.dropout)


def embed(parameters: Parameters, ids: Array, start: Array | int, dtype: Any) -> Array:
    """The residual stream [rows, time, width] of ids that follow `start` earlier ones, of all rows or of each."""
    positions = jnp.asarray(start)[..., None] + jnp.arange(ids.shape[1])  # [time] or [rows, time]
    tokens, places = (parameters[name].astype(dtype) for name in ("tokens", "positions"))
    return jnp.take(tokens, ids, axis=0) + jnp.take(places, positions, axis=0)
