"""RMSNorm over each head of queries and keys and their rotation by RoPE in one pass, and their gradient in one pass.

Queries, keys and values come from one product and their gradients go into one array: so the kernels read and write
parts of it. Values stay where they are; their gradient is copied. A program owns a head of `ROWS` tokens.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

ROWS = 16  # tokens of a program: with a head of 128 each of its threads has 8 numbers of both halves, 16 bytes


def can_run(joint: Tensor, rotation: Tensor | None, head: int) -> bool:
    """On a GPU, in 16 bits, for heads of 64 or 128 at positions that all rows share."""
    fits = joint.is_cuda and joint.element_size() == 2 and head in (64, 128) and joint.shape[:-1].numel() % ROWS == 0
    return triton is not None and fits and rotation is not None and rotation.ndim == 4


def norm_rotate(
    joint: Tensor,
    rotation: Tensor,
    gains: tuple[Tensor | None, Tensor | None],
    heads: int,
    kv_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [rows, time, heads, head], keys and values [rows, time, kv_heads, head] of their joint product, of which
    the values are a view.

    The joint product is [rows, time, (heads + 2 · kv_heads) · head]; rotation has cosines and sines [2, time, 1,
    head / 2], gains [head] those of the norms of queries and keys, if any.
    """
    query, key, value = _NormRotate.apply(joint, rotation, *gains, heads, kv_heads, epsilon)
    return query, key, value


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        rotation: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, shape = 2 * rotation.shape[-1], joint.shape[:2]
        joint, rotation = joint.contiguous(), rotation.contiguous()
        query, key = joint.new_empty((*shape, heads, head)), joint.new_empty((*shape, kv_heads, head))
        gains = rotation if query_gain is None or key_gain is None else torch.stack([query_gain, key_gain]).float()
        ctx.heads, ctx.kv_heads, ctx.epsilon, ctx.has_gains = heads, kv_heads, epsilon, query_gain is not None
        ctx.save_for_backward(joint, rotation, gains)
        _forward_kernel[(shape.numel() // ROWS, heads + kv_heads)](
            joint,
            rotation,
            gains,
            query,
            key,
            time=shape[1],
            epsilon=epsilon,
            heads=heads,
            kv_heads=kv_heads,
            half=head // 2,
            rows=ROWS,
            has_gains=ctx.has_gains,
        )
        return query, key, joint.unflatten(-1, (-1, head))[:, :, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor, d_value: Tensor) -> tuple[Tensor | None, ...]:
        joint, rotation, gains = ctx.saved_tensors
        head, blocks = 2 * rotation.shape[-1], joint.shape[:2].numel() // ROWS
        normed = ctx.heads + ctx.kv_heads
        d_joint = torch.empty_like(joint)
        parts = rotation.new_empty((blocks, normed, head) if ctx.has_gains else (1,), dtype=torch.float32)
        _backward_kernel[(blocks, normed + ctx.kv_heads)](
            joint,
            rotation,
            gains,
            d_query.contiguous(),
            d_key.contiguous(),
            d_value.contiguous(),
            d_joint,
            parts,
            time=joint.shape[1],
            epsilon=ctx.epsilon,
            heads=ctx.heads,
            kv_heads=ctx.kv_heads,
            half=head // 2,
            rows=ROWS,
            has_gains=ctx.has_gains,
        )
        if not ctx.has_gains:
            return d_joint, None, None, None, None, None, None
        d_gains = parts[:, : ctx.heads].sum((0, 1)), parts[:, ctx.heads :].sum((0, 1))
        return d_joint, None, *d_gains, None, None, None


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _forward_kernel(  # type: ignore[no-untyped-def]  # PyTorch's compiler runs this text where only tl is known
        joint,
        rotation,
        gains,
        query,
        key,
        time,
        epsilon,
        heads: tl.constexpr,
        kv_heads: tl.constexpr,
        half: tl.constexpr,
        rows: tl.constexpr,
        has_gains: tl.constexpr,
    ):
        head = tl.program_id(1)
        token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
        lanes = tl.arange(0, half)[None, :]
        source = joint + token * ((heads + 2 * kv_heads) * 2 * half) + head * 2 * half + lanes
        a, b = tl.load(source), tl.load(source + half)
        if head < heads:
            target = query + token * (heads * 2 * half) + head * 2 * half + lanes
        else:
            target = key + token * (kv_heads * 2 * half) + (head - heads) * 2 * half + lanes
        x, y = a.to(tl.float32), b.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * half) + epsilon)[:, None]
        x, y = x * scale, y * scale
        if has_gains:
            gain = gains + (head >= heads) * 2 * half + lanes
            x, y = x * tl.load(gain), y * tl.load(gain + half)
        angles = rotation + token % time * half + lanes
        cos, sin = tl.load(angles), tl.load(angles + time * half)
        tl.store(target, (x * cos - y * sin).to(a.dtype))
        tl.store(target + half, (y * cos + x * sin).to(b.dtype))

    @triton.jit  # type: ignore[untyped-decorator]
    def _backward_kernel(  # type: ignore[no-untyped-def]
        joint,
        rotation,
        gains,
        d_query,
        d_key,
        d_value,
        d_joint,
        parts,
        time,
        epsilon,
        heads: tl.constexpr,
        kv_heads: tl.constexpr,
        half: tl.constexpr,
        rows: tl.constexpr,
        has_gains: tl.constexpr,
    ):
        block, head = tl.program_id(0), tl.program_id(1)
        token = block.to(tl.int64) * rows + tl.arange(0, rows)[:, None]
        lanes = tl.arange(0, half)[None, :]
        here = token * ((heads + 2 * kv_heads) * 2 * half) + head * 2 * half + lanes
        if head < heads:
            source = d_query + token * (heads * 2 * half) + head * 2 * half + lanes
        elif head < heads + kv_heads:
            source = d_key + token * (kv_heads * 2 * half) + (head - heads) * 2 * half + lanes
        else:
            source = d_value + token * (kv_heads * 2 * half) + (head - heads - kv_heads) * 2 * half + lanes
        da, db = tl.load(source), tl.load(source + half)
        if head < heads + kv_heads:
            x, y = tl.load(joint + here).to(tl.float32), tl.load(joint + here + half).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * half) + epsilon)[:, None]
            x, y = x * scale, y * scale
            angles = rotation + token % time * half + lanes
            cos, sin = tl.load(angles), tl.load(angles + time * half)
            u, v = da.to(tl.float32), db.to(tl.float32)
            dx, dy = u * cos + v * sin, v * cos - u * sin
            if has_gains:
                part = parts + (block * (heads + kv_heads) + head) * 2 * half + tl.arange(0, half)
                tl.store(part, tl.sum(x * dx, 0))
                tl.store(part + half, tl.sum(y * dy, 0))
                gain = gains + (head >= heads) * 2 * half + lanes
                dx, dy = dx * tl.load(gain), dy * tl.load(gain + half)
            along = tl.sum(x * dx + y * dy, 1)[:, None] / (2 * half)
            da, db = ((dx - x * along) * scale).to(da.dtype), ((dy - y * along) * scale).to(db.dtype)
        tl.store(d_joint + here, da)
        tl.store(d_joint + here + half, db)
