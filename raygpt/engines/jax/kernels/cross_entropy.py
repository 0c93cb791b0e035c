"""Cross-entropy of the output layer, its gradient computed in the same pass: logits exist once, in 16 bits, in chunks.

For each chunk of tokens one product makes the logits, one kernel turns them in place into their gradient, and two
products turn that into the gradients of `hidden` and `table`. A program owns a token: it reads its logits once for the
maximum and the sum, again (100 KB, from the L2 cache) for the gradient, and writes that over them. Bytes from and to
memory, for 65,536 tokens of GPT-2: 13.2 GB, 3.1 ms at the 4.3 TB/s of an H200; the kernel takes 4.5 ms. On Hopper
another one, resident_loss.py, takes 3.2.
"""

from functools import partial, reduce
from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from raygpt.engines.jax.kernels import resident_loss
from raygpt.engines.jax.kernels.launch import LANES, Array, launch, triton
from raygpt.engines.jax.logits import capped, scores

F32 = jnp.float32
# Two programs of 16 warps fit a multiprocessor: 264 tokens in flight, 26 MB, which an H200's L2 cache still holds.
WARPS = 16  # a tile has LANES columns per warp
UNROLL = 4  # tiles loaded at a time
LOG2E = log2(e)
LOWEST = -1e30  # stands for a logit that is not there; unlike -inf, its differences are numbers


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    hidden: Array, table: Array, targets: Array, weights: Array, vocab: int, chunks: int, softcap: float | None = None
) -> tuple[Array, Array]:
    """(sum over tokens of weight · loss, loss of each token). Only the sum has gradients, for hidden and table.

    hidden [tokens, width], table [padded vocabulary, width], targets [tokens], weights [tokens].
    """
    return _forward(hidden, table, targets, weights, vocab, chunks, softcap)[0]


def _forward(
    hidden: Array, table: Array, targets: Array, weights: Array, vocab: int, chunks: int, softcap: float | None
) -> Any:
    rounded = table.astype(hidden.dtype)
    nll, d_hidden, d_table = [], [], jnp.zeros(table.shape, F32)
    for h, y, weight in zip(*(jnp.split(x, chunks) for x in (hidden, targets, weights)), strict=True):
        losses, d_logits = loss_and_gradient(scores(h, rounded, h.dtype), y, weight, vocab, softcap)
        nll.append(losses)
        d_hidden.append(d_logits @ rounded)
        d_table += lax.dot_general(d_logits, h, (((0,), (0,)), ((), ())), preferred_element_type=F32)
    losses = jnp.concatenate(nll)
    return ((losses * weights).sum(), losses), (jnp.concatenate(d_hidden), d_table)


def _backward(vocab: int, chunks: int, softcap: float | None, gradients: Any, cotangents: tuple[Array, Array]) -> Any:
    d_hidden, d_table = gradients
    total = cotangents[0]
    return d_hidden * total.astype(d_hidden.dtype), d_table * total, None, None


cross_entropy.defvjp(_forward, _backward)


def loss_and_gradient_plain(
    logits: Array, targets: Array, weights: Array, vocab: int, softcap: float | None = None
) -> tuple[Array, Array]:
    """The kernel's function in plain JAX."""
    exact = capped(logits.astype(F32), softcap)
    slope = 1.0 if softcap is None else 1 - jnp.square(exact / softcap)
    scores = jnp.where(jnp.arange(logits.shape[1]) < vocab, exact, LOWEST)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    gradient = (jnp.exp(scores - total) - jax.nn.one_hot(targets, logits.shape[1])) * weights[:, None] * slope
    return total[:, 0] - jnp.take_along_axis(scores, targets[:, None], -1)[:, 0], gradient.astype(logits.dtype)


def loss_and_gradient(
    logits: Array, targets: Array, weights: Array, vocab: int, softcap: float | None = None
) -> tuple[Array, Array]:
    """Each token's loss in fp32, and `weight · (softmax - onehot)`, if it can be in the memory of the logits; with a
    soft-cap, of the capped logits, and times its slope.

    Logits are [tokens, padded], not capped. Columns from `vocab` on only pad: their probability and their gradient are
    zero.
    """
    tokens, padded = logits.shape
    if resident_loss.can_run(jax.local_devices()[0], logits.dtype, padded):
        return resident_loss.resident_loss(logits, targets, weights, vocab, softcap)
    row, scalar = pl.BlockSpec((None, padded), lambda i: (i, 0)), pl.BlockSpec((1,), lambda i: (i,))
    losses, gradient = launch(
        partial(cross_entropy_kernel, vocab=vocab, softcap=softcap),
        warps=WARPS,
        grid=(tokens,),
        in_specs=[scalar, scalar, row],
        out_specs=[scalar, row],
        aliases={2: 1},
        out_shape=[jax.ShapeDtypeStruct((tokens,), F32), jax.ShapeDtypeStruct(logits.shape, logits.dtype)],
    )(targets, weights, logits)
    return losses, gradient


def cross_entropy_kernel(
    targets: Any, weights: Any, logits: Any, losses: Any, gradient: Any, *, vocab: int, softcap: float | None
) -> None:
    """References to one token's: target [1], weight [1], logits [padded]; results loss [1] and gradient [padded]."""
    (padded,) = logits.shape
    lanes = LANES * WARPS
    rest = vocab // (lanes * UNROLL) * lanes * UNROLL  # from here on with masks
    lane = lax.iota(jnp.int32, lanes)
    target, weight = targets[0], weights[0]
    # Read before the barrier of the reductions, after which the row changes.
    picked = capped(logits[target].astype(F32), softcap)

    def load(start: Any) -> Array:
        return capped(logits[pl.ds(start, lanes)].astype(F32), softcap)

    def load_masked(start: int) -> Array:
        inside = start + lane < padded  # a multiple of 8, so the load stays wide
        x = triton.load(logits.at[start + lane], mask=inside, other=LOWEST)
        return jnp.where(start + lane < vocab, capped(x.astype(F32), softcap), LOWEST)

    def add(xs: list[Array], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Running maximum (from the target's logit up) and sum per lane; one rescaling for all tiles of a chunk."""
        peak, total = carry
        higher = reduce(jnp.maximum, xs, peak)
        zero = LOG2E * higher
        start = total * jnp.exp2(LOG2E * peak - zero)
        return higher, reduce(jnp.add, [jnp.exp2(LOG2E * x - zero) for x in xs], start)

    def differentiate(start: Any, x: Array) -> Array:
        hit = lane == target - start
        value = jnp.exp2(LOG2E * x - log_total) * weight - jnp.where(hit, weight, 0.0)
        if softcap is not None:
            value *= 1 - jnp.square(jnp.maximum(x, -softcap) / softcap)  # what only pads is LOWEST
        return value.astype(gradient.dtype)

    def write(starts: list[Any], _: Any) -> Any:
        for start, x in zip(starts, [load(start) for start in starts], strict=True):
            gradient[pl.ds(start, lanes)] = differentiate(start, x)
        return _

    carry = jnp.full(lanes, picked), jnp.zeros(lanes, F32)
    carry = _over_chunks(rest, lanes, lambda starts, carry: add([load(start) for start in starts], carry), carry)
    for start in range(rest, vocab, lanes):
        carry = add([load_masked(start)], carry)
    peak, total = carry
    top = peak.max()
    log_total = top * LOG2E + jnp.log2((total * jnp.exp2(LOG2E * (peak - top))).sum())  # base 2
    losses[0] = log_total / LOG2E - picked

    _over_chunks(rest, lanes, write, 0)
    for start in range(rest, padded, lanes):
        triton.store(gradient.at[start + lane], differentiate(start, load_masked(start)), mask=start + lane < padded)


def _over_chunks(stop: int, lanes: int, body: Any, carry: Any) -> Any:
    """`body(starts, carry)` over the row up to `stop`, UNROLL tiles at a time."""
    if not stop:
        return carry
    starts = lambda i: [(i * UNROLL + j) * lanes for j in range(UNROLL)]  # noqa: E731
    return lax.fori_loop(0, stop // (lanes * UNROLL), lambda i, carry: body(starts(i), carry), carry)
