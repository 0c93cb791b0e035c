"""The forward pass: embeddings, blocks of attention and MLP, a final norm; the output table makes logits of it.

The blocks' parameters are stacked along a leading axis of layers, whether the blocks are scanned or unrolled: one
layout of the state, two ways to compile it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from raygpt.config import Model
from raygpt.engines.jax.attention import KEPT, Attention, Cache
from raygpt.engines.jax.layers import Array, Parameters, block, dropout, embed, norm

T = TypeVar("T")


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


@dataclass(frozen=True)
class GPT:
    """How a model is computed; its parameters come with every call, under the names of its description."""

    model: Model
    dtype: Any
    attention: Attention
    layers: Layers = SCANNED
    constrain: Callable[[Array], Array] = lambda x: x  # pins the residual stream's sharding

    def __call__(self, parameters: Parameters, ids: Array, keys: Array | None = None) -> Array:
        """Token ids [rows, time] to the final hidden state [rows, time, width]. `keys` [rows] turn dropout on."""
        x = self.constrain(dropout(embed(parameters, ids, 0, self.dtype), keys, 0, self.model.dropout))

        @self.layers.recomputed
        def compute(x: Array, own: Parameters, layer: Array | int) -> Array:
            return self.constrain(block(own, x, self.attention, self.model, keys, layer))

        stacked = blocks_of(parameters)
        if self.layers.scanned:
            steps = (stacked, jnp.arange(self.model.layers))
            x, _ = jax.lax.scan(lambda x, step: (compute(x, *step), None), x, steps)
        else:
            for layer, own in enumerate(unstack(stacked, self.model.layers)):
                x = compute(x, own, layer)
        return norm(parameters, "norm", x, self.model)

    def extend(self, parameters: Parameters, ids: Array, start: Array, cache: Cache) -> tuple[Array, Cache]:
        """The hidden state of ids [rows, time] that follow `start` earlier ones, whose keys and values are cached."""

        def compute(x: Array, layer: tuple[Parameters, Cache]) -> tuple[Array, Cache]:
            own, cache = layer
            updated = cache

            def attention(query: Array, key: Array, value: Array) -> Array:
                nonlocal updated
                updated = cache.updated(key, value, start)
                return cache.attend(query, key, value, start)

            return block(own, x, attention, self.model), updated

        x = embed(parameters, ids, start, self.dtype)
        x, cache = jax.lax.scan(compute, x, (blocks_of(parameters), cache))
        return norm(parameters, "norm", x, self.model), cache


def blocks_of(parameters: Parameters) -> dict[str, Array]:
    """The stacked parameters of all blocks, by their name inside a block."""
    return {name.removeprefix("blocks."): array for name, array in parameters.items() if name.startswith("blocks.")}


def unstack(stacked: Parameters, layers: int) -> list[dict[str, Array]]:
    """The parameters of each layer. Split, not indexed: its gradient is one concatenation, not a sum of paddings."""
    parts = {name: jax.lax.split(array, [1] * layers) for name, array in stacked.items()}
    return [{name: jnp.squeeze(part[layer], 0) for name, part in parts.items()} for layer in range(layers)]
