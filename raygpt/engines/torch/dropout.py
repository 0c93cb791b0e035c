"""Dropout whose masks depend on seed, step, row, site and position alone: the same on any mesh.

PyTorch's generator is a stream: its numbers depend on what was drawn before, and on which device. Here every element's
bits are a hash of its row's key and its position in the row, so any process that computes a row drops the same.
"""

import torch
from torch import Tensor

from raygpt.models.random_numbers import mix

START = (0x243F6A88, 0x13198A2E)  # digits of pi: zero would stay zero


def fold(key: tuple[Tensor, Tensor], number: Tensor | int) -> tuple[Tensor, Tensor]:
    """Another key, 64 bits in two int32, for each number."""
    first = mix(key[0] ^ number)
    return first, mix(key[1] + first)


def dropout_keys(seed: int, step: int, rows: Tensor, sites: int) -> Tensor:
    """A key for each dropout site and each row, by its number in the batch: int32 [sites, 2, rows]."""
    key = torch.full_like(rows, START[0]), torch.full_like(rows, START[1])
    for number in (_int32(seed), _int32(step), rows):
        key = fold(key, number)
    site = torch.arange(sites, dtype=rows.dtype, device=rows.device)[:, None]
    return torch.stack(fold(key, site), dim=1)


def dropout(x: Tensor, keys: Tensor | None, rate: float) -> Tensor:
    """Zero a fraction of x [rows, time, width] and scale the rest. `keys` [2, rows] are those of the site."""
    if keys is None or not rate:
        return x
    _, time, width = x.shape
    place = torch.arange(time * width, dtype=keys.dtype, device=x.device).view(time, width)
    first, second = keys[..., None, None].unbind()  # each [rows, 1, 1]
    bits = mix(mix(place ^ first) ^ second)  # [rows, time, width], uniform over int32
    kept = bits >= int(rate * 2**32) - 2**31
    return torch.where(kept, x / (1 - rate), 0)


def _int32(number: int) -> int:
    """The same 32 bits, read with a sign."""
    return (number + 2**31) % 2**32 - 2**31
