"""Log-likelihoods of continuations of a text, which HellaSwag and LAMBADA are computed from.

Context and continuation are encoded together, and the tokens after the context's own are the continuation, as in
lm-evaluation-harness, so that the results are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines.base import TokenScorer
from raygpt.engines.padding import bucket

TOKENS = 2**13  # computed at a time
Watch = Callable[[int, int], None]  # called with (done, total)


class ScorableModel(Protocol):
    """What tasks need of a model, trained or in training."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def reader(self) -> TokenScorer: ...

    @property
    def state(self) -> Any: ...


class Pair(NamedTuple):
    """A text and a possible continuation."""

    context: str
    continuation: str


class Likelihood(NamedTuple):
    """How likely a model finds a continuation."""

    log_probability: float
    greedy: bool  # whether each of its tokens was the likeliest


class Encoded(NamedTuple):
    """A pair's ids, and how many of the last are the continuation's."""

    ids: list[int]
    continuation: int


def likelihoods(
    model: ScorableModel, pairs: Sequence[Pair], watch: Watch = lambda done, total: None
) -> list[Likelihood]:
    """The likelihood of each pair, in order. Computed in the order of lengths, so that there is little padding."""
    encoded = encode(model.tokenizer, pairs, model.reader.context)
    found: list[Likelihood | None] = [None] * len(pairs)
    done = 0
    for places in _batches([len(pair.ids) for pair in encoded], model.reader.context):
        for place, likelihood in zip(places, _batch_likelihoods(model, [encoded[n] for n in places]), strict=True):
            found[place] = likelihood
        done += len(places)
        watch(done, len(pairs))
    return [likelihood for likelihood in found if likelihood is not None]


def encode(tokenizer: Tokenizer, pairs: Sequence[Pair], context: int) -> list[Encoded]:
    """The last `context` + 1 ids of each pair. Spaces at the context's end belong to the continuation's first token."""
    heads = [pair.context.rstrip() for pair in pairs]
    lengths = [len(ids) for ids in tokenizer.encode(heads)]
    wholes = tokenizer.encode([pair.context + pair.continuation for pair in pairs])
    encoded = []
    for before, ids in zip(lengths, wholes, strict=True):
        continuation = len(ids) - before
        begun = ids.tolist() if before else [tokenizer.end_of_text, *ids.tolist()]  # as a document begins
        encoded.append(Encoded(begun[-(context + 1) :], min(continuation, context)))
    return encoded


def _batches(lengths: Sequence[int], context: int) -> Iterator[list[int]]:
    """Indices of pairs of similar length, as many per batch as TOKENS allows."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    begin = 0
    while begin < len(order):
        rows = max(1, TOKENS // bucket(lengths[order[begin]], context))
        yield order[begin : begin + rows]
        begin += rows


def _batch_likelihoods(model: ScorableModel, batch: Sequence[Encoded]) -> Iterator[Likelihood]:
    windows = np.zeros((len(batch), max(len(pair.ids) for pair in batch)), dtype=np.int32)
    for row, pair in enumerate(batch):
        windows[row, : len(pair.ids)] = pair.ids
    logs, hits = model.reader.token_logprobs(model.state, windows)
    for row, pair in enumerate(batch):
        end = len(pair.ids) - 1  # of the targets
        mine = slice(end - pair.continuation, end)
        yield Likelihood(float(logs[row, mine].sum(dtype=np.float64)), bool(hits[row, mine].all()))
