"""The tensors of transformers' modules beside the description's arrays. Reading a checkpoint needs no transformers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from raygpt.engines.base import Arrays
from raygpt.engines.padding import padded_vocab
from raygpt.engines.torch.parameters import Slices, Values, draw_all
from raygpt.interop import gpt2
from raygpt.models import Description
from raygpt.models.parameter import Role

TABLES = (gpt2.TOP["tokens"], gpt2.TOP["head"])  # whose vocabulary is padded


class HuggingFaceLayout:
    """Tensors under transformers' names; whole arrays are converted, one slot at a time."""

    def __init__(self, description: Description):
        self._description = description

    def role(self, name: str) -> Role:
        """By transformers' names."""
        if name.endswith(".bias") or ".ln_" in name:
            return "bias" if name.endswith(".bias") else "gain"
        if name in (gpt2.TOP["tokens"], gpt2.TOP["positions"]):
            return "embedding"
        return "head" if name == gpt2.TOP["head"] else "matrix"

    def initial_values(self, seed: int, device: torch.device) -> Values:
        """The numbers that raygpt's own model begins with."""
        return self.values(draw_all(seed, self._description, device))

    def values(self, arrays: Arrays) -> Values:
        """Shards of the description's arrays."""
        named = gpt2.to_hugging_face(arrays, self._description)

        def part(name: str, slices: Slices) -> Tensor:
            whole = torch.tensor(named[name])
            if name in TABLES:
                whole = F.pad(whole, (0, 0, 0, padded_vocab(len(whole)) - len(whole)))
            return whole[slices]

        return part

    def arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """The description's arrays of whole tensors."""
        vocab = self._description.sizes["vocabulary"]
        named = {name: (tensor[:vocab] if name in TABLES else tensor).cpu() for name, tensor in tensors.items()}
        arrays = gpt2.from_hugging_face({name: tensor.numpy() for name, tensor in named.items()}, self._description)
        return {name: array.copy() for name, array in arrays.items()}  # not the memory of a state that trains on
