"""Cross-entropy without the logits of a whole batch: in chunks of tokens, its gradient computed in the same pass.

A chunk's logits live only until its loss, and when training its share of the gradients, are summed. On a mesh every
device goes through its own tokens in chunks, and keeps a sum of the table's gradient to itself until the last: the
devices exchange it once, not once a chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from raygpt.engines.jax.devices import accurate
from raygpt.engines.jax.logits import logits

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def cross_entropy(
    hidden: Array,
    table: Array,
    targets: Array,
    weights: Array,
    vocab: int,
    chunks: int,
    shards: tuple[int, int] = (1, 1),
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """(sum over tokens of weight · loss, loss of each row), a row's loss being the sum over its tokens.

    Only the sum has gradients, for hidden and table. `shards` says over how many devices rows and time are divided.
    hidden [rows, time, width], table [padded vocabulary, width], targets and weights [rows, time].
    """
    cut = partial(_cut, chunks=chunks, shards=shards)
    nll = jax.lax.map(lambda part: _nll(part[0], table, part[1], vocab, softcap)[0], (cut(hidden), cut(targets)))
    return _summed(_join(nll, targets.shape), weights)


def token_logprobs(
    hidden: Array,
    table: Array,
    targets: Array,
    vocab: int,
    chunks: int,
    shards: tuple[int, int],
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Each target's log-probability, and whether it is the likeliest: [rows, time]."""

    def chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        nll, probabilities, _ = _nll(part[0], table, part[1], vocab, softcap)
        return -nll, probabilities.argmax(-1) == part[1]

    cut = partial(_cut, chunks=chunks, shards=shards)
    logs, hits = jax.lax.map(chunk, (cut(hidden), cut(targets)))
    return _join(logs, targets.shape), _join(hits, targets.shape)


def _forward(
    hidden: Array,
    table: Array,
    targets: Array,
    weights: Array,
    vocab: int,
    chunks: int,
    shards: tuple[int, int],
    softcap: float | None,
) -> Any:
    """As above, with the gradients of the first result for hidden and table, while the logits are at hand."""
    cut = partial(_cut, chunks=chunks, shards=shards)

    def chunk(dtable: Array, part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        h, y, weight = part
        nll, probabilities, slope = _nll(h, table, y, vocab, softcap)
        hit = jax.lax.broadcasted_iota(y.dtype, probabilities.shape, 3) == y[..., None]
        dlogits = ((probabilities - hit) * (weight[..., None] * slope)).astype(h.dtype)  # [*shards, tokens, vocabulary]
        dtable += jnp.einsum("rctv,rctd->rcvd", dlogits, h, preferred_element_type=dtable.dtype)
        return dtable, (nll, jnp.einsum("rctv,vd->rctd", dlogits, table.astype(h.dtype)))

    start = jnp.zeros((*shards, *table.shape), accurate(hidden.dtype))  # each device's own sum
    dtable, (nll, dhidden) = jax.lax.scan(chunk, start, (cut(hidden), cut(targets), cut(weights)))
    gradients = _join(dhidden, hidden.shape), dtable.sum((0, 1)).astype(table.dtype)
    return _summed(_join(nll, targets.shape), weights), gradients


def _backward(
    vocab: int, chunks: int, shards: tuple[int, int], softcap: float | None, gradients: Any, cotangents: Any
) -> Any:
    dhidden, dtable = gradients
    total = cotangents[0]
    return dhidden * total.astype(dhidden.dtype), dtable * total.astype(dtable.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _summed(nll: Array, weights: Array) -> tuple[Array, Array]:
    return (nll * weights).sum(), nll.sum(1)


def _nll(
    hidden: Array, table: Array, targets: Array, vocab: int, softcap: float | None
) -> tuple[Array, Array, Array | float]:
    """Loss of each token, the probabilities, and the slope of the soft-cap, in fp32 at least; ids that only pad the
    table are impossible."""
    scores = logits(hidden, table, softcap)
    slope = 1.0 if softcap is None else 1 - jnp.square(scores / softcap)
    padding = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3) >= vocab
    scores = jnp.where(padding, -jnp.inf, scores)
    log_total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)
    return (log_total - picked)[..., 0], jnp.exp(scores - log_total), slope


def _cut(x: Array, chunks: int, shards: tuple[int, int]) -> Array:
    """[rows, time, …] to [chunks, *shards, tokens, …]: each device's own tokens, one after another."""
    (rows, time, *rest), (r, c) = x.shape, shards
    own = jnp.moveaxis(x.reshape(r, rows // r, c, time // c, *rest), 2, 1)  # [r, c, rows / r, time / c, …]
    return jnp.moveaxis(own.reshape(r, c, chunks, -1, *rest), 2, 0)


def _join(x: Array, shape: tuple[int, ...]) -> Array:
    """What `_cut` has cut: [chunks, *shards, tokens, …] to [rows, time, …]."""
    (_, r, c, _, *rest), (rows, time, *_) = x.shape, shape
    own = jnp.moveaxis(x, 0, 2).reshape(r, c, rows // r, time // c, *rest)
    return jnp.moveaxis(own, 1, 2).reshape(shape)
