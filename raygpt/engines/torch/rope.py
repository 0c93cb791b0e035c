"""RoPE: queries and keys are rotated by angles that grow with their positions."""

import torch
from torch import Tensor


@torch.library.custom_op("raygpt::rotations", mutates_args=())
def rotations(positions: Tensor, head: int, base: float, share: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of the angles by which RoPE rotates the pairs of a head at positions [time] or [rows, time]:
    [2, …, time, 1, head / 2]. Pairs beyond the share that rotates have angle 0.

    It is an operation of its own so that it is computed once: PyTorch's compiler would compute what comes of so few
    numbers again in every kernel that needs it.
    """
    pair = torch.arange(head // 2, device=positions.device)
    speeds = 1 / base ** (2 * pair.to(dtype) / head)
    angles = positions[..., None, None] * speeds.where(pair < int(share * head / 2), 0)
    return torch.stack([angles.cos(), angles.sin()])


@rotations.register_fake
def _(positions: Tensor, head: int, base: float, share: float, dtype: torch.dtype) -> Tensor:
    return positions.new_empty((2, *positions.shape, 1, head // 2), dtype=dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """RoPE: x [rows, time, heads, head] with every pair (i, i + head / 2) rotated."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
