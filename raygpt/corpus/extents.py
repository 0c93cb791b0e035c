"""Where a stream's tokens are: runs of tokens in shards, as a list or, in a scattered store, as one array of counts."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

GROUP = 8  # shards that `shuffled` has open at a time; see lanes.py


@dataclass(frozen=True)
class Extent:
    """A run of tokens in a shard that belongs to a stream."""

    shard: str
    start: int
    tokens: int


class Buckets(Sequence[Extent]):
    """The shards of a scattered store. A million are one array: as objects they would take seconds to read."""

    def __init__(self, tokens: NDArray[np.int64], group: int = GROUP):
        self.tokens, self.group = tokens, group

    @overload
    def __getitem__(self, number: int) -> Extent: ...
    @overload
    def __getitem__(self, number: slice) -> list[Extent]: ...
    def __getitem__(self, number: int | slice) -> Extent | list[Extent]:
        if isinstance(number, slice):
            return [self[n] for n in range(len(self))[number]]
        return Extent(bucket_name(range(len(self))[number]), 0, int(self.tokens[number]))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buckets) and self.group == other.group and np.array_equal(self.tokens, other.tokens)

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """Counts of tokens as base64 of little-endian uint32."""
        return {"group": self.group, "tokens": base64.b64encode(self.tokens.astype("<u4").tobytes()).decode()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Buckets":
        counts = np.frombuffer(base64.b64decode(fields["tokens"]), dtype="<u4")
        return cls(counts.astype(np.int64), int(fields["group"]))


def bucket_name(number: int) -> str:
    """Shard names of a scattered store."""
    return f"train-{number:07d}.tokens"


def token_counts(extents: Sequence[Extent]) -> NDArray[np.int64]:
    """The number of tokens of each extent."""
    if isinstance(extents, Buckets):
        return extents.tokens
    return np.array([extent.tokens for extent in extents], dtype=np.int64)
