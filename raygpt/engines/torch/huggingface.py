"""transformers' own GPT-2, trained by the same engine (`model.implementation: huggingface`)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from raygpt.config import Model
from raygpt.engines.base import Positions
from raygpt.engines.padding import padded_vocab
from raygpt.engines.torch.dropout import dropout
from raygpt.errors import RaygptError


class KeyedDropout(nn.Module):
    """Replaces nn.Dropout by masks that depend on keys."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.keys, self.rate)


class HuggingFaceGPT(nn.Module):
    """Token ids [rows, time] to the final hidden state [rows, time, width], as `model.GPT` gives it."""

    def __init__(self, model: Model, vocab: int, dtype: torch.dtype):
        super().__init__()
        whole: Any = GPT2LMHeadModel(_config(model, vocab))
        self.dtype, self.softcap = dtype, None
        self.transformer = whole.transformer
        self.lm_head = None if model.tied_head else whole.lm_head  # tied, it is the token table under a second name
        self._dropouts: list[KeyedDropout] = []
        self.transformer.drop = self._dropout(model.dropout)
        for block in self.blocks:
            block.attn.resid_dropout = self._dropout(model.dropout)
            block.mlp.dropout = self._dropout(model.dropout)

    def _dropout(self, rate: float) -> KeyedDropout:
        """The next dropout site, in the same order as in our model."""
        self._dropouts.append(KeyedDropout(rate))
        return self._dropouts[-1]

    @property
    def blocks(self) -> Any:
        """The name that our model uses."""
        return self.transformer.h

    @property
    def sites(self) -> int:
        """Number of dropout sites."""
        return len(self._dropouts)

    @property
    def table(self) -> Tensor:
        """What turns a hidden state into logits: [padded vocabulary, width]."""
        return (self.lm_head or self.transformer.wte).weight

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """`keys` [sites, 2, rows] turn dropout on."""
        for site, place in enumerate(self._dropouts):
            place.keys = None if keys is None else keys[site]
        return self.transformer(ids, use_cache=False).last_hidden_state.to(self.dtype)

    def empty_cache(self, rows: int) -> Any:
        """transformers' own."""
        return DynamicCache(config=self.transformer.config)

    def extend(self, ids: Tensor, start: Positions, cache: Any) -> Tensor:
        """The hidden state of ids [rows, time] that follow those in the cache, to which they are added."""
        if not isinstance(start, int):
            raise RaygptError("model.implementation: transformers' cache has one position for all rows; write raygpt")
        for place in self._dropouts:
            place.keys = None
        return self.transformer(ids, past_key_values=cache, use_cache=True).last_hidden_state.to(self.dtype)


def _config(model: Model, vocab: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=padded_vocab(vocab),
        n_positions=model.context,
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        layer_norm_epsilon=model.norm_epsilon,
        tie_word_embeddings=model.tied_head,
        embd_pdrop=0.0,  # all three: the first and last are put in by hand,
        attn_pdrop=0.0,  # and inside attention the fused kernels draw masks that would depend on the mesh
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
