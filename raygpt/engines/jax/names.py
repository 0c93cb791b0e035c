"""The model's parameters as arrays under Hugging Face's names: what both engines and the outside world share."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import Model
from raygpt.engines.base import Weights
from raygpt.engines.jax.model import padded_vocab

Arrays = dict[str, NDArray[Any]]
BLOCK = {  # ours -> Hugging Face's, below transformer.h.N
    "norm1.scale": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "qkv.kernel": "attn.c_attn.weight",
    "qkv.bias": "attn.c_attn.bias",
    "out.kernel": "attn.c_proj.weight",
    "out.bias": "attn.c_proj.bias",
    "norm2.scale": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "up.kernel": "mlp.c_fc.weight",
    "up.bias": "mlp.c_fc.bias",
    "down.kernel": "mlp.c_proj.weight",
    "down.bias": "mlp.c_proj.bias",
}
TOP = {
    "tokens.embedding": "transformer.wte.weight",
    "positions.embedding": "transformer.wpe.weight",
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.embedding": "lm_head.weight",
}
WITH_VOCABULARY = ("tokens.embedding", "head.embedding")  # their padding stays inside


def to_hugging_face(parameters: Any, model: Model, vocab: int) -> Arrays:
    """Every parameter by its Hugging Face name; kernels are [in, out], as its Conv1D has them."""
    named: Arrays = {}
    for name, value in _leaves(parameters):
        array = np.asarray(value)
        if name in TOP:
            named[TOP[name]] = array[:vocab] if name in WITH_VOCABULARY else array
        else:
            part = name.removeprefix("blocks.")
            for layer in range(model.layers):
                named[f"transformer.h.{layer}.{BLOCK[part]}"] = array[layer].reshape(_shape(part, model))
    return named


def to_weights(parameters: Any, means: Any, squares: Any, step: Any, model: Model, vocab: int) -> Weights:
    """A state's parts, trees of arrays on this host, under Hugging Face's names."""
    named = [to_hugging_face(tree, model, vocab) for tree in (parameters, means, squares)]
    return Weights(named[0], named[1], named[2], int(step))


def from_hugging_face(arrays: Mapping[str, NDArray[Any]], like: Any, model: Model, vocab: int) -> Any:
    """A tree shaped `like` ours; the padding of the vocabulary is zero."""
    tree: dict[str, Any] = {}
    for name, leaf in _leaves(like):
        if name in TOP:
            array = arrays[TOP[name]]
            if name in WITH_VOCABULARY:
                array = np.pad(array, ((0, padded_vocab(vocab) - vocab), (0, 0)))
        else:
            theirs = BLOCK[name.removeprefix("blocks.")]
            array = np.stack([arrays[f"transformer.h.{layer}.{theirs}"] for layer in range(model.layers)])
        node = tree
        *path, last = name.split(".")
        for key in path:
            node = node.setdefault(key, {})
        node[last] = array.reshape(leaf.shape).astype(leaf.dtype)
    return tree


def _shape(part: str, model: Model) -> tuple[int, ...]:
    """A matrix where ours has heads and Q/K/V as axes of their own; a vector where it is a bias."""
    if not part.endswith("kernel"):
        return (-1,)
    return (-1, model.width) if part in ("out.kernel", "down.kernel") else (model.width, -1)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
