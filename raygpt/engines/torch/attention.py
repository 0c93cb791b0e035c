"""Causal attention by PyTorch's fused kernels, and with a key-value cache."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from raygpt.engines.base import Positions

# query [rows, heads, time, head], key and value [rows, kv_heads, time, head] to [rows, heads, time, head]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each token to itself and those before; on CUDA by a kernel that never stores the scores."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=_is_grouped(query, key))


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    """Whether several heads share a key."""
    return query.shape[1] != key.shape[1]


class Span:
    """The positions of tokens [rows, time] that follow `start` others: the same ones in all rows, or of each row."""

    def __init__(self, start: Positions, time: int, device: torch.device):
        self.start = start
        own = torch.arange(time, device=device)
        if isinstance(start, int):
            self.end = start + time
            self.positions = own + start  # [time]
        else:
            self.end = int(start.max()) + time  # known on the host, so that nothing waits for the device
            self.positions = torch.as_tensor(start).to(device).long()[:, None] + own  # [rows, time]

    @property
    def visible(self) -> Tensor | None:
        """The positions up to `end` that each token attends to, up to its own: [time, end] or [rows, 1, time, end].
        None means all."""
        if isinstance(self.start, int) and self.end == self.start + 1:
            return None
        seen = torch.arange(self.end, device=self.positions.device) <= self.positions[..., None]
        return seen if seen.ndim == 2 else seen[:, None]

    def write(self, cache: Tensor, new: Tensor) -> Tensor:
        """Write new values [rows, kv_heads, time, head] into a layer's cache. Returns the cache up to `end`."""
        if isinstance(self.start, int):
            cache[:, :, self.start : self.end] = new
        else:
            rows = torch.arange(len(cache), device=cache.device)[:, None]
            cache[rows, :, self.positions] = new.transpose(1, 2)
        return cache[:, :, : self.end]


class Cache(NamedTuple):
    """Keys and values of the tokens so far: each [layers, rows, kv_heads, context, head]."""

    keys: Tensor
    values: Tensor

    def attention(self, layer: int, span: Span, visible: Tensor | None) -> Attention:
        """Attention of a span's tokens to all up to their own; their keys and values are added."""

        def cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = span.write(self.keys[layer], key), span.write(self.values[layer], value)
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, enable_gqa=_is_grouped(query, key)
            )

        return cached
