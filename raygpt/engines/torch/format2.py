"""Checkpoints of format 2, which are only read: queries, keys and values are one matrix there, head by head."""

import re

from torch import Tensor

from raygpt.engines.torch.checkpoint import CheckpointReader
from raygpt.engines.torch.parameters import Slices

PARTS = ("query", "key", "value")


class Format2Reader(CheckpointReader):
    """Gives its tensors the names and shapes that they have now."""

    def __init__(self, folder: str, heads: int):
        super().__init__(folder)
        self._heads = heads

    def names(self, kind: str) -> list[str]:
        """Of all parameters that have a tensor of this kind."""
        return [new for old in super().names(kind) for new in _new_names(old)]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """A part of a tensor, or all of it."""
        found = re.fullmatch(r"(\w+/blocks\.\d+)\.(query|key|value)\.(weight|bias)", name)
        if not found:
            return super().read(name, slices)
        block, part, kind = found.groups()
        by_head = super().read(f"{block}.qkv.{kind}").unflatten(0, (self._heads, len(PARTS), -1))
        whole = by_head[:, PARTS.index(part)].flatten(0, 1)
        return whole if slices is None else whole[slices]


def _new_names(old: str) -> list[str]:
    """blocks.3.qkv.bias -> blocks.3.query.bias and two more; others stay as they are."""
    return [old.replace(".qkv.", f".{part}.") for part in PARTS] if ".qkv." in old else [old]
