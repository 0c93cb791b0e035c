"""The forward pass: embeddings, blocks of attention and MLP, a final norm; the output table makes logits of it.

The blocks' parameters are stacked along a leading axis of layers, whether the blocks are scanned or unrolled: one
layout of the state, two ways to compile it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from raygpt.config import Model
from raygpt.engines.jax.attention import KEPT, Attention, Cache
from raygpt.engines.jax.layers import Array, Parameters, block, dropout, embed, norm, value_embedding

T = TypeVar("T")


@dataclass(frozen=True)
class LayerCompilation:
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


SCANNED = LayerCompilation()


@dataclass(frozen=True)
class GPT:
    """How a model is computed; its parameters come with every call, under the names of its description."""

    model: Model
    dtype: Any
    attention: Attention
    compilation: LayerCompilation = SCANNED
    constrain: Callable[[Array], Array] = lambda x: x  # pins the residual stream's sharding

    def __call__(self, parameters: Parameters, ids: Array, keys: Array | None = None) -> Array:
        """Token ids [rows, time] to the final hidden state [rows, time, width]. `keys` [rows] turn dropout on."""
        x, shared = embed(parameters, ids, 0, self.model, self.dtype)
        x = self.constrain(dropout(x, keys, 0, self.model.dropout))
        shared = shared if shared.x0 is None else shared._replace(x0=x)

        @self.compilation.recomputed
        def compute(x: Array, own: Parameters, layer: Array | int, value: Array | None) -> Array:
            # Without this XLA (JAX 0.10.2) looks up wrong values with tensor and context axes and micro-batches.
            value = value if value is None else self.constrain(value)
            return self.constrain(block(own, x, self.attention, self.model, shared, value, keys, layer))

        if self.compilation.scanned:
            for part, stacked, values in self._parts(parameters, ids):
                steps = (stacked, jnp.arange(part.start, part.stop), values)
                x, _ = jax.lax.scan(lambda x, step: (compute(x, *step), None), x, steps)
        else:
            for layer, own in enumerate(unstack(blocks_of(parameters), self.model.layers)):
                x = compute(x, own, layer, self._value(parameters, ids, layer))
        return norm(parameters, "norm", x, self.model)

    def extend(self, parameters: Parameters, ids: Array, start: Array, cache: Cache) -> tuple[Array, Cache]:
        """The hidden state of ids [rows, time] that follow `start` earlier ones, whose keys and values are cached."""
        x, shared = embed(parameters, ids, start, self.model, self.dtype)

        def compute(x: Array, layer: tuple[Parameters, Array | None, Cache]) -> tuple[Array, Cache]:
            own, value, cache = layer
            updated = cache

            def attention(query: Array, key: Array, value: Array) -> Array:
                nonlocal updated
                updated = cache.updated(key, value, start)
                return cache.attend(query, key, value, start)

            return block(own, x, attention, self.model, shared, value), updated

        caches = []
        for part, stacked, values in self._parts(parameters, ids):
            own = jax.tree.map(lambda array, part=part: array[part.start : part.stop], cache)
            x, updated = jax.lax.scan(compute, x, (stacked, values, own))
            caches.append(updated)
        return norm(parameters, "norm", x, self.model), jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)

    def _value(self, parameters: Parameters, ids: Array, layer: int) -> Array | None:
        return value_embedding(parameters, ids, layer, self.model, self.dtype)

    def _parts(self, parameters: Parameters, ids: Array) -> Iterator[tuple[range, dict[str, Array], Array | None]]:
        """The layers as loops over equal ones, each with its stacked parameters and value embeddings: all of them, or
        those with a value embedding at both ends apart from those between."""
        first, count = self.model.value_embeddings, self.model.layers
        for part in (range(first), range(first, count - first), range(count - first, count)):
            if part:
                own = {name: array[part.start : part.stop] for name, array in blocks_of(parameters).items()}
                values = [value for layer in part if (value := self._value(parameters, ids, layer)) is not None]
                yield part, own, jnp.stack(values) if values else None


def blocks_of(parameters: Parameters) -> dict[str, Array]:
    """The stacked parameters of all blocks, by their name inside a block."""
    return {name.removeprefix("blocks."): array for name, array in parameters.items() if name.startswith("blocks.")}


def unstack(stacked: Parameters, layers: int) -> list[dict[str, Array]]:
    """The parameters of each layer. Split, not indexed: its gradient is one concatenation, not a sum of paddings."""
    parts = {name: jax.lax.split(array, [1] * layers) for name, array in stacked.items()}
    return [{name: jnp.squeeze(part[layer], 0) for name, part in parts.items()} for layer in range(layers)]
