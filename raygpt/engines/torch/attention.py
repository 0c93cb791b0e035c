"""Causal attention by PyTorch's fused kernels, and with a cache of what was read before."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value [rows, heads, time, head_dim] to the same


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each token to those before it and itself; on CUDA a kernel that never stores the scores."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def visible(start: int, end: int, device: torch.device) -> Tensor | None:
    """What each token from `start` on may look at, [time, end]: all up to itself. A single one sees everything."""
    if end == start + 1:
        return None
    place = torch.arange(end, device=device)
    return place <= place[start:, None]


class Cache(NamedTuple):
    """Keys and values of the tokens so far: each [layers, rows, heads, context, head_dim]."""

    keys: Tensor
    values: Tensor

    def attention(self, layer: int, start: int) -> Attention:
        """Attention of tokens from `start` on to all up to their own; their keys and values are added."""

        def cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            end = start + query.shape[2]
            self.keys[layer, :, :, start:end] = key
            self.values[layer, :, :, start:end] = value
            keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible(start, end, query.device))

        return cached
