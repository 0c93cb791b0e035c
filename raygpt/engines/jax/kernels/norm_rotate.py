"""RMSNorm over each head of queries or keys and their rotation by RoPE in one pass, and their gradient in one pass.

A warpgroup takes `ROWS` tokens at a time and walks through their heads: cosines and sines are loaded once for all of
them. A thread has 8 neighbouring numbers of a head's first half, one load of 16 bytes, and their partners in the second
half, so that a rotation needs no other thread and a mean only shuffles between the few threads of a head. Both
directions touch each array once: 0.2 GB forward and 0.3 GB backward for 65,536 × 768 numbers, 47 and 70 µs at the
4.3 TB/s of an H200.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from raygpt.config import Model

Array = jax.Array
F32 = jnp.float32
ROWS = 32  # tokens of a tile
VECTOR = 8  # 16-bit numbers that a thread loads at once
FEWEST_PROGRAMS = 512  # about four for each multiprocessor


def can_run(device: Any, dtype: Any, time: int, model: Model) -> bool:
    """For RMSNorm and RoPE on Hopper, in 16 bits, with whole tiles of tokens and heads of 64 or 128; and if this JAX
    still compiles it."""
    does_both = model.qk_norm and model.norm == "rms" and model.position == "rope"
    hopper = device.platform == "gpu" and float(device.compute_capability) == 9.0
    fits = time % ROWS == 0 and model.size_of_head in (64, 128) and jnp.dtype(dtype).itemsize == 2
    return does_both and hopper and fits and compiles()


@cache
def compiles() -> bool:
    """Mosaic's interface still changes between releases of JAX: try it on a small case. That needs no GPU."""
    like = jax.ShapeDtypeStruct
    x, angles = like((2 * ROWS, 2 * 128), jnp.bfloat16), like((ROWS, 64), F32)
    try:
        for gain in (None, like((128,), F32)):
            _forward_call.trace(x, angles, angles, gain, 1e-6).lower(lowering_platforms=("cuda",))
            _backward_call.trace(x, x, angles, angles, gain, 1e-6).lower(lowering_platforms=("cuda",))
    except Exception:  # any error: this JAX cannot compile it, and the plain function computes the same
        return False
    return True


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def norm_rotate(x: Array, cos: Array, sin: Array, gain: Array | None, epsilon: float, interpret: Any = None) -> Array:
    """x [rows, time, heads, head] with each head normed, multiplied by the gain [head], if any, and rotated.

    Pair n of a head is its numbers n and n + head / 2; cosines and sines are [time, head / 2].
    """
    rows, time, heads, head = x.shape
    flat = x.reshape(rows * time, heads * head)
    return _forward_call(flat, cos, sin, gain, epsilon, interpret).reshape(x.shape)


def _forward(x: Array, cos: Array, sin: Array, gain: Array | None, epsilon: float, interpret: Any) -> Any:
    return norm_rotate(x, cos, sin, gain, epsilon, interpret), (x, cos, sin, gain)


def _backward(epsilon: float, interpret: Any, saved: Any, d_rotated: Array) -> Any:
    x, cos, sin, gain = saved
    rows, time, heads, head = x.shape
    flat = rows * time, heads * head
    results = _backward_call(x.reshape(flat), d_rotated.reshape(flat), cos, sin, gain, epsilon, interpret)
    d_gain = None if gain is None else jnp.concatenate([part.sum((0, 1)) for part in results[1:]])
    return results[0].reshape(x.shape), None, None, d_gain


norm_rotate.defvjp(_forward, _backward)


@partial(jax.jit, static_argnames=("epsilon", "interpret"))  # compiled once for all layers
def _forward_call(x: Array, cos: Array, sin: Array, gain: Array | None, epsilon: float, interpret: Any = None) -> Array:
    tiles = _Tiles(x.shape, cos.shape, interpret)
    gains = () if gain is None else (_spread(gain, 0), _spread(gain, 1))

    def kernel(x: Any, cos: Any, sin: Any, *rest: Any) -> None:
        *gains, rotated = rest

        def one(tile: Any, nothing: Any) -> Any:
            turn = tiles.angles(cos, tile), tiles.angles(sin, tile)
            for head in range(tiles.heads):
                a, b, _ = tiles.normed(x, tile, head, epsilon)
                if gains:
                    a, b = a * tiles.gain(gains[0]), b * tiles.gain(gains[1])
                tiles.store(rotated, tile, head, a * turn[0] - b * turn[1], b * turn[0] + a * turn[1])
            return nothing

        tiles.walk(one, 0)

    return tiles.launch(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, cos, sin, *gains)


@partial(jax.jit, static_argnames=("epsilon", "interpret"))
def _backward_call(
    x: Array, d_rotated: Array, cos: Array, sin: Array, gain: Array | None, epsilon: float, interpret: Any = None
) -> list[Array]:
    """The gradient of x; with a gain also that of its halves, in parts [programs, ROWS, head / 2] to be summed."""
    tiles = _Tiles(x.shape, cos.shape, interpret)
    gains = () if gain is None else (_spread(gain, 0), _spread(gain, 1))

    def kernel(x: Any, d_rotated: Any, cos: Any, sin: Any, *rest: Any) -> None:
        gains, (d_x, *d_gains) = rest[: len(rest) // 2], rest[len(rest) // 2 :]

        def one(tile: Any, sums: Any) -> Any:
            turn = tiles.angles(cos, tile), tiles.angles(sin, tile)
            for head in range(tiles.heads):
                da, db = tiles.load(d_rotated, tile, head)
                da, db = da * turn[0] + db * turn[1], db * turn[0] - da * turn[1]
                a, b, scale = tiles.normed(x, tile, head, epsilon)
                if gains:
                    sums = sums[0] + a * da, sums[1] + b * db
                    da, db = da * tiles.gain(gains[0]), db * tiles.gain(gains[1])
                along = tiles.mean(a * da + b * db)
                tiles.store(d_x, tile, head, (da - a * along) * scale, (db - b * along) * scale)
            return sums

        sums = tiles.walk(one, (tiles.zeros(), tiles.zeros()) if gains else 0)
        for d_gain, part in zip(d_gains, sums if gains else (), strict=True):
            d_gain[lax.axis_index("program")] = part

    like = jax.ShapeDtypeStruct
    parts = [like((tiles.programs, ROWS, tiles.half), F32)] * len(gains)
    return tiles.launch(kernel, [like(x.shape, x.dtype), *parts])(x, d_rotated, cos, sin, *gains)


def _spread(gain: Array, half: int) -> Array:
    """One half of a gain for each row of a tile, as a tile lies in registers."""
    return jnp.broadcast_to(jnp.split(gain.astype(F32), 2)[half], (ROWS, len(gain) // 2))


class _Tiles:
    """Arrays [tokens, heads · head] as tiles of ROWS tokens and half a head, and how a warpgroup walks through them."""

    def __init__(self, shape: tuple[int, ...], angles: tuple[int, ...], interpret: Any):
        (tokens, width), (self.time, self.half) = shape, angles
        self.heads, self.interpret = width // (2 * self.half), interpret
        tiles, self.steps = tokens // ROWS, 1  # of a program
        while tiles % (2 * self.steps) == 0 and tiles // (2 * self.steps) >= FEWEST_PROGRAMS:
            self.steps *= 2
        self.programs = tiles // self.steps
        threads = self.half // VECTOR  # of a row of half a head
        rows = 32 // threads  # of a warp
        tiling = mosaic.Tiling(((4 * rows, self.half), (rows, self.half), (VECTOR,)))
        self._layout = mosaic.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def launch(self, kernel: Any, out_type: Any) -> Any:
        interpreted = {} if self.interpret is None else {"interpret": self.interpret}
        # A thread reads and writes its own numbers alone, so there is nothing to wait for.
        params = mosaic.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
        return mosaic.kernel(
            kernel,
            out_type=out_type,
            grid=(self.programs,),
            grid_names=("program",),
            compiler_params=params,
            **interpreted,
        )

    def walk(self, body: Any, carry: Any) -> Any:
        """Folds `body(tile, carry)` over this program's tiles."""
        first = lax.axis_index("program") * self.steps
        return lax.fori_loop(0, self.steps, lambda step, carry: body(first + step, carry), carry)

    def load(self, array: Any, tile: Any, head: int) -> tuple[Array, Array]:
        """Both halves of a head."""
        a, b = (self._load(array, tile * ROWS, (2 * head + half) * self.half) for half in (0, 1))
        return a, b

    def normed(self, array: Any, tile: Any, head: int, epsilon: float) -> tuple[Array, Array, Array]:
        """Both halves of a head with a mean square of 1, and what they were multiplied by for that."""
        a, b = self.load(array, tile, head)
        scale = lax.rsqrt(self.mean(a * a + b * b) + epsilon)
        return a * scale, b * scale, scale

    def angles(self, array: Any, tile: Any) -> Array:
        return self._load(array, lax.rem(tile * ROWS, self.time), 0)

    def gain(self, array: Any) -> Array:
        return self._load(array, 0, 0)

    def mean(self, x: Array) -> Array:
        """Over a head, of which x is the sum of both halves, for each number of a tile."""
        return self._laid_out(lax.broadcast_in_dim(jnp.sum(x, axis=1) / (2 * self.half), x.shape, [0]))

    def store(self, array: Any, tile: Any, head: int, a: Array, b: Array) -> None:
        for half, x in enumerate((a, b)):
            array[pl.ds(tile * ROWS, ROWS), pl.ds((2 * head + half) * self.half, self.half)] = x.astype(array.dtype)

    def zeros(self) -> Array:
        return self._laid_out(jnp.zeros((ROWS, self.half), F32))

    def _laid_out(self, x: Array) -> Array:
        return x if self.interpret else mosaic.layout_cast(x, self._layout)

    def _load(self, array: Any, row: Any, column: int) -> Array:
        here = pl.ds(row, ROWS), pl.ds(column, self.half)
        if self.interpret:
            return array[here].astype(F32)
        return mosaic.load(array, here, layout=self._layout, optimized=False).astype(F32)
