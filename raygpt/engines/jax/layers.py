"""The layers of a model in plain JAX. Each finds its parameters by name in a mapping; what it computes has x's dtype.

Parameters are fp32 and rounded where they are used; norms, softmax and loss are computed in fp32 at least.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from raygpt.config import Model
from raygpt.engines.jax.attention import Attention
from raygpt.engines.jax.devices import accurate
from raygpt.engines.jax.rope import Rotation, rotate, rotation
from raygpt.models import value_table_of

Array = jax.Array
Parameters = Mapping[str, Array]
# queries [rows, time, heads, head], keys and values [rows, time, kv_heads, head]
AttentionInputs = tuple[Array, Array, Array]


class Shared(NamedTuple):
    """What all blocks read, besides the residual stream."""

    rotation: Rotation | None = None  # of queries and keys, by their positions
    x0: Array | None = None  # the first block's input


def recompute_elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """Element-wise work of which only the input is kept for the backward pass, not every number on the way.

    A scanned block would keep six arrays for GELU and three in fp32 for a norm. Unrolled, XLA sees that both passes
    compute the same and is free to keep or to compute again.
    """
    return jax.checkpoint(function, prevent_cse=False)


def norm(parameters: Parameters, name: str, x: Array, model: Model) -> Array:
    """LayerNorm or RMSNorm over the last axis, with the gain and the bias that the model has."""
    gain, bias = parameters.get(f"{name}.gain"), parameters.get(f"{name}.bias")
    return recompute_elementwise(partial(normalise, model=model))(x, gain, bias)


def normalise(x: Array, gain: Array | None, bias: Array | None, model: Model) -> Array:
    """x with a variance of 1 over the last axis (RMSNorm: a mean square of 1), times the gain, plus the bias."""
    exact = x.astype(accurate(x.dtype))
    centred = exact - exact.mean(-1, keepdims=True) if model.norm == "layer" else exact
    scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + model.norm_epsilon)
    normed = centred * (scale if gain is None else scale * gain)
    return (normed if bias is None else normed + bias).astype(x.dtype)


def linear(parameters: Parameters, name: str, x: Array, axes: int = 1) -> Array:
    """x [rows, time, *in] by a kernel [*in, *out], of which `axes` are summed over; and a bias [*out]."""
    return _product(x, parameters[f"{name}.kernel"], parameters.get(f"{name}.bias"), axes)


def _product(x: Array, kernel: Array, bias: Array | None, axes: int = 1) -> Array:
    y = jnp.tensordot(x, kernel.astype(x.dtype), axes)
    return y if bias is None else y + bias.astype(x.dtype)


def project(parameters: Parameters, x: Array) -> AttentionInputs:
    """Queries, keys and values of x [rows, time, width], neither normed nor rotated.

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


def norm_and_rotate(parameters: Parameters, name: str, x: Array, model: Model, rotation: Rotation | None) -> Array:
    """Queries or keys [rows, time, heads, head] as attention takes them: normed and rotated, where the model does."""

    @recompute_elementwise
    def compute(x: Array, gain: Array | None, bias: Array | None) -> Array:
        normed = normalise(x, gain, bias, model) if model.qk_norm else x
        return normed if rotation is None else rotate(normed, rotation)

    if not model.qk_norm and rotation is None:
        return x
    return compute(x, parameters.get(f"{name}.gain"), parameters.get(f"{name}.bias"))


def attention_inputs(parameters: Parameters, x: Array, model: Model, rotation: Rotation | None) -> AttentionInputs:
    """Queries, keys and values of x [rows, time, width], queries and keys normed and rotated, where the model does."""
    query, key, value = project(parameters, x)
    query = norm_and_rotate(parameters, "query_norm", query, model, rotation)
    return query, norm_and_rotate(parameters, "key_norm", key, model, rotation), value


def gate_heads(parameters: Parameters, x: Array, heads: Array) -> Array:
    """Heads [rows, time, heads, head], each multiplied by its gate, from 0 to 2, if the model has gates. Without one a
    head always contributes: attention's weights sum to 1."""
    kernel = parameters.get("head_gate.kernel")
    if kernel is None:
        return heads
    sums = _product(x[..., : len(kernel)], kernel, None)
    gates = 2 * jax.nn.sigmoid(sums.astype(accurate(x.dtype)))
    return heads * gates.astype(x.dtype).reshape(*heads.shape[:-1], 1)


def mlp(parameters: Parameters, x: Array, model: Model) -> Array:
    """To the hidden layer [rows, time, hidden], its activation, and back."""
    up, activate = linear(parameters, "up", x), ACTIVATIONS[model.mlp]
    if model.has_gate:
        hidden = recompute_elementwise(lambda gate, up: activate(gate) * up)(linear(parameters, "gate", x), up)
    else:
        hidden = recompute_elementwise(activate)(up)
    return linear(parameters, "down", hidden)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # by `model.mlp`
    "gelu": jax.nn.gelu,  # by tanh, as GPT-2's
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,  # of the gate
}


def dropout(x: Array, keys: Array | None, site: Array | int, rate: float) -> Array:
    """Zero a share of x [rows, time, width], or [rows · time, width], and scale the rest; each row has its own key, so
    any mesh and any accumulation drop the same."""
    if keys is None or not rate:
        return x
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, site)
    by_row = x.size // x.shape[-1] // len(keys), x.shape[-1]  # [time, width]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, by_row))(keys)
    return jnp.where(kept.reshape(x.shape), x / (1 - rate), 0)


def block(
    parameters: Parameters,
    x: Array,
    attention: Attention,
    model: Model,
    shared: Shared,
    value_embedding: Array | None = None,
    keys: Array | None = None,
    layer: Array | int = 0,
    attention_inputs: Callable[[Parameters, Array, Model, Rotation | None], AttentionInputs] = attention_inputs,
) -> Array:
    """x + attention(norm(x)), then x + mlp(norm(x)). `keys` [rows] turn dropout on.

    x is [rows, time, width], or [rows · time, width] with `attention_inputs` that give rows and time two axes.
    """
    if shared.x0 is not None:
        stay, first = (parameters[f"{name}.gain"].astype(x.dtype) for name in ("residual", "x0"))
        x = stay * x + first * shared.x0
    normed = norm(parameters, "norm1", x, model)
    query, key, value = attention_inputs(parameters, normed, model, shared.rotation)
    value = value if value_embedding is None else value + value_embedding.reshape(value.shape)
    heads = gate_heads(parameters, normed, attention(query, key, value))
    mixed = linear(parameters, "out", heads, axes=2).reshape(x.shape)
    x = x + dropout(mixed, keys, 2 * layer + 1, model.dropout)
    update = mlp(parameters, norm(parameters, "norm2", x, model), model)
    return x + dropout(update, keys, 2 * layer + 2, model.dropout)


def embed(parameters: Parameters, ids: Array, start: Array | int, model: Model, dtype: Any) -> tuple[Array, Shared]:
    """The residual stream [rows, time, width] of ids that follow `start` earlier ones, of all rows or of each; and the
    rotation of their positions."""
    positions = jnp.asarray(start)[..., None] + jnp.arange(ids.shape[1])  # [time] or [rows, time]
    x = jnp.take(parameters["tokens"].astype(dtype), ids, axis=0)
    if model.position == "learned":
        x = x + jnp.take(parameters["positions"].astype(dtype), positions, axis=0)
    if model.embedding_norm:
        x = norm(parameters, "embedding_norm", x, model)
    return x, Shared(rotation(model, positions, dtype), x if model.x0_mixing else None)


def value_embedding(parameters: Parameters, ids: Array, layer: int, model: Model, dtype: Any) -> Array | None:
    """What is added to a layer's values [rows, time, width], if its model has that."""
    found = value_table_of(model, layer)
    if found is None:
        return None
    table, number = found
    return parameters["value_gains"][number].astype(dtype) * jnp.take(parameters[table].astype(dtype), ids, axis=0)
