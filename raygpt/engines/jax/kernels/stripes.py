"""Element-wise kernels with a bias: a program owns one stripe of `LANES` columns and walks down the rows.

A thread's share of a bias is then 8 registers, and so is its share of the bias's gradient, however wide the arrays are.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from raygpt.engines.jax.kernels.launch import LANES, Array, Grid


def groups_of_rows(grid: Grid, rows: int, width: int) -> int:
    """How many programs share a stripe."""
    return max(1, min(grid.programs // (width // LANES), rows // grid.step_rows))


def own_stripe(width: int) -> tuple[Array, Array]:
    """This program's group of rows and its first column; neighbours read neighbouring columns of the same rows."""
    program, stripes = pl.program_id(0), width // LANES
    return lax.div(program, stripes), lax.rem(program, stripes) * LANES


def row_slices(step: Any, grid: Grid) -> list[Any]:
    """The rows of one step as tiles of one row per warp. Load them all first: loads do not pass stores."""
    return [pl.ds(step * grid.step_rows + i * grid.warps, grid.warps) for i in range(grid.unroll)]
