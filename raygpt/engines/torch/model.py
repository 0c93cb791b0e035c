"""A transformer in plain PyTorch modules: embeddings, pre-norm blocks of attention and MLP, a final norm, a head.

The residual stream between the matrix products is kept in `dtype`. Modules have the names of the description.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raygpt.config import Model
from raygpt.engines.base import Positions
from raygpt.engines.padding import padded_vocab
from raygpt.engines.torch.attention import Attention, Cache, Span, causal
from raygpt.engines.torch.devices import accurate
from raygpt.engines.torch.dropout import dropout
from raygpt.engines.torch.layers import Gain, Norm, attention_inputs, full, gate_heads, mlp
from raygpt.engines.torch.rope import rotations
from raygpt.models import Description, describe, value_table_of


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model, description: Description):
        super().__init__()
        sizes, bias = description.sizes, model.bias
        width, hidden, self.head_size = sizes["width"], sizes["hidden"], sizes["head_size"]
        self.rate, self.mlp = model.dropout, model.mlp
        queries, keys = (sizes[axis] * self.head_size for axis in ("heads", "kv_heads"))
        self.residual, self.x0 = (Gain(1) if model.x0_mixing else None for _ in range(2))
        self.norm1 = Norm(width, model)
        self.query = nn.Linear(width, queries, bias)
        self.key = nn.Linear(width, keys, bias)
        self.value = nn.Linear(width, keys, bias)
        self.query_norm, self.key_norm = (Norm(self.head_size, model) if model.qk_norm else None for _ in range(2))
        inputs, heads = sizes["gate_inputs"], sizes["heads"]
        self.head_gate = nn.Linear(inputs, heads, bias=False) if model.head_gates else None
        self.out = nn.Linear(queries, width, bias)
        self.norm2 = Norm(width, model)
        self.gate = nn.Linear(width, hidden, bias) if model.has_gate else None
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        attention: Attention = causal,
        x0: Tensor | None = None,
        rotation: Tensor | None = None,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`keys` [2 sites, 2, rows] turn dropout on. `x0` is the input of the first block, `rotation` RoPE's angles,
        `values` a value embedding [rows, time, width] and its gain."""
        first, second = (None, None) if keys is None else keys
        if self.residual and self.x0 and x0 is not None:
            x = (self.residual.weight * x + self.x0.weight * x0).to(x.dtype)
        normed = self.norm1(x)
        layers, norms = (self.query, self.key, self.value), (self.query_norm, self.key_norm)
        query, key, value = attention_inputs(normed, layers, self.head_size, norms, rotation)
        if values is not None:
            embedding, gain = values
            value = (value + gain * embedding.view_as(value)).to(value.dtype)
        mixed = attention(*(each.transpose(1, 2) for each in (query, key, value)))  # [rows, heads, time, head_size]
        heads = gate_heads(self.head_gate, normed, mixed.transpose(1, 2))  # [rows, time, heads, head_size]
        x = x + dropout(self.out(heads.flatten(2)), first, self.rate)
        return x + dropout(mlp(self.norm2(x), self.mlp, self.up, self.down, self.gate), second, self.rate)


class GPT(nn.Module):
    """Token ids [rows, time] to the final hidden state [rows, time, width]."""

    def __init__(self, model: Model, vocab: int, dtype: torch.dtype):
        super().__init__()
        self.model, self.description = model, describe(model, vocab)
        self.dtype, self.softcap = dtype, model.softcap
        self.tensor_size = 1  # processes among which the heads are sharded
        width, rows = self.description.sizes["width"], padded_vocab(vocab)
        self.tokens = nn.Embedding(rows, width)
        self.positions = nn.Embedding(model.context, width) if model.position == "learned" else None
        for number in range(model.value_embeddings):
            self.add_module(f"values{number}", nn.Embedding(rows, width))
        self.value_gains = Gain(2 * model.value_embeddings) if model.value_embeddings else None
        self.embedding_norm = Norm(width, model) if model.embedding_norm else None
        self.blocks = nn.ModuleList(Block(model, self.description) for _ in range(model.layers))
        self.norm = Norm(width, model)
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
        return self.hidden(ids, positions, [causal] * len(self.blocks), keys)

    def empty_cache(self, rows: int) -> Cache:
        """For prompts of so many rows, with this process's heads."""
        layers, rows, kv_heads, context, head = self.description.cache_shape(rows)
        shape = (layers, rows, kv_heads // self.tensor_size, context, head)
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.table.device) for _ in range(2)))

    def extend(self, ids: Tensor, start: Positions, cache: Cache) -> Tensor:
        """The hidden state of ids [rows, time] that follow `start` earlier ones, whose cache they are added to."""
        span = Span(start, ids.shape[1], ids.device)
        visible = span.visible
        attentions = [cache.attention(layer, span, visible) for layer in range(len(self.blocks))]
        return self.hidden(ids, span.positions, attentions)

    def hidden(
        self, ids: Tensor, positions: Tensor, attentions: Sequence[Attention], keys: Tensor | None = None
    ) -> Tensor:
        """The same at positions [time] or [rows, time], with the attention of each layer."""
        x = dropout(self._embed(ids, positions), None if keys is None else keys[0], self.model.dropout)
        x0 = x if self.model.x0_mixing else None
        rotation, values = self._rotations(positions), self._embed_values(ids)
        for layer, block in enumerate(self.blocks):
            site_keys = None if keys is None else keys[2 * layer + 1 : 2 * layer + 3]
            x = block(x, site_keys, attentions[layer], x0, rotation, values.get(layer))
        return self.norm(x)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids)  # [rows, time, width]
        x = x if self.positions is None else x + self.positions(positions)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return x.to(self.dtype)

    def _rotations(self, positions: Tensor) -> Tensor | None:
        model = self.model
        if model.position != "rope":
            return None
        return rotations(positions, model.size_of_head, model.rope_base, model.rope_share, accurate(self.dtype))

    def _embed_values(self, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """The value embedding [rows, time, width] of each layer that has one, and its gain [1]."""
        if self.value_gains is None:
            return {}
        names = [f"values{number}" for number in range(self.model.value_embeddings)]
        embedded = {name: self.get_submodule(name)(ids).to(self.dtype) for name in names}
        gains = full(self.value_gains.weight).split(1)
        places = {layer: value_table_of(self.model, layer) for layer in range(len(self.blocks))}
        return {layer: (embedded[place[0]], gains[place[1]]) for layer, place in places.items() if place}
