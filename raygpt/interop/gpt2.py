"""GPT-2 as transformers has it: the names and layouts of its weights, and its config."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import PRESETS, SIZE_KEYS, Model
from raygpt.engines.base import Arrays
from raygpt.errors import RaygptError
from raygpt.interop.family import HEAD, Family, taken
from raygpt.models import Description

TOP = {  # ours -> theirs
    "tokens": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm.gain": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head": HEAD,
}
BLOCK = {"norm1": "ln_1", "out": "attn.c_proj", "norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
TOGETHER, THEIR_QKV = ("query", "key", "value"), "attn.c_attn"  # one matrix there: all queries, all keys, all values
KIND = {"kernel": "weight", "gain": "weight", "bias": "bias"}


def to_hugging_face(parameters: Arrays, description: Description) -> dict[str, NDArray[Any]]:
    """A model's arrays, or those of an optimizer's slot, under transformers' names. Kernels are [in, out] there, as its
    Conv1D has them."""
    named = {theirs: parameters[ours] for ours, theirs in TOP.items() if ours in parameters}
    for layer in range(description.sizes["layer"]):
        for ours, theirs in _block(layer, description).items():
            parts = [_flat(parameters[f"blocks.{name}"][layer], name) for name in ours]
            named[theirs] = np.concatenate(parts, axis=-1)
    return named


def from_hugging_face(arrays: Arrays, description: Description) -> dict[str, NDArray[Any]]:
    """The inverse; KeyError if an array is missing, ValueError if a shape is wrong or an array is unknown."""
    left = dict(arrays)
    named = {
        ours: taken(left, theirs, description.shapes[ours])
        for ours, theirs in TOP.items()
        if ours in description.by_name
    }
    layers: dict[str, list[NDArray[Any]]] = {}
    for layer in range(description.sizes["layer"]):
        for ours, theirs in _block(layer, description).items():
            together = taken(left, theirs, _their_shape(ours, description))
            for name, part in zip(ours, np.split(together, len(ours), axis=-1), strict=True):
                layers.setdefault(f"blocks.{name}", []).append(part)
    named |= {name: np.stack(parts).reshape(description.shapes[name]) for name, parts in layers.items()}
    if unknown := left.keys() - {HEAD}:  # a state_dict has a tied head, too
        raise ValueError(f"{min(unknown)} is not among them")
    return named


def _their_shape(names: tuple[str, ...], description: Description) -> tuple[int, ...]:
    """Of one layer's array that holds ours with these names below `blocks.`."""
    parameter = description.by_name[f"blocks.{names[0]}"]
    own, inputs = description.own_shape(parameter), len(parameter.fan_in)
    if parameter.role == "matrix":
        return prod(own[:inputs]), len(names) * prod(own[inputs:])
    return (len(names) * prod(own),)


def _block(layer: int, description: Description) -> dict[tuple[str, ...], str]:
    """Our names below `blocks.` -> their name, for every array of a layer."""
    kinds = ("kernel", "bias") if "blocks.up.bias" in description.by_name else ("kernel",)
    found: dict[tuple[str, ...], str] = {
        tuple(f"{part}.{kind}" for part in TOGETHER): f"transformer.h.{layer}.{THEIR_QKV}.{KIND[kind]}"
        for kind in kinds
    }
    for name in description.by_name:
        _, _, ours = name.partition("blocks.")
        part, _, kind = ours.partition(".")
        if part in BLOCK:
            found[(ours,)] = f"transformer.h.{layer}.{BLOCK[part]}.{KIND[kind]}"
    return found


def _flat(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Flatten to a matrix (ours has heads as a separate axis), or to a vector if it is a bias or a gain."""
    if not name.endswith("kernel"):
        return array.reshape(-1)
    return array.reshape(-1, array.shape[-1]) if name.startswith("out") else array.reshape(len(array), -1)


def _misfits(model: Model) -> dict[str, Any]:
    return model.unlike_gpt2


def _config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_head,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,  # ours has no dropout inside attention
        "torch_dtype": "float32",
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def _keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    inner = settings.get("n_inner")
    if inner not in (None, 4 * settings["n_embd"]):
        raise RaygptError(f"n_inner is {inner}, and raygpt's GPT-2 has 4 · n_embd; name another model")
    keys = {
        "layers": settings["n_layer"],
        "heads": settings["n_head"],
        "width": settings["n_embd"],
        "context": settings["n_positions"],
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "tied_head": settings.get("tie_word_embeddings", True),
    }
    published = [name for name, preset in PRESETS.items() if all(keys[key] == preset.get(key) for key in SIZE_KEYS)]
    return keys | ({"preset": published[0]} if published else {})


FAMILY = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    misfits=_misfits,
    config=_config,
    keys=_keys,
    to_hugging_face=to_hugging_face,
    from_hugging_face=from_hugging_face,
    required={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    always={"norm_gain": True, "bias": True},
    prefix="transformer.",
    token_table=TOP["tokens"],
    unused=(".attn.bias", ".attn.masked_bias"),  # masks
)
