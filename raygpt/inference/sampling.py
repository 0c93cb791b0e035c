"""Samples token ids from a model, one after another, with the engine's key-value cache."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.errors import RaygptError

Logits = NDArray[np.floating[Any]]


class Decoder(Protocol):
    """What sampling needs of a model: an engine in training, or a reader."""

    context: int

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Logits, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: int, cache: Any) -> tuple[Logits, Any]:
        """The same for ids [rows, time] that follow `start` earlier ones."""
        ...


def encode_prompt(tokenizer: Tokenizer, prompt: str | None, name: str = "the prompt") -> NDArray[np.int32]:
    """The prompt's ids; end-of-text, which starts a document, if there is none. Errors refer to it as `name`."""
    if prompt is None:
        return np.array([tokenizer.end_of_text], dtype=np.int32)
    try:
        ids = tokenizer.encode([prompt])[0].astype(np.int32)
    except UnicodeEncodeError:
        raise RaygptError(f"{name} is not UTF-8 text; write it in UTF-8") from None
    except RaygptError as error:  # a char tokenizer knows its own corpus' characters
        raise RaygptError(f"{name} cannot be read: {str(error).partition(';')[0]}; leave it out") from None
    if not len(ids):
        raise RaygptError(f"{name} is empty; write some text, or leave it out to begin as a document does")
    return ids


def sample(
    model: Decoder,
    state: Any,
    prompt: NDArray[np.int32],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Continue prompts [rows, time] by up to `tokens` ids, within the context: [rows, new].

    A temperature of 0 takes the likeliest token each time.
    """
    if prompt.shape[1] > model.context:
        raise RaygptError(f"the prompt has {prompt.shape[1]} tokens, and the model sees {model.context}; shorten it")
    room = min(tokens, model.context - prompt.shape[1])
    drawn = stream(model, state, prompt, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    columns = list(itertools.islice(drawn, room))
    return np.stack(columns, axis=1) if columns else np.empty((len(prompt), 0), dtype=np.int32)


def stream(
    model: Decoder,
    state: Any,
    prompt: NDArray[np.int32],
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int | np.random.Generator = 0,
    on_context_full: Callable[[int], None] = lambda kept: None,
) -> Iterator[NDArray[np.int32]]:
    """Continue prompts [rows, time] without end, yielding one id per row; computed lazily.

    When the context is full, its last half is prefilled again, and `on_context_full` is called with the number of
    those tokens.
    """
    random, half = np.random.default_rng(seed), max(1, model.context // 2)
    if prompt.shape[1] > model.context:
        prompt = prompt[:, -half:]
        on_context_full(half)
    seen = [prompt]  # the tokens in the cache, in parts
    logits, cache = model.prefill(state, prompt)
    place = prompt.shape[1]
    while True:
        drawn = _draw(logits, temperature, top_k, top_p, random)
        yield drawn
        seen.append(drawn[:, None])
        if place < model.context:
            logits, cache = model.decode(state, seen[-1], place, cache)
            place += 1
        else:
            seen = [np.concatenate(seen, axis=1)[:, -half:]]
            on_context_full(half)
            logits, cache = model.prefill(state, seen[0])
            place = half


def _draw(
    logits: Logits, temperature: float, top_k: int | None, top_p: float | None, random: np.random.Generator
) -> NDArray[np.int32]:
    """One id per row. Adding Gumbel noise and taking the argmax samples from the softmax."""
    if not temperature:
        return logits.argmax(-1).astype(np.int32)
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        smallest = np.partition(logits, -top_k, axis=-1)[:, -top_k, None]
        logits = np.where(logits < smallest, -np.inf, logits)
    if top_p and top_p < 1:
        logits = _likeliest(logits, top_p)
    return (logits + random.gumbel(size=logits.shape)).argmax(-1).astype(np.int32)


def _likeliest(logits: Logits, share: float) -> Logits:
    """Keep the smallest set of likeliest tokens whose total probability reaches `share` (top-p); at least one."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    falling = np.take_along_axis(logits, order, axis=-1)
    probabilities = np.exp(falling - falling[:, :1])
    before = np.cumsum(probabilities, axis=-1) - probabilities  # of those that are likelier
    kept = before < share * probabilities.sum(-1, keepdims=True)
    limited = np.full_like(logits, -np.inf)
    np.put_along_axis(limited, order, np.where(kept, falling, -np.inf), axis=-1)
    return limited
