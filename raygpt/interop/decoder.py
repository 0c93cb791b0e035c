"""What transformers' Llama, Qwen3 and NanoChat share: names and layouts of weights, sizes and RoPE in a config.

Their layers are nn.Linear: a kernel is [out, in] there, with heads one after another.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import Model
from raygpt.engines.base import Arrays
from raygpt.errors import RaygptError
from raygpt.interop.family import HEAD, taken
from raygpt.models import Description, Parameter

TOP = {"tokens": "model.embed_tokens.weight", "norm.gain": "model.norm.weight", "head": HEAD}  # ours -> theirs
BLOCK = {  # ours, below `blocks.` -> theirs, below `model.layers.N.`
    "norm1": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
PREFIX = "model."
UNUSED = (".rotary_emb.inv_freq",)  # of older files: RoPE's frequencies, which follow from the config
# Our keys as all of these classes have them. No class at all has value embeddings, x0 mixing or head gates.
LAYERS = {"norm": "rms", "position": "rope", "value_embeddings": 0, "x0_mixing": False, "head_gates": False}
# Transformers' defaults; configs before transformers 5 have these keys beside the others.
ROPE_NUMBERS = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROPE_KEYS = {"rope_type", "type", "factor", *ROPE_NUMBERS}  # with another, e.g. full_attention, layers may differ


def to_hugging_face(
    parameters: Arrays, description: Description, block: Mapping[str, str] = BLOCK
) -> dict[str, NDArray[Any]]:
    """A model's arrays under transformers' names."""
    named: dict[str, NDArray[Any]] = {}
    for parameter in description.parameters:
        array, shape = parameters[parameter.name], _their_shape(parameter, description)
        for layer, one in enumerate(array if parameter.is_stacked else [array]):
            theirs = one.reshape(shape[::-1]).T if parameter.role == "matrix" else one.reshape(shape)
            named[_their_name(parameter, layer, block)] = theirs
    return named


def from_hugging_face(
    arrays: Arrays, description: Description, block: Mapping[str, str] = BLOCK
) -> dict[str, NDArray[Any]]:
    """The inverse; KeyError if an array is missing, ValueError if a shape is wrong or an array is unknown."""
    left, named = dict(arrays), {}
    for parameter in description.parameters:
        layers = range(description.sizes["layer"] if parameter.is_stacked else 1)
        ones = [_taken(left, parameter, description, _their_name(parameter, layer, block)) for layer in layers]
        named[parameter.name] = np.stack(ones) if parameter.is_stacked else ones[0]
    if left:
        raise ValueError(f"{min(left)} is not among them")
    return named


def _taken(left: dict[str, NDArray[Any]], parameter: Parameter, description: Description, name: str) -> NDArray[Any]:
    """One layer's array, in our layout."""
    array = taken(left, name, _their_shape(parameter, description))
    return (array.T if parameter.role == "matrix" else array).reshape(description.own_shape(parameter))


def _their_name(parameter: Parameter, layer: int, block: Mapping[str, str]) -> str:
    if not parameter.is_stacked:
        return TOP[parameter.name]
    part, _, kind = parameter.name.removeprefix("blocks.").partition(".")
    return f"model.layers.{layer}.{block[part]}.{'bias' if kind == 'bias' else 'weight'}"


def _their_shape(parameter: Parameter, description: Description) -> tuple[int, ...]:
    """A kernel is [out, in], a bias of several heads one vector."""
    own, inputs = description.own_shape(parameter), len(parameter.fan_in)
    if parameter.role == "matrix":
        return prod(own[inputs:]), prod(own[:inputs])
    return (prod(own),) if parameter.is_vector else own


def config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    """The keys that all of these classes have."""
    return {
        "vocab_size": vocab,
        "hidden_size": model.width,
        "intermediate_size": model.size_of_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.size_of_head,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": _rope(model),
        "rope_theta": model.rope_base,  # transformers 4 reads this, and rope_scaling; its type is a KeyError there
        "rope_scaling": None if model.rope_share == 1 else _rope(model),
        "attention_bias": model.bias,
        "attention_dropout": 0.0,  # ours has no dropout inside attention
        "tie_word_embeddings": model.tied_head,
        "torch_dtype": "float32",
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
    }


def keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of what these classes have in common."""
    base, share = _base_and_share(settings)
    return {
        "layers": settings["num_hidden_layers"],
        "heads": settings["num_attention_heads"],
        "width": settings["hidden_size"],
        "context": settings["max_position_embeddings"],
        "head_size": settings.get("head_dim"),
        "kv_heads": settings.get("num_key_value_heads"),
        "norm": "rms",
        "norm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "position": "rope",
        "rope_base": base,
        "rope_share": share,
        "hidden": settings["intermediate_size"],
        "bias": settings.get("attention_bias", False),
        "tied_head": settings.get("tie_word_embeddings", False),
        "init": "modern",
    }


def _rope(model: Model) -> dict[str, Any]:
    whole = {"rope_type": "default", "rope_theta": model.rope_base}
    part = {**whole, "rope_type": "proportional", "partial_rotary_factor": model.rope_share}
    return whole if model.rope_share == 1 else part


def _base_and_share(settings: Mapping[str, Any]) -> tuple[float, float]:
    """rope_base and rope_share; a RoPE of another form, or with frequencies that are scaled, is refused."""
    given = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    inner = given if isinstance(given, Mapping) else {"rope_parameters": given}
    written = {**inner, **{key: settings.get(key) for key in ROPE_NUMBERS if inner.get(key) is None}}
    rope = {key: value for key, value in written.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base, share = (rope.get(key, default) for key, default in ROPE_NUMBERS.items())
    is_known = rope.keys() <= ROPE_KEYS and all(isinstance(number, int | float) for number in (base, share))
    is_whole, is_part = kind == "default" and share == 1, kind == "proportional" and rope.get("factor", 1.0) == 1.0
    if not (is_known and (is_whole or is_part)):
        raise RaygptError(f"its RoPE is {rope}, and raygpt's is not scaled; name another model")
    return float(base), float(share)
