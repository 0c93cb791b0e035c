"""What a model writes from the recipe's prompts, the same at each evaluation, so that its samples can be compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import shown
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.errors import RaygptError
from raygpt.inference.sampling import Writer, sample

TOKENS = 200  # new ones, where the context has room for them


def write(model: Writer, state: Any, tokenizer: Tokenizer, prompts: Sequence[str], seed: int) -> list[str]:
    """A text for each prompt, which it begins with; without any, one as a document begins.

    Prompts of as many tokens are written on from in one batch.
    """
    encoded = encode(tokenizer, prompts, model.context)
    written: dict[int, str] = {}
    for length in sorted({len(ids) for ids in encoded}):
        alike = [number for number, ids in enumerate(encoded) if len(ids) == length]
        drawn = sample(model, state, np.stack([encoded[number] for number in alike]), TOKENS, seed=seed)
        written |= {number: tokenizer.decode(ids.tolist()) for number, ids in zip(alike, drawn, strict=True)}
    return [prompt + written[number] for number, prompt in enumerate(prompts or [""])]


def encode(tokenizer: Tokenizer, prompts: Sequence[str], context: int) -> list[NDArray[np.int32]]:
    """The ids of each; those of a document's beginning where there is none. Refuses what cannot be written on from."""
    if not prompts:
        return [np.array([tokenizer.end_of_text], dtype=np.int32)]
    return [_ids(tokenizer, prompt, context) for prompt in prompts]


def _ids(tokenizer: Tokenizer, prompt: str, context: int) -> NDArray[np.int32]:
    try:
        ids = tokenizer.encode([prompt])[0].astype(np.int32)
    except RaygptError as error:  # a char tokenizer knows its own corpus' characters
        cause = str(error).partition(";")[0]
        raise RaygptError(f"training.prompts: {shown(prompt)} cannot be read: {cause}; leave it out") from None
    if len(ids) >= context:
        raise RaygptError(
            f"training.prompts: {shown(prompt)} has {len(ids)} tokens, and the model sees {context}; shorten it"
        )
    return ids
