"""Texts generated side by side by PyTorch: every slot's cache in one tensor, and tokens drawn on the device.

On a GPU a step, with the drawing of its tokens, is captured once as a CUDA graph, which spares launching its few
hundred kernels from Python. What it reads and writes is therefore always in the same place.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from raygpt.engines import base, token_sampling
from raygpt.engines.base import ALTERNATIVES, Drawn, SlotInputs
from raygpt.engines.torch.attention import Attention
from raygpt.engines.torch.model import GPT
from raygpt.engines.torch.reader import TorchReader


class TorchSlots:
    """Reads and writes its cache in place; shapes are always of all slots and the whole context."""

    def __init__(self, reader: TorchReader, count: int):
        self.reader, self.count, self.device = reader, count, reader.device
        self.part = min(base.PART["cpu" if self.device.type == "cpu" else "gpu"], reader.context)
        shape = reader.cache_shape(count)
        self._keys, self._values = (torch.zeros(shape, dtype=reader.dtype, device=self.device) for _ in range(2))
        self._tokens = torch.zeros(count, dtype=torch.int32, device=self.device)  # the last of each, read next
        fields = len(SlotInputs._fields)
        self._numbers = torch.zeros(fields, count, dtype=torch.int32, device=self.device)  # packed SlotInputs
        self._bias = torch.zeros(count, reader.vocab, device=self.device)
        self._logits = torch.zeros(count, reader.vocab, device=self.device)  # of the last step
        self._drawn = torch.zeros(3, count, dtype=torch.int32, device=self.device)  # of the last step, as _packed
        self._graphs: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()  # by checkpoint

    @torch.inference_mode()
    def read(self, state: GPT, slot: int, ids: NDArray[np.int32], start: int) -> Tensor:
        place = torch.arange(start, start + len(ids), device=self.device)
        visible = torch.arange(self.reader.context, device=self.device) <= place[:, None]  # [part, context]

        def attention(layer: int) -> Attention:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys, values = self._keys[layer, slot : slot + 1], self._values[layer, slot : slot + 1]
                keys[:, :, start : start + len(ids)], values[:, :, start : start + len(ids)] = key, value
                return _attend(query, keys, values, visible)

            return attend

        return self.reader.hidden(state, self._put(ids)[None], place, attention)[0]

    @torch.inference_mode()
    def score(self, state: GPT, hidden: Tensor, following: NDArray[np.int32]) -> "Pending":
        logits = self.reader.logits(state, hidden).float()
        return _pending(logits, _packed(logits, self._put(following)), True)

    @torch.inference_mode()
    def begin(self, state: GPT, slot: int, hidden: Tensor, last: int, rows: SlotInputs, top: bool) -> "Pending":
        logits, row = self.reader.logits(state, hidden[last : last + 1]).float(), rows.of(slot)
        draw = token_sampling.draw_limited if row.limited.any() else token_sampling.draw
        numbers = SlotInputs.unpacked(self._put(row.packed()), torch.float32)
        drawn = _packed(logits, draw(logits, self._bias[slot : slot + 1], numbers, torch))
        self._tokens[slot : slot + 1] = drawn[0]
        return _pending(logits, drawn, top)

    @torch.inference_mode()
    def step(self, state: GPT, rows: SlotInputs, top: bool) -> "Pending":
        self._numbers.copy_(torch.from_numpy(rows.packed()), non_blocking=True)
        self._repeat(state, lambda: self._draw(state))
        if rows.limited.any():
            self._repeat(self, self._limit)
        live = self._numbers[SlotInputs._fields.index("live")] > 0
        self._tokens.copy_(torch.where(live, self._drawn[0], self._tokens))
        return _pending(self._logits, self._drawn, top)

    @torch.inference_mode()
    def bias(self, slot: int, values: Mapping[int, float]) -> None:
        row = np.zeros(self.reader.vocab, np.float32)
        row[list(values)] = list(values.values())
        self._bias[slot] = self._put(row)

    def fetch(self, drawn: "Pending") -> Drawn:
        if drawn.copied:
            drawn.copied.synchronize()
        numbers, *top = (array.numpy() for array in drawn.arrays)
        return Drawn(numbers[0], numbers[1].view(np.float32), *(top or (None, None)))

    def _repeat(self, key: Any, compute: Callable[[], None]) -> None:
        """Do what was captured under this key; without a GPU, compute it."""
        if self.device.type == "cuda" and key not in self._graphs:
            self._graphs[key] = _captured(compute)
        self._graphs.get(key, compute)()

    def _draw(self, state: GPT) -> None:
        """Read each slot's token at its position, and draw what follows."""
        rows = SlotInputs.unpacked(self._numbers, torch.float32)
        self._logits.copy_(self._read_tokens(state, rows.positions.long()))
        self._drawn.copy_(_packed(self._logits, token_sampling.draw(self._logits, self._bias, rows, torch)))

    def _limit(self) -> None:
        """Draw again in the slots that have a limit."""
        rows = SlotInputs.unpacked(self._numbers, torch.float32)
        again = _packed(self._logits, token_sampling.draw_limited(self._logits, self._bias, rows, torch))
        self._drawn.copy_(torch.where(rows.limited, again, self._drawn))

    def _read_tokens(self, state: GPT, positions: Tensor) -> Tensor:
        """Logits [slots, vocabulary] of what follows each slot's token at its position."""
        place = positions[:, None]  # [slots, 1]
        visible = (torch.arange(self.reader.context, device=self.device) <= place)[:, None, None]
        rows = torch.arange(self.count, device=self.device)[:, None]

        def attention(layer: int) -> Attention:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys, values = self._keys[layer], self._values[layer]
                keys[rows, :, place], values[rows, :, place] = key.transpose(1, 2), value.transpose(1, 2)
                return _attend(query, keys, values, visible)

            return attend

        hidden = self.reader.hidden(state, self._tokens[:, None], place, attention)
        return self.reader.logits(state, hidden[:, 0])

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


# Not cuDNN's, which PyTorch would prefer: of texts of 128 tokens one in ten came out otherwise the next time.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of query [rows, heads, time, head] to the visible ones of keys [rows, kv_heads, context, head].

    `visible` is [time, context], or [rows, 1, 1, context] of one token a row. Heads that share keys are computed as if
    they were further tokens: no kernel but the slow one of these backends knows groups.
    """
    groups = query.shape[1] // keys.shape[1]
    folded = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])  # [rows, kv_heads, groups · time, head]
    mask = visible.repeat(groups, 1) if visible.ndim == 2 else visible
    with sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(query.shape)


class Pending(NamedTuple):
    """Results on their way to the host: no later step holds them up."""

    arrays: tuple[Tensor, ...]  # as _packed makes them, then ids and log-probabilities of alternatives, if asked for
    copied: Any  # a CUDA event


def _pending(logits: Tensor, drawn: Tensor, top: bool) -> Pending:
    arrays = (drawn, *_top(logits, drawn)) if top else (drawn,)
    if not drawn.is_cuda:
        return Pending(tuple(array.clone() for array in arrays), None)  # the next step writes to the same place
    arrived = tuple(array.to("cpu", non_blocking=True) for array in arrays)
    copied = torch.cuda.Event()
    copied.record()
    return Pending(arrived, copied)


def _packed(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tokens, their log-probabilities and the logarithm of the sum of all exponentials: int32 [3, rows], fp32 bit for
    bit."""
    total = logits.logsumexp(-1)
    logprobs = logits.gather(1, tokens.long()[:, None])[:, 0] - total
    return torch.stack([tokens.int(), logprobs.view(torch.int32), total.view(torch.int32)])


def _top(logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(min(ALTERNATIVES, logits.shape[1]))
    return ids, values - drawn[2].view(torch.float32)[:, None]


def _captured(compute: Callable[[], None]) -> Callable[[], None]:
    """The same computation as a CUDA graph, which reads and writes where it did when it was captured.

    It is computed once before, which must change nothing for the next time: what libraries allocate at their first
    call must not be part of the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may be loading a checkpoint
        compute()
    return graph.replay


Slots: type[base.Slots] = TorchSlots
