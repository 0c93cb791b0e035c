"""GPT-2 in plain PyTorch modules: embeddings, pre-norm blocks of attention and MLP, a final norm, a head tied or not.

The residual stream between the matrix products is kept in `dtype`. Modules have the names of the description.
"""

import torch
from torch import Tensor, nn

from raygpt.config import Model
from raygpt.engines.base import Positions
from raygpt.engines.padding import padded_vocab
from raygpt.engines.torch.attention import Attention, Cache, Span, causal
from raygpt.engines.torch.dropout import dropout
from raygpt.engines.torch.layers import Norm, mlp, project
from raygpt.models import Description, describe


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model, description: Description):
        super().__init__()
        sizes, bias = description.sizes, model.bias
        width, self.head, self.rate = sizes["width"], sizes["head"], model.dropout
        queries, keys = (sizes[axis] * self.head for axis in ("heads", "kv_heads"))
        self.norm1 = Norm(width, model.norm_epsilon, bias)
        self.query = nn.Linear(width, queries, bias)
        self.key = nn.Linear(width, keys, bias)
        self.value = nn.Linear(width, keys, bias)
        self.out = nn.Linear(queries, width, bias)
        self.norm2 = Norm(width, model.norm_epsilon, bias)
        self.up = nn.Linear(width, sizes["hidden"], bias)
        self.down = nn.Linear(sizes["hidden"], width, bias)

    def forward(self, x: Tensor, keys: Tensor | None = None, attention: Attention = causal) -> Tensor:
        """`keys` [2 sites, 2, rows] turn dropout on."""
        first, second = (None, None) if keys is None else keys
        query, key, value = project(self.norm1(x), (self.query, self.key, self.value), self.head)
        mixed = attention(query, key, value).transpose(1, 2).flatten(2)  # [rows, time, heads · head]
        x = x + dropout(self.out(mixed), first, self.rate)
        return x + dropout(mlp(self.norm2(x), self.up, self.down), second, self.rate)


class GPT(nn.Module):
    """Token ids [rows, time] to the final hidden state [rows, time, width]."""

    def __init__(self, model: Model, vocab: int, dtype: torch.dtype):
        super().__init__()
        self.description = describe(model, vocab)
        self.dtype, self.rate = dtype, model.dropout
        self.tensor_size = 1  # processes among which the heads are sharded
        width, rows = self.description.sizes["width"], padded_vocab(vocab)
        self.tokens = nn.Embedding(rows, width)
        self.positions = nn.Embedding(model.context, width)
        self.blocks = nn.ModuleList(Block(model, self.description) for _ in range(model.layers))
        self.norm = Norm(width, model.norm_epsilon, model.bias)
        self.head = None if model.tied_head else nn.Embedding(rows, width)

    @property
    def sites(self) -> int:
        """Places that drop: the embedding, and both branches of each block."""
        return 1 + 2 * len(self.blocks)

    @property
    def table(self) -> Tensor:
        """What turns a hidden state into logits: [padded vocabulary, width]."""
        return (self.head or self.tokens).weight

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """`keys` [sites, 2, rows] turn dropout on."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = dropout(self._embed(ids, positions), None if keys is None else keys[0], self.rate)
        for layer, block in enumerate(self.blocks):
            x = block(x, None if keys is None else keys[2 * layer + 1 : 2 * layer + 3])
        return self.norm(x)

    def empty_cache(self, rows: int) -> Cache:
        """For prompts of so many rows, with this process's heads."""
        layers, rows, kv_heads, context, head = self.description.cache_shape(rows)
        shape = (layers, rows, kv_heads // self.tensor_size, context, head)
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.table.device) for _ in range(2)))

    def extend(self, ids: Tensor, start: Positions, cache: Cache) -> Tensor:
        """The hidden state of ids [rows, time] that follow `start` earlier ones, whose cache they are added to."""
        span = Span(start, ids.shape[1], ids.device)
        x, visible = self._embed(ids, span.positions), span.visible
        for layer, block in enumerate(self.blocks):
            x = block(x, attention=cache.attention(layer, span, visible))
        return self.norm(x)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return (self.tokens(ids) + self.positions(positions)).to(self.dtype)  # [rows, time, width]
