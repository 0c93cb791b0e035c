"""Bias, residual add and LayerNorm in one pass, and their gradient in one pass.

Both directions touch four arrays of [rows, width] once: 0.40 GB at 65,536 × 768 in bf16, 94 µs at the 4.3 TB/s of an
H200. The gradient's sums over rows (scale, shift, bias) are collected on the way, one partial row per program.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from raygpt.engines.jax.kernels.launch import LANES, Array, Grid, check_tiles, launch, walk, whole

F32 = jnp.float32
# One warp a program: then even the stores of the statistics need no barrier.
FORWARD = Grid(programs=8448, warps=1)
BACKWARD = Grid(programs=1056, warps=1)  # 227 registers a thread at width 768: eight programs fit a multiprocessor


def add_norm_plain(
    hidden: Array, update: Array, bias: Array, scale: Array, shift: Array, epsilon: float
) -> tuple[Array, Array]:
    """The same function in plain JAX."""
    total = (hidden.astype(F32) + update.astype(F32) + bias).astype(hidden.dtype)
    centered = total.astype(F32) - total.astype(F32).mean(-1, keepdims=True)
    rstd = lax.rsqrt((centered * centered).mean(-1, keepdims=True) + epsilon)
    return total, (centered * rstd * scale + shift).astype(hidden.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def add_norm(
    hidden: Array, update: Array, bias: Array, scale: Array, shift: Array, epsilon: float
) -> tuple[Array, Array]:
    """`hidden + update + bias` and its LayerNorm. Arrays are [rows, width], vectors [width] in fp32."""
    return _forward(hidden, update, bias, scale, shift, epsilon)[0]


def _forward(hidden: Array, update: Array, bias: Array, scale: Array, shift: Array, epsilon: float) -> Any:
    rows, width = hidden.shape
    check_tiles("add_norm", rows, width, FORWARD)
    array, vector, statistic = whole(rows, width), whole(width), whole(rows)
    like = jax.ShapeDtypeStruct
    total, normed, mean, rstd = launch(
        partial(add_norm_forward_kernel, tile=FORWARD.step_rows, epsilon=epsilon),
        warps=FORWARD.warps,
        grid=(min(FORWARD.programs, rows // FORWARD.step_rows),),
        in_specs=[array, array, vector, vector, vector],
        out_specs=[array, array, statistic, statistic],
        out_shape=[like(hidden.shape, hidden.dtype)] * 2 + [like((rows,), F32)] * 2,
    )(hidden, update, bias, scale, shift)
    return (total, normed), (total, scale, mean, rstd)


def add_norm_forward_kernel(
    hidden: Any,
    update: Any,
    bias: Any,
    scale: Any,
    shift: Any,
    total: Any,
    normed: Any,
    mean: Any,
    rstd: Any,
    *,
    tile: int,
    epsilon: float,
) -> None:
    """References, the last four to results; mean and rstd are [rows]."""
    rows, width = hidden.shape
    parts = _columns(width)
    biases, scales, shifts = ([vector[cols][None, :] for cols in parts] for vector in (bias, scale, shift))

    def normalize(step: Any, _: Any) -> Any:
        here = pl.ds(step * tile, tile)
        loaded = [(hidden[here, cols], update[here, cols]) for cols in parts]
        # Statistics are those of the rounded sum: it is what the backward pass will read.
        sums = [
            (h.astype(F32) + u.astype(F32) + b).astype(total.dtype) for (h, u), b in zip(loaded, biases, strict=True)
        ]
        xs = [x.astype(F32) for x in sums]
        center = _row_sum(xs) / width
        xs = [x - center[:, None] for x in xs]
        inverse = lax.rsqrt(_row_sum([x * x for x in xs]) / width + epsilon)
        for cols, x, rounded, g, b in zip(parts, xs, sums, scales, shifts, strict=True):
            total[here, cols] = rounded
            normed[here, cols] = (x * inverse[:, None] * g + b).astype(normed.dtype)
        mean[here], rstd[here] = center, inverse
        return _

    walk(pl.program_id(0), pl.num_programs(0), rows // tile, normalize, 0)


def _backward(epsilon: float, saved: Any, cotangents: tuple[Array, Array]) -> Any:
    total, scale, mean, rstd = saved
    d_total, d_normed = cotangents
    rows, width = total.shape
    check_tiles("add_norm", rows, width, BACKWARD)
    programs = min(BACKWARD.programs, rows // BACKWARD.step_rows)
    array, vector, statistic = whole(rows, width), whole(width), whole(rows)
    d_hidden, partials = launch(
        partial(add_norm_backward_kernel, tile=BACKWARD.step_rows),
        warps=BACKWARD.warps,
        grid=(programs,),
        in_specs=[array, array, array, vector, statistic, statistic],
        out_specs=[array, pl.BlockSpec((None, 3, width), lambda i: (i, 0, 0))],
        out_shape=[jax.ShapeDtypeStruct(total.shape, total.dtype), jax.ShapeDtypeStruct((programs, 3, width), F32)],
    )(total, d_normed, d_total, scale, mean, rstd)
    d_scale, d_shift, d_bias = partials.sum(0)
    return d_hidden, d_hidden, d_bias, d_scale, d_shift


def add_norm_backward_kernel(
    total: Any,
    d_normed: Any,
    d_total: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    d_hidden: Any,
    partials: Any,
    *,
    tile: int,
) -> None:
    """References, the last two to results; partials [3, width] are this program's share of three gradients."""
    rows, width = total.shape
    parts = _columns(width)
    scales = [scale[cols][None, :] for cols in parts]
    first, stride, stop = pl.program_id(0), pl.num_programs(0), rows // tile

    def load(step: Any) -> Any:
        here = pl.ds(step * tile, tile)
        arrays = [(total[here, cols], d_normed[here, cols], d_total[here, cols]) for cols in parts]
        return arrays, mean[here], rstd[here]

    def differentiate(step: Any, sums: Any, loaded: Any) -> Any:
        here = pl.ds(step * tile, tile)
        arrays, center, inverse = loaded
        center, inverse = center[:, None], inverse[:, None]
        xs = [(x.astype(F32) - center) * inverse for x, _, _ in arrays]
        dys = [dy.astype(F32) for _, dy, _ in arrays]
        scaled = [dy * g for dy, g in zip(dys, scales, strict=True)]
        along_x = _row_sum([dy * x for dy, x in zip(scaled, xs, strict=True)])[:, None] / width
        along_1 = _row_sum(scaled)[:, None] / width
        added = []
        for cols, x, dy, (_, _, residual), g, (d_scale, d_shift, d_bias) in zip(
            parts, xs, dys, arrays, scales, sums, strict=True
        ):
            dx = (dy * g - along_1 - x * along_x) * inverse + residual.astype(F32)
            d_hidden[here, cols] = dx.astype(d_hidden.dtype)
            added.append((d_scale + dy * x, d_shift + dy, d_bias + dx))
        return added

    def differentiate_and_load(step: Any, carry: Any) -> Any:
        """A program's next tile is on its way while this one is worked on: 20 µs of 123 on an H200."""
        sums, loaded = carry
        upcoming = load(jnp.minimum(step + stride, stop - 1))
        return differentiate(step, sums, loaded), upcoming

    zeros = [(jnp.zeros((tile, LANES), F32),) * 3 for _ in parts]
    sums, _ = walk(first, stride, stop, differentiate_and_load, (zeros, load(first)))
    for cols, part in zip(parts, sums, strict=True):
        for row, collected in enumerate(part):
            partials[row, cols] = collected.sum(0)


def _columns(width: int) -> list[Any]:
    return [pl.ds(start, LANES) for start in range(0, width, LANES)]


def _row_sum(tiles: list[Array]) -> Array:
    """One sum per row: the tiles are added first, so that the shuffles are paid once."""
    return sum(tiles[1:], tiles[0]).sum(1)


add_norm.defvjp(_forward, _backward)
