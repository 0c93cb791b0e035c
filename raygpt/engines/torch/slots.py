"""Texts generated side by side by PyTorch: every slot's cache in one tensor, and tokens drawn on the device.

On a GPU a step is captured once as a CUDA graph, which spares launching its few hundred kernels from Python.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from raygpt.engines import base, drawing
from raygpt.engines.base import ALTERNATIVES, Drawn, Rows
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
        self._positions = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._bias = torch.zeros(count, reader.vocab, device=self.device)
        self._graphs: WeakKeyDictionary[GPT, Callable[[], Tensor]] = WeakKeyDictionary()  # of loaded checkpoints

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
        return _known(self.reader.logits(state, hidden), self._put(following), True)

    @torch.inference_mode()
    def begin(self, state: GPT, slot: int, hidden: Tensor, last: int, rows: Rows, top: bool) -> "Pending":
        logits = self.reader.logits(state, hidden[last : last + 1])
        drawn = self._pick(logits, self._bias[slot : slot + 1], rows.of(slot))
        self._tokens[slot : slot + 1] = drawn
        return _known(logits, drawn, top)

    @torch.inference_mode()
    def step(self, state: GPT, rows: Rows, top: bool) -> "Pending":
        self._positions.copy_(self._put(rows.positions))
        logits = self._step(state)()
        drawn = self._pick(logits, self._bias, rows)
        self._tokens.copy_(torch.where(self._put(rows.live), drawn, self._tokens))
        return _known(logits, drawn, top)

    @torch.inference_mode()
    def bias(self, slot: int, values: Mapping[int, float]) -> None:
        row = np.zeros(self.reader.vocab, np.float32)
        row[list(values)] = list(values.values())
        self._bias[slot] = self._put(row)

    def fetch(self, drawn: "Pending") -> Drawn:
        if drawn.copied:
            drawn.copied.synchronize()
        return Drawn(*(None if array is None else array.numpy() for array in drawn.arrays))

    def _step(self, state: GPT) -> Callable[[], Tensor]:
        """Computes the logits [slots, vocabulary] that follow each slot's token at its position."""
        if self.device.type != "cuda":
            return lambda: self._read_tokens(state)
        if state not in self._graphs:
            self._graphs[state] = _captured(lambda: self._read_tokens(state))
        return self._graphs[state]

    def _read_tokens(self, state: GPT) -> Tensor:
        place = self._positions[:, None]  # [slots, 1]
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

    def _pick(self, logits: Tensor, bias: Tensor, rows: Rows) -> Tensor:
        put = Rows(*map(self._put, rows))
        return drawing.draw(logits.float(), bias, put, torch, limits=rows).int()

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=grouped)


class Pending(NamedTuple):
    """Results on their way to the host: no later step holds them up."""

    arrays: Drawn
    copied: Any  # a CUDA event


def _pending(drawn: Drawn) -> Pending:
    if not drawn.tokens.is_cuda:
        return Pending(drawn, None)
    arrays = Drawn(*(None if array is None else array.to("cpu", non_blocking=True) for array in drawn))
    copied = torch.cuda.Event()
    copied.record()
    return Pending(arrays, copied)


def _known(logits: Tensor, tokens: Tensor, top: bool) -> Pending:
    exact = logits.float()
    total = exact.logsumexp(-1)
    logprobs = exact.gather(1, tokens.long()[:, None])[:, 0] - total
    if not top:
        return _pending(Drawn(tokens, logprobs, None, None))
    values, ids = exact.topk(min(ALTERNATIVES, exact.shape[1]))
    return _pending(Drawn(tokens, logprobs, ids, values - total[:, None]))


def _captured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same computation as a CUDA graph: its inputs and its result stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what libraries allocate at their first call must not be part of the graph
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


Slots: type[base.Slots] = TorchSlots
