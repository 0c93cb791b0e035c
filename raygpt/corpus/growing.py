"""Reads a token store while prepare is still writing it: the train stream grows shard by shard."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.index import INDEX, Index
from raygpt.corpus.shards import dtype_for, read_header, shard_name
from raygpt.corpus.store import FAILED, PLAN, TokenStore, TokenStream
from raygpt.errors import RaygptError, TransientError

POLL_S = 0.2


class GrowingStream(TokenStream):
    """A stream that grows. Reading waits for missing tokens, up to `patience_s` without progress.

    `stream` is train, or val for a separate validation source, whose units come after those of train.
    """

    def __init__(self, folder: str, patience_s: float = 300, stream: str = "train"):
        self.folder, self._patience, self._stream = folder, patience_s, stream
        self._until(lambda: storage.exists(storage.join(folder, tokenizers.FILE_NAME)))  # written after the plan
        plan: dict[str, Any] = storage.read_json(storage.join(folder, PLAN))
        if plan["split"] == "tail":
            raise RaygptError(
                f"{folder}: data.split: tail holds out the end of the corpus, which prepare has yet to find; "
                "train when it has ended, or set data.split: documents"
            )
        tokenizer = tokenizers.load(folder)
        index = Index(
            fingerprint=plan["fingerprint"],
            source=plan["source"],
            tokenizer=tokenizers.fingerprint(tokenizer),
            vocab=tokenizer.vocab,
            end_of_text=tokenizer.end_of_text,
            dtype=dtype_for(tokenizer.vocab).str,
            documents=0,
            text_bytes=0,
            train=(),
            val=(),
        )
        self._grown: list[Extent] = []
        super().__init__(folder, self._grown, index)
        first, units = (0, plan["units"]) if stream == "train" else (plan["units"], plan["val_units"])
        self._next = (first, 0)  # unit and part of the next shard
        self._end = first + units
        self._is_complete = False

    def wait(self, tokens: int) -> int:
        """Wait until there are at least `tokens`, or the stream is complete. Returns how many there are."""
        while len(self) < tokens and not self._is_complete:
            self._until(self._take_next)
        return len(self)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience
        while not done():
            if failure := storage.read_json(storage.join(self.folder, FAILED)):
                raise (TransientError if failure["is_transient"] else RaygptError)(failure["error"])
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{self.folder}: no new shard for {self._patience:.0f} s; prepare has stopped, run it again"
                )
            time.sleep(POLL_S)

    def _take_next(self) -> bool:
        """Add the next shard, or read the index after the last one; False if it does not exist yet."""
        unit, part = self._next
        if unit == self._end and self._stream == "val":
            self._is_complete = True
            return True
        name = shard_name(self._stream, unit, part) if unit < self._end else INDEX
        uri = storage.join(self.folder, name)
        if not storage.exists(uri):
            return False
        if name == INDEX:
            self._end_with(Index.read(self.folder))
            return True
        header = read_header(uri)
        self._grown.append(Extent(name, 0, header.tokens))
        self._ends = np.append(self._ends, len(self) + header.tokens)
        self._next = (unit + 1, 0) if header.last else (unit, part + 1)
        return True

    def _end_with(self, index: Index) -> None:
        """Check that the finished store is what was read: if prepare drew no document, or all, it held out the tail."""
        if index.tokens("train") != len(self):
            raise TransientError(
                f"{self.folder}: its documents were too few to draw from, so the end of its tokens is held out for "
                "validation; train again, the store is complete now"
            )
        self._is_complete = True


class GrowingStore(TokenStore):
    """A store whose validation tokens are complete, and whose train tokens are still being written."""

    def __init__(self, folder: str, patience_s: float = 300):
        self.train = GrowingStream(folder, patience_s)
        self.val = GrowingStream(folder, patience_s, "val")
        self.folder, self.index = folder, self.train.index
        self.val.wait(sys.maxsize)
