"""How the kernels are started, and how rows are dealt out to their programs.

On a GPU they run through Pallas and Triton, anywhere else interpreted, which is slow and exact enough for tests.
All of them are bound by memory. Those that work on [rows, width] share one plan: programs walk through tiles of the
input, many short-lived ones where nothing is summed, a few per multiprocessor that stay where sums are. A tile is
`LANES` columns wide, so that one warp holds one row of it and each thread one 16-byte load. Sums over a row are then
shuffles inside a warp, and sums over rows stay in a thread's registers until the program ends: the loops need neither
shared memory nor barriers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from raygpt.engines import choices

try:
    from jax.experimental.pallas import triton as _triton

    triton: Any = _triton
except ImportError:  # JAX 0.11 announces its removal; without it the plain model is used
    triton = None

Array = jax.Array
LANES = choices.LANES  # 32 threads of a warp times 8 bf16 values, 16 bytes


@dataclass(frozen=True)
class Grid:
    """`programs` programs of `warps` warps. A step of a program loads `unroll` tiles of `warps` rows, then computes."""

    programs: int
    warps: int
    unroll: int = 1

    @property
    def step_rows(self) -> int:
        return self.warps * self.unroll


def launch(kernel: Callable[..., None], *, warps: int, aliases: dict[int, int] | None = None, **spec: Any) -> Any:
    """`pallas_call` with our defaults; `spec` holds grid, in_specs, out_specs and out_shape.

    A profile shows the kernel under the name of its Python function.
    """
    spec["input_output_aliases"] = aliases or {}
    if jax.default_backend() != "gpu":
        return pl.pallas_call(kernel, interpret=True, **spec)
    return pl.pallas_call(kernel, compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1), **spec)


def whole(*shape: int) -> pl.BlockSpec:
    """An array that every program sees in full; it reads the rows that are its own."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def walk(first: Any, stride: Any, stop: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Folds `body(step, carry)` over first, first + stride, … below stop."""
    count = lax.div(stop - first + stride - 1, stride)
    return lax.fori_loop(0, count, lambda k, carry: body(first + k * stride, carry), carry)


def check_tiles(name: str, rows: int, width: int, grid: Grid) -> None:
    """Refuses shapes of which a tile would read past the end."""
    if width % LANES:
        raise ValueError(f"{name}: width {width} is not a multiple of {LANES}; pass kernels='plain' to the engine")
    if rows % grid.step_rows:
        raise ValueError(
            f"{name}: {rows} rows are not a multiple of the {grid.step_rows} that a program takes at a time; "
            "pass kernels='plain' to the engine"
        )
