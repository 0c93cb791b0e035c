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
LARGEST_CAP = 40.0  # of which exp(-2 · cap) is a number in fp32
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


def _differentiate(row: Any, target: Array, weight: Array, **settings: Any) -> Array:
    """Turn the logits in a row into their gradient, and give the loss."""
    logits = _Logits(row, **settings)
    picked, slope = logits.capped(row[lax.div(target, COLUMNS), lax.rem(target, COLUMNS)].astype(F32))
    top = logits.highest()
    total = logits.exponentiate(top)
    logits.finish(target, weight / total, weight * slope)
    return top + jnp.log2(total) / LOG2E - picked


class _Logits:
    """One token's logits, in shared memory, and the passes over them. `laid_out` says how a tile lies in registers,
    which an interpreter does not know."""

    def __init__(self, row: Any, vocab: int, softcap: float | None, laid_out: bool):
        self._row, self._vocab, self._softcap, self._laid_out = row, vocab, softcap, laid_out
        self._tiles = vocab // (TILE * COLUMNS)  # without padding
        self._rest = range(self._tiles * TILE, row.shape[0])  # lines that are taken one by one, with a mask

    def capped(self, x: Array) -> tuple[Array, Array | float]:
        """Logits after the soft-cap, and its slope."""
        if self._softcap is None:
            return x, 1.0
        tanh = jnp.tanh(x * (1 / self._softcap))
        return self._softcap * tanh, 1 - tanh * tanh

    def highest(self) -> Array:
        """The highest logit. The soft-cap stands for it as long as exp(-2 · cap) is a number: none exceeds it."""
        if self._softcap is not None and self._softcap <= LARGEST_CAP:
            return jnp.asarray(self._softcap, F32)
        peak = lambda line, peak: jnp.maximum(peak, self._load(line, TILE))  # noqa: E731
        top = jnp.max(_over(self._tiles, peak, self._filled(LOWEST)))
        for line in self._rest:
            top = jnp.maximum(top, jnp.max(jnp.where(self._is_token(line), self._load(line, 1), LOWEST)))
        return self.capped(top)[0]  # the cap keeps the order

    def exponentiate(self, top: Array) -> Array:
        """Write what the gradient is in proportion to; give the sum of the exponentials."""
        zero = top * LOG2E

        def write(line: Any, count: int) -> Array:
            x, slope = self.capped(self._load(line, count))
            exponentials = jnp.exp2(x * LOG2E - zero)
            if count == 1:
                exponentials = jnp.where(self._is_token(line), exponentials, 0.0)
            self._row[pl.ds(line, count)] = (exponentials * slope).astype(self._row.dtype)
            return exponentials

        total = jnp.sum(_over(self._tiles, lambda line, sums: sums + write(line, TILE), self._filled(0.0)))
        for line in self._rest:
            total = total + jnp.sum(write(line, 1))
        return total

    def finish(self, target: Array, scale: Array, at_target: Array) -> None:
        """Scale what `exponentiate` wrote, and subtract what the target has besides."""

        def write(line: Any, count: int) -> None:
            gradient = self._load(line, count) * scale
            gradient = jnp.where(self._ids(line, count) == target, gradient - at_target, gradient)
            self._row[pl.ds(line, count)] = gradient.astype(self._row.dtype)

        def write_tile(line: Any, nothing: Any) -> Any:
            write(line, TILE)
            return nothing

        _over(self._tiles, write_tile, 0)
        for line in self._rest:
            write(line, 1)

    def _is_token(self, line: int) -> Array:
        return self._ids(line, 1) < self._vocab

    def _load(self, line: Any, count: int) -> Array:
        here = pl.ds(line, count)
        if not self._laid_out:
            return self._row[here].astype(F32)
        return mosaic.load(self._row, (here, slice(None)), layout=_layout(count)).astype(F32)

    def _ids(self, line: Any, count: int) -> Array:
        iota = partial(mosaic.broadcasted_iota, layout=_layout(count)) if self._laid_out else lax.broadcasted_iota
        along = [iota(jnp.int32, (count, COLUMNS), axis) for axis in (0, 1)]
        return (line + along[0]) * COLUMNS + along[1]

    def _filled(self, value: float) -> Array:
        array = jnp.full((TILE, COLUMNS), value, F32)
        return mosaic.layout_cast(array, _layout(TILE)) if self._laid_out else array


def _layout(count: int) -> Any:
    return mosaic.Layout.WG_STRIDED((count, COLUMNS), vec_size=count)


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
