"""Samples token ids from a model, one after another, with the engine's key-value cache."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines.base import SlotInputs
from raygpt.engines.token_sampling import draw, draw_limited, fold_seed
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
    except (UnicodeEncodeError, TypeError):  # half of a surrogate pair, by tokenizer
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
    seed: int = 0,
) -> Iterator[NDArray[np.int32]]:
    """Continue prompts [rows, time] up to the context, yielding one id per row; computed lazily."""
    rows = rows_of(len(prompt), temperature, top_k, top_p, seed)
    pick = draw_limited if rows.limited.any() else draw
    logits, cache = model.prefill(state, prompt)
    for place in range(prompt.shape[1], model.context + 1):
        drawn = pick(np.asarray(logits, np.float32), 0, rows, np).astype(np.int32)
        yield drawn
        rows = rows._replace(counts=rows.counts + 1)
        if place < model.context:
            logits, cache = model.decode(state, drawn[:, None], place, cache)


def rows_of(count: int, temperature: float, top_k: int | None, top_p: float | None, seed: int) -> SlotInputs:
    """Texts that begin together, with the same options; text n has the seed plus n."""
    whole, ones = np.zeros(count, np.int32), np.ones(count, np.float32)
    return SlotInputs(
        positions=whole,
        live=whole == 0,
        seeds=np.array([fold_seed(seed + n) for n in range(count)], np.int32),
        counts=whole,
        temperatures=ones * np.float32(temperature),
        top_ks=whole + (top_k or 0),
        top_ps=ones * np.float32(1 if top_p is None else top_p),
    )
