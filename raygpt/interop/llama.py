"""Llama as transformers has it."""

from collections.abc import Mapping
from typing import Any

from raygpt.config import Model
from raygpt.errors import RaygptError
from raygpt.interop import decoder
from raygpt.interop.family import Family, unlike

LAYERS = {**decoder.LAYERS, "embedding_norm": False, "qk_norm": False, "mlp": "swiglu", "softcap": None}


def _misfits(model: Model) -> dict[str, Any]:
    heads = {"head_size": model.size_of_head} if model.width % model.heads else {}  # which LlamaConfig does not take
    return unlike(model, LAYERS) | heads


def _config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    return {**decoder.config(model, vocab, end_of_text), "hidden_act": "silu", "mlp_bias": model.bias}


def _keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    biases = {key: settings.get(key, False) for key in ("attention_bias", "mlp_bias")}
    if len({*biases.values()}) > 1:
        raise RaygptError(f"{biases}, and raygpt's layers all have biases or none has; name another model")
    return {**decoder.keys(settings), "preset": "llama", "mlp": "swiglu"}


FAMILY = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    misfits=_misfits,
    config=_config,
    keys=_keys,
    to_hugging_face=decoder.to_hugging_face,
    from_hugging_face=decoder.from_hugging_face,
    required={"hidden_act": ("silu", "swish")},
    always={"norm_gain": True},
    prefix=decoder.PREFIX,
    token_table=decoder.TOP["tokens"],
    unused=decoder.UNUSED,
)
