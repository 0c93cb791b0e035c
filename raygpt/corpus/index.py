"""`index.json`: what a token store holds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raygpt import storage
from raygpt.corpus.extents import Buckets, Extent, token_counts
from raygpt.corpus.shards import VERSION, check_version
from raygpt.errors import RaygptError

INDEX = "index.json"


@dataclass(frozen=True)
class Index:
    """`index.json`: the store's contents; its existence shows that the store is complete."""

    fingerprint: str  # of source, tokenizer and settings
    source: str
    tokenizer: str  # fingerprint
    vocab: int
    end_of_text: int
    dtype: str
    documents: int
    text_bytes: int
    train: Sequence[Extent]
    val: Sequence[Extent]
    notes: tuple[str, ...] = ()  # for the user, e.g. how validation was held out
    version: int = VERSION

    def tokens(self, stream: str) -> int:
        return int(token_counts(getattr(self, stream)).sum())

    def summary(self) -> dict[str, Any]:
        """The index without its lists of shards."""
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "vocab": self.vocab,
            "dtype": np.dtype(self.dtype).name,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "train_tokens": self.tokens("train"),
            "val_tokens": self.tokens("val"),
            "shards": self._shards,
            "notes": list(self.notes),
        }

    @property
    def _shards(self) -> int:
        if isinstance(self.train, Buckets):
            return len(self.train) + len(self.val)
        return len({extent.shard for extent in (*self.train, *self.val)})

    def write(self, folder: str) -> None:
        fields = asdict(self)
        if isinstance(self.train, Buckets):
            fields["train"] = self.train.to_json()
        storage.write_json(storage.join(folder, INDEX), fields)

    @classmethod
    def read(cls, folder: str) -> "Index":
        uri, remedy = storage.join(folder, INDEX), "delete it and prepare the source again"
        fields = storage.read_json(uri, remedy)
        try:
            check_version(fields["version"], uri)
            streams = {s: _extents(fields[s]) for s in ("train", "val")}
            return cls(**{**fields, **streams, "notes": tuple(fields["notes"])})
        except (KeyError, TypeError) as error:
            raise RaygptError(f"{uri} is damaged ({error}); {remedy}") from error


def _extents(listed: Any) -> Sequence[Extent]:
    return Buckets.from_json(listed) if isinstance(listed, dict) else tuple(Extent(**extent) for extent in listed)
