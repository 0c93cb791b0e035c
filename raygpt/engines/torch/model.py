"""GPT-2 in plain PyTorch modules: embeddings, pre-norm blocks of attention and MLP, a final norm, a head tied or not.

Parameters are fp32. What is computed is in `dtype`: autocast makes the matrix products so, and the residual stream
between them is kept so; norms and loss are computed in fp32 at least.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from raygpt.config import Model
from raygpt.engines.torch.attention import Attention, Cache, causal
from raygpt.engines.torch.dropout import dropout

SLOPE = 2 * (2 / math.pi) ** 0.5  # 2u = x (SLOPE + CURVE x²)
CURVE = 0.044715 * SLOPE
PADDED_TO = 128  # rows of the token table: matrix units want multiples; ids beyond the vocabulary never leave here


def padded_vocab(vocab: int) -> int:
    """Rows of the token table."""
    return -(-vocab // PADDED_TO) * PADDED_TO


def accurate(dtype: torch.dtype) -> torch.dtype:
    """fp32, or more where the arithmetic is in more."""
    return torch.promote_types(dtype, torch.float32)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's, by tanh. Compiled for a GPU it goes by the logistic function: 0.5 (1 + tanh(u)) is that of 2u, and an
    exponential is a few instructions where CUDA's tanh is a long function."""
    if not (x.is_cuda and torch.compiler.is_compiling()):
        return F.gelu(x, approximate="tanh")
    exact = x.to(accurate(x.dtype))
    return (exact * torch.sigmoid(exact * (SLOPE + CURVE * exact * exact))).to(x.dtype)


class Norm(nn.Module):
    """LayerNorm, with a bias or without, computed in fp32 at least."""

    def __init__(self, model: Model):
        super().__init__()
        self.epsilon = model.norm_epsilon
        self.weight = nn.Parameter(torch.empty(model.width))
        self.bias = nn.Parameter(torch.empty(model.width)) if model.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(accurate(x.dtype)), self.weight.shape, self.weight, self.bias, self.epsilon).to(
            x.dtype
        )


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model):
        super().__init__()
        width, self.head_dim, self.rate = model.width, model.width // model.heads, model.dropout
        self.norm1 = Norm(model)
        self.qkv = nn.Linear(width, 3 * width, bias=model.bias)
        self.out = nn.Linear(width, width, bias=model.bias)
        self.norm2 = Norm(model)
        self.up = nn.Linear(width, 4 * width, bias=model.bias)
        self.down = nn.Linear(4 * width, width, bias=model.bias)

    def forward(self, x: Tensor, keys: Tensor | None = None, attention: Attention = causal) -> Tensor:
        """`keys` [2 sites, 2, rows] turn dropout on."""
        first, second = (None, None) if keys is None else keys
        # Head by head, so that a share of the rows of qkv's kernel is whole heads: those that this process computes.
        split = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = split.permute(3, 0, 2, 1, 4)  # each [rows, heads, time, head_dim]
        mixed = attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + dropout(self.out(mixed), first, self.rate)
        hidden = gelu(self.up(self.norm2(x)))  # [rows, time, 4·width]
        return x + dropout(self.down(hidden), second, self.rate)


class GPT(nn.Module):
    """Token ids [rows, time] to the final hidden state [rows, time, width]."""

    def __init__(self, model: Model, vocab: int, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.heads = model.heads  # that this process computes
        self.tokens = nn.Embedding(padded_vocab(vocab), model.width)
        self.positions = nn.Embedding(model.context, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = Norm(model)
        self.head = None if model.tied_head else nn.Embedding(padded_vocab(vocab), model.width)

    @property
    def sites(self) -> int:
        """Places that drop: the embedding, and both branches of each block."""
        return 1 + 2 * self.model.layers

    @property
    def table(self) -> Tensor:
        """What turns a hidden state into logits: [padded vocabulary, width]."""
        return (self.head or self.tokens).weight

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """`keys` [sites, 2, rows] turn dropout on."""
        x = dropout(self._embed(ids, 0), None if keys is None else keys[0], self.model.dropout)
        for layer, block in enumerate(self.blocks):
            x = block(x, None if keys is None else keys[2 * layer + 1 : 2 * layer + 3])
        return self.norm(x)

    def empty_cache(self, rows: int) -> Cache:
        """For prompts of so many rows."""
        model = self.model
        shape = (model.layers, rows, self.heads, model.context, model.width // model.heads)
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.table.device) for _ in range(2)))

    def extend(self, ids: Tensor, start: int, cache: Cache) -> Tensor:
        """The hidden state of ids [rows, time] that follow `start` earlier ones; the cache learns of them."""
        x = self._embed(ids, start)
        for layer, block in enumerate(self.blocks):
            x = block(x, attention=cache.attention(layer, start))
        return self.norm(x)

    def _embed(self, ids: Tensor, start: int) -> Tensor:
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        return (self.tokens(ids) + self.positions(places)).to(self.dtype)  # [rows, time, width]
