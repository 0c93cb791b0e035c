"""Cross-entropy's kernel for Hopper: a token's logits stay in shared memory, read once and written once.

A warpgroup owns a token. The copy engine brings its logits (100 KB of GPT-2's), three passes over shared memory find
the maximum, the exponentials and their sum, and the gradient, and the copy engine takes that away. Two programs share a
multiprocessor: one computes while the other copies. 16,384 tokens take 0.80 ms on an H200, where memory alone would
take 0.77 and the kernel that reads twice (cross_entropy.py) takes 1.13. To hold a row in registers instead was slower
than either: then only one program fits, and nothing hides its loads.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

Array = jax.Array
F32 = jnp.float32
COLUMNS = 128  # of a row's lines: a row of logits is [lines, COLUMNS]
TILE = 8  # lines that the 128 threads of a warpgroup take at a time, each 16 bytes
UNROLL = 7  # tiles of an iteration: 0.80 ms instead of 0.92
COPIED = 256  # lines, the most of one copy
ROOM = 112 * 1024  # bytes of shared memory for a row, if two are to fit
LOG2E = 1.4426950408889634
LARGEST_CAP = 40.0
LOWEST = -1e30  # stands for a logit that is not there; unlike -inf, its differences are numbers


def can_run(device: Any, dtype: Any, padded: int) -> bool:
    """On Hopper, in 16 bits, with rows of whole lines that fit; and if this JAX still compiles it."""
    hopper = device.platform == "gpu" and float(device.compute_capability) == 9.0
    fits = padded % COLUMNS == 0 and jnp.dtype(dtype).itemsize == 2 and 2 * padded <= ROOM
    return hopper and fits and compiles()


@cache
def compiles() -> bool:
    """Mosaic's interface still changes between releases of JAX: try it on a small case. That needs no GPU."""
    like = jax.ShapeDtypeStruct
    shapes = like((2, 2 * COLUMNS), jnp.bfloat16), like((2,), jnp.int32), like((2,), F32)
    try:
        for softcap in (None, 15.0):
            resident_loss.trace(*shapes, vocab=200, softcap=softcap).lower(lowering_platforms=("cuda",))
    except Exception:  # any error: this JAX cannot compile it, and the other kernel computes the same
        return False
    return True


@partial(jax.jit, static_argnames=("vocab", "softcap", "interpret"))  # compiled once for all chunks
def resident_loss(
    logits: Array, targets: Array, weights: Array, vocab: int, softcap: float | None = None, interpret: Any = None
) -> tuple[Array, Array]:
    """Each token's loss in fp32, and `weight · (softmax - onehot)` for logits [tokens, padded], as a new array; with a
    soft-cap times its slope, 1 - (logit / softcap)².

    Columns from `vocab` on only pad: their probability and their gradient are zero.
    """
    tokens, padded = logits.shape
    lines = padded // COLUMNS
    kernel = mosaic.kernel(
        partial(resident_loss_kernel, vocab=vocab, softcap=softcap, laid_out=interpret is None),
        out_type=[
            jax.ShapeDtypeStruct((tokens,), F32),
            jax.ShapeDtypeStruct((tokens, lines, COLUMNS), logits.dtype),
        ],
        grid=(tokens,),
        grid_names=("token",),
        scratch_types=[
            mosaic.SMEM((lines, COLUMNS), logits.dtype),
            mosaic.Barrier(num_arrivals=len(_copies(lines))),
        ],
        # A thread reads and writes its own values of a row alone, so there is nothing to wait for between passes.
        compiler_params=mosaic.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    losses, gradient = kernel(targets, weights, logits.reshape(tokens, lines, COLUMNS))
    return losses, gradient.reshape(logits.shape)


def resident_loss_kernel(
    targets: Any, weights: Any, logits: Any, losses: Any, gradient: Any, row: Any, arrived: Any, **settings: Any
) -> None:
    """References: all tokens' targets, weights, logits; results losses and gradient; a row in shared memory."""
    token = lax.axis_index("token")
    lines = row.shape[0]
    for part in _copies(lines):
        mosaic.copy_gmem_to_smem(logits.at[token, part], row.at[part], arrived)
    mosaic.barrier_wait(arrived)
    losses[token] = _differentiate(row, targets[token], weights[token], **settings)
    mosaic.commit_smem()
    for part in _copies(lines):
        mosaic.copy_smem_to_gmem(row.at[part], gradient.at[token, part])
    mosaic.wait_smem_to_gmem(0)


def _differentiate(
    row: Any, target: Array, weight: Array, *, vocab: int, softcap: float | None, laid_out: bool
) -> Array:
    """Turn the logits in a row into their gradient, and give the loss. `laid_out` says how a tile lies in registers,
    which an interpreter does not know."""
    lines = row.shape[0]
    tiles = vocab // (TILE * COLUMNS)  # without padding; the lines after them are taken one by one, with a mask
    rest = range(tiles * TILE, lines)

    def layout(count: int) -> Any:
        return mosaic.Layout.WG_STRIDED((count, COLUMNS), vec_size=count)

    def load(line: Any, count: int) -> Array:
        here = pl.ds(line, count)
        if not laid_out:
            return row[here].astype(F32)
        return mosaic.load(row, (here, slice(None)), layout=layout(count)).astype(F32)

    def ids(line: Any, count: int) -> Array:
        iota = partial(mosaic.broadcasted_iota, layout=layout(count)) if laid_out else lax.broadcasted_iota
        along = [iota(jnp.int32, (count, COLUMNS), axis) for axis in (0, 1)]
        return (line + along[0]) * COLUMNS + along[1]

    def tanh(x: Array) -> Array | None:
        return None if softcap is None else jnp.tanh(x * (1 / softcap))

    def capped(x: Array, share: Array | None) -> Array:
        return x if share is None or softcap is None else softcap * share

    def slope(share: Array | None) -> Array | float:
        """Of the soft-cap."""
        return 1.0 if share is None else 1 - share * share

    def filled(value: float) -> Array:
        array = jnp.full((TILE, COLUMNS), value, F32)
        return mosaic.layout_cast(array, layout(TILE)) if laid_out else array

    def masked(line: int) -> Array:
        return jnp.where(ids(line, 1) < vocab, load(line, 1), LOWEST)

    def highest() -> Array:
        top = jnp.max(_over(tiles, lambda line, peak: jnp.maximum(peak, load(line, TILE)), filled(LOWEST)))
        for line in rest:
            top = jnp.maximum(top, jnp.max(masked(line)))
        return capped(top, tanh(top))  # the cap keeps the order

    def exponentiate(line: Any, count: int) -> Array:
        """Write what the gradient is in proportion to; give the exponentials."""
        x = load(line, count)
        share = tanh(x)
        exponentials = jnp.exp2(capped(x, share) * LOG2E - zero)
        if count == 1:
            exponentials = jnp.where(ids(line, 1) < vocab, exponentials, 0.0)
        row[pl.ds(line, count)] = (exponentials * slope(share)).astype(row.dtype)
        return exponentials

    def finish(line: Any, count: int) -> None:
        gradient = load(line, count) * scale
        row[pl.ds(line, count)] = jnp.where(ids(line, count) == target, gradient - own, gradient).astype(row.dtype)

    def finish_tile(line: Any, nothing: Any) -> Any:
        finish(line, TILE)
        return nothing

    picked = row[lax.div(target, COLUMNS), lax.rem(target, COLUMNS)].astype(F32)
    own, picked = weight * slope(tanh(picked)), capped(picked, tanh(picked))
    # No capped logit exceeds the cap, so that it can stand for the highest one as long as exp(-2 · cap) is a number.
    top = highest() if softcap is None or softcap > LARGEST_CAP else jnp.asarray(softcap, F32)
    zero = top * LOG2E
    total = jnp.sum(_over(tiles, lambda line, sums: sums + exponentiate(line, TILE), filled(0.0)))
    for line in rest:
        total = total + jnp.sum(exponentiate(line, 1))
    scale = weight / total
    _over(tiles, finish_tile, 0)
    for line in rest:
        finish(line, 1)
    return top + jnp.log2(total) / LOG2E - picked


def _over(tiles: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Folds `body(first line, carry)` over tiles, UNROLL at a time as long as there are so many."""

    def some(i: Any, carry: Any) -> Any:
        for j in range(UNROLL):
            carry = body((i * UNROLL + j) * TILE, carry)
        return carry

    carry = lax.fori_loop(0, tiles // UNROLL, some, carry)
    for tile in range(tiles // UNROLL * UNROLL, tiles):
        carry = body(tile * TILE, carry)
    return carry


def _copies(lines: int) -> list[Any]:
    return [pl.ds(start, min(COPIED, lines - start)) for start in range(0, lines, COPIED)]
