"""GPT-2 in Flax NNX: embeddings, pre-norm blocks of attention and MLP, a final norm, a head tied or not.

The blocks' parameters are stacked along a leading axis of layers, whether the blocks are scanned or unrolled: one
layout of the state, two ways to compile it. Parameters are fp32; what is computed is in `dtype`, norms, softmax and
loss in fp32 at least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from raygpt.config import Model
from raygpt.engines.jax.attention import KEPT, Attention, Cache

Array = jax.Array
T = TypeVar("T")
PADDED_TO = 128  # rows of the token table: matrix units want multiples; ids beyond the vocabulary never leave here


def padded_vocab(vocab: int) -> int:
    """Rows of the token table."""
    return -(-vocab // PADDED_TO) * PADDED_TO


def initializer(model: Model, residual: bool = False) -> nnx.Initializer:
    """GPT-2's normal 0.02, smaller for the projections that add to the residual stream; or Xavier's uniform."""
    if model.init == "xavier":
        return _xavier
    return nnx.initializers.normal(0.02 / (2 * model.layers) ** 0.5 if residual else 0.02)


def table_initializer(model: Model) -> nnx.Initializer:
    """Of embeddings: normal as well; with Xavier's kernels Flax's own, normal with a variance of 1 / width."""
    if model.init == "xavier":
        return nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    return initializer(model)


def _xavier(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Uniform, for a matrix from shape[0] to the rest; Q, K and V, which share a kernel [width, 3, …], are three."""
    fan_in, fan_out = {
        2: lambda: shape,  # the MLP's
        3: lambda: (shape[0] * shape[1], shape[2]),  # heads, head_dim -> width
        4: lambda: (shape[0], shape[2] * shape[3]),  # width -> 3 × heads, head_dim
    }[len(shape)]()
    limit = (6 / (fan_in + fan_out)) ** 0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


@dataclass(frozen=True)
class Layers:
    """How the blocks are compiled and what of them is kept for the backward pass: `training.compile` and `.remat`."""

    scanned: bool = True  # one block, compiled once; or one after another, which runs faster on a GPU
    remat: str = "none"

    def recomputed(self, block: Callable[..., T]) -> Callable[..., T]:
        """The block, of which no more is kept than `remat` says."""
        if self.remat == "none":
            return block
        policies = jax.checkpoint_policies
        keep = {
            # Linear layers, and what a fused attention's backward pass needs; its scores, which have rows and heads
            # as batch dimensions, are computed again.
            "products": policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(KEPT)
            ),
            "blocks": policies.nothing_saveable,
        }[self.remat]
        return jax.checkpoint(block, policy=keep, prevent_cse=not self.scanned)  # a loop's halves cannot be merged


SCANNED = Layers()


def lean(function: Callable[..., Array]) -> Callable[..., Array]:
    """Element-wise work of which only the input is kept for the backward pass, not every number on the way.

    A scanned block would keep six arrays for GELU and three in fp32 for a norm. Unrolled, XLA sees that both passes
    compute the same and is free to keep or to compute again.
    """
    return jax.checkpoint(function, prevent_cse=False)


def dropout(x: Array, keys: Array | None, site: Array | int, rate: float) -> Array:
    """Zero a share of x [rows, time, width] and scale the rest; each row has its own key, so any mesh and any
    accumulation drop the same."""
    if keys is None or not rate:
        return x
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, site)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        width, heads, size = model.width, model.heads, model.width // model.heads
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        init, init_residual = initializer(model), initializer(model, residual=True)
        norm = {"epsilon": model.norm_epsilon, "use_bias": model.bias, "use_fast_variance": False, **kinds}
        bias = lambda *shape: shape if model.bias else None  # noqa: E731
        self.norm1 = nnx.LayerNorm(width, **norm)
        self.qkv = nnx.Einsum(
            "btd,dkhe->btkhe", (width, 3, heads, size), bias(3, heads, size), kernel_init=init, **kinds
        )
        self.out = nnx.LinearGeneral(
            (heads, size), width, axis=(-2, -1), use_bias=model.bias, kernel_init=init_residual, **kinds
        )
        self.norm2 = nnx.LayerNorm(width, **norm)
        self.up = nnx.Linear(width, 4 * width, use_bias=model.bias, kernel_init=init, **kinds)
        self.down = nnx.Linear(4 * width, width, use_bias=model.bias, kernel_init=init_residual, **kinds)

    def __call__(self, x: Array, attention: Attention, keys: Array | None, layer: Array | int, rate: float) -> Array:
        query, key, value = jnp.moveaxis(self.qkv(lean(self.norm1)(x)), 2, 0)  # each [rows, time, heads, head_dim]
        mixed = self.out(attention(query, key, value))
        x = x + dropout(mixed, keys, 2 * layer + 1, rate)
        hidden = lean(jax.nn.gelu)(self.up(lean(self.norm2)(x)))  # [rows, time, 4·width]; GPT-2's GELU is by tanh
        return x + dropout(self.down(hidden), keys, 2 * layer + 2, rate)


class GPT(nnx.Module):
    """Token ids [rows, time] to the final hidden state [rows, time, width]."""

    def __init__(self, model: Model, vocab: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        self.model, self.vocab = model, vocab
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        init = table_initializer(model)
        table = padded_vocab(vocab)
        self.tokens = nnx.Embed(table, model.width, embedding_init=init, rngs=rngs, **kinds)
        self.positions = nnx.Embed(model.context, model.width, embedding_init=init, rngs=rngs, **kinds)

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(model, dtype, param_dtype, rngs)

        self.blocks = blocks(rngs)
        self.norm = nnx.LayerNorm(
            model.width, epsilon=model.norm_epsilon, use_bias=model.bias, use_fast_variance=False, rngs=rngs, **kinds
        )
        head = lambda: nnx.Embed(table, model.width, embedding_init=initializer(model), rngs=rngs, **kinds)  # noqa: E731
        self.head = None if model.tied_head else head()

    def __call__(
        self,
        ids: Array,
        attention: Attention,
        keys: Array | None = None,
        *,
        layers: Layers = SCANNED,
        constrain: Callable[[Array], Array] = lambda x: x,
    ) -> Array:
        """`keys` [rows] turn dropout on; `constrain` pins the residual stream's sharding."""
        rate = self.model.dropout
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        x = constrain(dropout(x, keys, 0, rate))
        graph, stacked = nnx.split(self.blocks)

        @layers.recomputed
        def block(x: Array, parameters: Any, layer: Array | int) -> Array:
            return constrain(nnx.merge(graph, parameters)(x, attention, keys, layer, rate))

        if layers.scanned:
            steps = (stacked, jnp.arange(self.model.layers))
            x, _ = jax.lax.scan(lambda x, step: (block(x, *step), None), x, steps)
        else:
            for layer, parameters in enumerate(unstack(stacked, self.model.layers)):
                x = block(x, parameters, layer)
        return lean(self.norm)(x)

    def extend(self, ids: Array, start: Array, cache: Cache) -> tuple[Array, Cache]:
        """The hidden state of ids [rows, time] that follow `start` earlier ones, whose keys and values are cached."""
        x = self.tokens(ids) + self.positions(start + jnp.arange(ids.shape[1]))
        graph, stacked = nnx.split(self.blocks)

        def block(x: Array, layer: tuple[Any, Cache]) -> tuple[Array, Cache]:
            parameters, cache = layer
            updated = cache

            def attention(query: Array, key: Array, value: Array) -> Array:
                nonlocal updated
                updated = cache.updated(key, value, start)
                return cache.attend(query, key, value, start)

            x = nnx.merge(graph, parameters)(x, attention, None, 0, 0.0)
            return x, updated

        x, cache = jax.lax.scan(block, x, (stacked, cache))
        return self.norm(x), cache

    @property
    def table(self) -> Array:
        """What turns a hidden state into logits: [padded vocabulary, width]."""
        return (self.head or self.tokens).embedding[...]


def unstack(stacked: Any, layers: int) -> list[Any]:
    """The parameters of each layer. Split, not indexed: its gradient is one concatenation, not a sum of paddings."""
    parts = jax.tree.map(lambda leaf: [jnp.squeeze(p, 0) for p in jax.lax.split(leaf, [1] * layers)], stacked)
    return [jax.tree.map(lambda _, part: part[layer], stacked, parts) for layer in range(layers)]  # noqa: B023
