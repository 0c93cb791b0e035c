"""Inference by PyTorch on one device: log-probabilities of texts, and generation with a cache. Not compiled."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raygpt.config import Model
from raygpt.engines import base
from raygpt.engines.base import Arrays, Positions
from raygpt.engines.torch import layers
from raygpt.engines.torch.attention import Attention
from raygpt.engines.torch.devices import DTYPES, accurate, autocast, choose_device, choose_precision
from raygpt.engines.torch.loss import token_logprobs
from raygpt.engines.torch.model import GPT
from raygpt.engines.torch.parameters import OwnLayout
from raygpt.models import describe

LogitsAndCache = tuple[NDArray[np.floating[Any]], Any]
FEW = 16  # up to this many rows a product takes as long as reading its kernel


def product(x: Tensor, kernel: Tensor) -> Tensor:
    """x [rows, in] by a kernel [out, in], for a CPU: with few rows PyTorch would read the kernel with one core only."""
    parts = torch.get_num_threads()
    if len(x) > FEW or len(kernel) % parts:
        return x @ kernel.T
    shares = kernel.view(parts, -1, kernel.shape[1])  # [parts, out / parts, in]
    if len(x) == 1:
        return torch.bmm(shares, x.T.expand(parts, -1, -1)).view(1, -1)
    return torch.bmm(x.expand(parts, -1, -1), shares.mT).transpose(0, 1).flatten(1)


class Linear(torch.nn.Linear):
    """The same with any dimensions before the last, and a bias."""

    def forward(self, x: Tensor) -> Tensor:
        out = product(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class TorchReader:
    """Uses raygpt's GPT, also for runs of transformers' GPT-2: they compute the same."""

    def __init__(self, model: Model, vocab: int, *, device: torch.device | str | None = None):
        self.model, self.vocab, self.context = model, vocab, model.context
        self.device = torch.device(device) if device else choose_device()
        self.precision = choose_precision(model.precision, self.device)
        self.dtype = DTYPES[self.precision]
        self._param_dtype = accurate(self.dtype)

    def describe(self) -> dict[str, str]:
        """Device and precision, for the console."""
        cuda = self.device.type == "cuda"
        return {
            "engine": f"torch {torch.__version__}",
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "precision": self.precision,
        }

    @torch.no_grad()
    def load(self, parameters: Arrays) -> GPT:
        """The parameters, as `PlainState` has them, on the device."""
        with torch.device("meta"):
            gpt = GPT(self.model, self.vocab, self.dtype)
        gpt.to(self._param_dtype).to_empty(device=self.device)
        values = OwnLayout(gpt.description).values(parameters)
        for name, parameter in gpt.named_parameters():
            parameter.copy_(values(name, tuple(slice(size) for size in parameter.shape)))
        for module in gpt.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.to(self.dtype)  # once; autocast would do it for every token
                if isinstance(module, torch.nn.Linear) and self.device.type == "cpu":
                    module.__class__ = Linear
        return gpt.eval()

    def prefill(self, state: GPT, ids: NDArray[np.int32]) -> LogitsAndCache:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        return self.decode(state, ids, 0, state.empty_cache(len(ids)))

    @torch.inference_mode()
    def decode(self, state: GPT, ids: NDArray[np.int32], start: Positions, cache: Any) -> LogitsAndCache:
        """The same for ids [rows, time] that follow `start` earlier ones."""
        with self._arithmetic():
            hidden = state.extend(self._put(ids), start, cache)[:, -1]
            return self.logits(state, hidden).cpu().numpy(), cache

    @torch.inference_mode()
    def token_logprobs(
        self, state: GPT, windows: NDArray[np.int32]
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        ids = self._put(windows)
        with self._arithmetic():
            logprobs, hits = token_logprobs(state(ids[:, :-1]), state.table, ids[:, 1:], self.vocab, state.softcap)
        return logprobs.cpu().numpy(), hits.cpu().numpy()

    def cache_shape(self, rows: int) -> tuple[int, ...]:
        """Of the keys, and of the values: [layers, rows, kv_heads, context, head_size]."""
        return describe(self.model, self.vocab).cache_shape(rows)

    def hidden(self, state: GPT, ids: Tensor, positions: Tensor, attention: Callable[[int], Attention]) -> Tensor:
        """The last hidden states [rows, time, width] of ids at positions, with a layer's attention."""
        with self._arithmetic():
            return state.hidden(ids, positions, [attention(layer) for layer in range(self.model.layers)])

    def logits(self, state: GPT, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of hidden states [rows, width], without the vocabulary's padding."""
        multiply = product if self.device.type == "cpu" else layers.product
        with self._arithmetic():
            scores = layers.logits(hidden, state.table, state.softcap, multiply)
        return scores[:, : self.vocab].to(self._param_dtype)

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """fp32 is fp32, though training in this process may have asked for TF32, whose log-probabilities differ in the
        third digit; autocast in 16 bits."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with autocast(self.device, self.dtype):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _put(self, ids: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self.device)


Reader: type[base.Reader] = TorchReader
