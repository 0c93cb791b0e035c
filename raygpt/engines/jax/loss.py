"""Cross-entropy that never holds the logits of a whole batch: in chunks of time, its gradient taken on the way.

The logits of 32 rows of GPT-2 are 6.6 GB in fp32. Here a chunk's logits live only until its loss, and when training
its share of the gradients, are summed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
CHUNK_BYTES = 2**30  # of fp32 logits at a time, on each device


def chunk_count(tokens: int, time: int, vocab: int) -> int:
    """How many chunks to cut the time axis into: the fewest that keep a chunk's logits below CHUNK_BYTES."""
    wanted = -(-tokens * vocab * 4 // CHUNK_BYTES)
    return next(count for count in range(min(wanted, time), time + 1) if time % count == 0)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden: Array, table: Array, targets: Array, scale: Array, vocab: int, chunks: int
) -> tuple[Array, Array]:
    """(sum over rows of scale · loss, loss of each row), a row's loss being the sum over its tokens.

    Only the sum has gradients, for hidden and table.
    hidden [rows, time, width], table [padded vocabulary, width], targets [rows, time], scale [rows].
    """

    def chunk(losses: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        return losses + _nll(part[0], table, part[1], vocab)[0].sum(1), None

    zero = jnp.zeros(len(hidden), _accurate(hidden))
    losses, _ = jax.lax.scan(chunk, zero, (_cut(hidden, chunks), _cut(targets, chunks)))
    return (losses * scale).sum(), losses


def _forward(hidden: Array, table: Array, targets: Array, scale: Array, vocab: int, chunks: int) -> Any:
    """As above, with the gradients of the first result for hidden and table, while the logits are at hand."""

    def chunk(carry: tuple[Array, Array], part: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        losses, dtable = carry
        h, y = part
        nll, probabilities = _nll(h, table, y, vocab)
        hit = jax.lax.broadcasted_iota(y.dtype, probabilities.shape, 2) == y[..., None]
        dlogits = ((probabilities - hit) * scale[:, None, None]).astype(h.dtype)  # [rows, chunk, vocabulary]
        dtable += jnp.einsum("btv,btd->vd", dlogits, h, preferred_element_type=dtable.dtype)
        return (losses + nll.sum(1), dtable), jnp.einsum("btv,vd->btd", dlogits, table.astype(h.dtype))

    accurate = _accurate(hidden)
    start = jnp.zeros(len(hidden), accurate), jnp.zeros(table.shape, accurate)
    (losses, dtable), dhidden = jax.lax.scan(chunk, start, (_cut(hidden, chunks), _cut(targets, chunks)))
    return ((losses * scale).sum(), losses), (_join(dhidden), dtable.astype(table.dtype))


def _backward(vocab: int, chunks: int, gradients: Any, cotangents: tuple[Array, Array]) -> Any:
    dhidden, dtable = gradients
    total = cotangents[0]
    return dhidden * total.astype(dhidden.dtype), dtable * total.astype(dtable.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _nll(hidden: Array, table: Array, targets: Array, vocab: int) -> tuple[Array, Array]:
    """Loss of each token and the probabilities, in fp32 at least; ids that only pad the table are impossible."""
    logits = jnp.einsum("btd,vd->btv", hidden, table.astype(hidden.dtype), preferred_element_type=_accurate(hidden))
    padding = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) >= vocab
    logits = jnp.where(padding, -jnp.inf, logits)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return (log_total - picked)[..., 0], jnp.exp(logits - log_total)


def _accurate(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _cut(x: Array, chunks: int) -> Array:
    """[rows, time, …] to [chunks, rows, time / chunks, …], every chunks-th token: so time stays sharded as it was."""
    rows, time, *rest = x.shape
    return jnp.moveaxis(x.reshape(rows, time // chunks, chunks, *rest), 2, 0)


def _join(x: Array) -> Array:
    chunks, rows, time, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(rows, time * chunks, *rest)
