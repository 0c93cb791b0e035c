"""Generates samples from the recipe's prompts: with the same seed at each evaluation, so that they can be compared."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import shown
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.errors import RaygptError
from raygpt.inference.sampling import Decoder, encode_prompt, sample

TOKENS = 200  # new tokens, if the context has room for them


def write(
    model: Decoder,
    state: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    seed: int,
    part_done: Callable[[], None] = lambda: None,
) -> list[str]:
    """A text for each prompt, including it; without prompts, one text that starts a document.

    Prompts of the same length are continued in one batch, after which `part_done` is called.
    """
    encoded = encode(tokenizer, prompts, model.context)
    written: dict[int, str] = {}
    for length in sorted({len(ids) for ids in encoded}):
        alike = [number for number, ids in enumerate(encoded) if len(ids) == length]
        drawn = sample(model, state, np.stack([encoded[number] for number in alike]), TOKENS, seed=seed)
        written |= {number: tokenizer.decode(ids.tolist()) for number, ids in zip(alike, drawn, strict=True)}
        part_done()
    return [prompt + written[number] for number, prompt in enumerate(prompts or [""])]


def encode(tokenizer: Tokenizer, prompts: Sequence[str], context: int) -> list[NDArray[np.int32]]:
    """The ids of each prompt; end-of-text if there are none. Refuses prompts that cannot be continued."""
    if not prompts:
        return [encode_prompt(tokenizer, None)]
    names = [f"training.prompts: {shown(prompt)}" for prompt in prompts]
    encoded = [encode_prompt(tokenizer, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    for name, ids in zip(names, encoded, strict=True):
        if len(ids) >= context:
            raise RaygptError(f"{name} has {len(ids)} tokens, and the model sees {context}; shorten it")
    return encoded
