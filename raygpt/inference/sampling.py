"""Text from a model: one token after another, through the engine's cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.engines.base import Engine
from raygpt.errors import RaygptError


def sample(
    engine: Engine,
    state: Any,
    prompt: NDArray[np.int32],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Continue prompts [rows, time] by up to `tokens` ids, as far as the context reaches: [rows, more].

    A temperature of 0 takes the likeliest token each time.
    """
    if prompt.shape[1] > engine.context:
        raise RaygptError(f"the prompt has {prompt.shape[1]} tokens, and the model sees {engine.context}; shorten it")
    random = np.random.default_rng(seed)
    room = min(tokens, engine.context - prompt.shape[1])
    logits, cache = engine.prefill(state, prompt)
    drawn = np.empty((len(prompt), room), dtype=np.int32)
    for n in range(room):
        drawn[:, n] = _draw(logits, temperature, top_k, random)
        if n + 1 < room:
            logits, cache = engine.decode(state, drawn[:, n : n + 1], prompt.shape[1] + n, cache)
    return drawn


def _draw(
    logits: NDArray[np.floating[Any]], temperature: float, top_k: int | None, random: np.random.Generator
) -> NDArray[np.int32]:
    """One id per row. Adding Gumbel noise and taking the largest is drawing from the softmax."""
    if not temperature:
        return logits.argmax(-1).astype(np.int32)
    if top_k and top_k < logits.shape[-1]:
        smallest = np.partition(logits, -top_k, axis=-1)[:, -top_k, None]
        logits = np.where(logits < smallest, -np.inf, logits)
    return (logits / temperature + random.gumbel(size=logits.shape)).argmax(-1).astype(np.int32)
