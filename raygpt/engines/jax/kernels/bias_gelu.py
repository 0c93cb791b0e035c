"""Bias and GELU (tanh approximation) in one pass, and their gradient with the bias's sum over rows in one pass.

At 65,536 × 3,072 in bf16 the forward pass moves 0.81 GB (187 µs at the 4.3 TB/s of an H200), the gradient 1.21 GB
(281 µs).
"""

from functools import partial
from math import e, log2, pi
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from raygpt.engines.jax.kernels.launch import LANES, Array, Grid, check_tiles, launch, walk, whole
from raygpt.engines.jax.kernels.stripes import groups_of_rows, own_stripe, row_slices

F32 = jnp.float32
FORWARD = Grid(programs=49152, warps=4, unroll=2)
BACKWARD = Grid(programs=528, warps=8, unroll=2)
# 0.5 (1 + tanh(u)) is the logistic function of 2u, and 2u = x (SLOPE + CURVE x²).
SLOPE = 2 * (2 / pi) ** 0.5
CURVE = 0.044715 * SLOPE
LOG2E = log2(e)


def bias_gelu_plain(x: Array, bias: Array) -> Array:
    """The same function in plain JAX."""
    return jax.nn.gelu(x.astype(F32) + bias, approximate=True).astype(x.dtype)


@jax.custom_vjp
def bias_gelu(x: Array, bias: Array) -> Array:
    """`gelu(x + bias)` for x [rows, width] and bias [width] in fp32."""
    rows, width = x.shape
    check_tiles("bias_gelu", rows, width, FORWARD)
    groups = groups_of_rows(FORWARD, rows, width)
    return launch(
        partial(bias_gelu_forward_kernel, grid=FORWARD, groups=groups),
        warps=FORWARD.warps,
        grid=(groups * (width // LANES),),
        in_specs=[whole(rows, width), whole(width)],
        out_specs=whole(rows, width),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, bias)


def bias_gelu_forward_kernel(x: Any, bias: Any, activated: Any, *, grid: Grid, groups: int) -> None:
    """References, the last to the result."""
    rows, width = x.shape
    group, column = own_stripe(width)
    cols = pl.ds(column, LANES)
    offset = bias[cols][None, :]

    def activate(step: Any, _: Any) -> Any:
        tiles = [(here, x[here, cols]) for here in row_slices(step, grid)]
        for here, tile in tiles:
            value = tile.astype(F32) + offset
            activated[here, cols] = (value * _gate(value)).astype(activated.dtype)
        return _

    walk(group, groups, rows // grid.step_rows, activate, 0)


def _backward(saved: tuple[Array, Array], d_activated: Array) -> tuple[Array, Array]:
    x, bias = saved
    rows, width = x.shape
    check_tiles("bias_gelu", rows, width, BACKWARD)
    groups = groups_of_rows(BACKWARD, rows, width)
    array = whole(rows, width)
    dx, partials = launch(
        partial(bias_gelu_backward_kernel, grid=BACKWARD, groups=groups),
        warps=BACKWARD.warps,
        grid=(groups * (width // LANES),),
        in_specs=[array, whole(width), array],
        out_specs=[array, whole(groups, width)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((groups, width), F32)],
    )(x, bias, d_activated)
    return dx, partials.sum(0)


def bias_gelu_backward_kernel(
    x: Any, bias: Any, d_activated: Any, dx: Any, partials: Any, *, grid: Grid, groups: int
) -> None:
    """References, the last two to results; a row of partials [groups, width] is one group's share of the bias's."""
    rows, width = x.shape
    group, column = own_stripe(width)
    cols = pl.ds(column, LANES)
    offset = bias[cols][None, :]

    def differentiate(step: Any, d_bias: Any) -> Any:
        tiles = [(here, x[here, cols], d_activated[here, cols]) for here in row_slices(step, grid)]
        for here, tile, gradient in tiles:
            value = tile.astype(F32) + offset
            gate = _gate(value)
            slope = gate + value * gate * (1 - gate) * (SLOPE + 3 * CURVE * value * value)
            product = gradient.astype(F32) * slope
            dx[here, cols] = product.astype(dx.dtype)
            d_bias += product
        return d_bias

    d_bias = walk(group, groups, rows // grid.step_rows, differentiate, jnp.zeros((grid.warps, LANES), F32))
    partials[group, cols] = d_bias.sum(0)


def _gate(x: Array) -> Array:
    """The logistic function of x (SLOPE + CURVE x²). A squared reciprocal root is cheaper than a division."""
    root = lax.rsqrt(1 + jnp.exp2(x * (-LOG2E * SLOPE - LOG2E * CURVE * x * x)))
    return root * root


bias_gelu.defvjp(lambda x, bias: (bias_gelu(x, bias), (x, bias)), _backward)
