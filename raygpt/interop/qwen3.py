"""Qwen3 as transformers has it: Llama with QK-norm, and without biases in its MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raygpt.config import Model
from raygpt.errors import RaygptError
from raygpt.interop import decoder, llama
from raygpt.interop.family import unlike

LAYERS = {**llama.LAYERS, "qk_norm": True, "bias": False}


def _misfits(model: Model) -> dict[str, Any]:
    return unlike(model, LAYERS)


def _config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    return {**decoder.config(model, vocab, end_of_text), "hidden_act": "silu", "use_sliding_window": False}


def _keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    windows = {*(settings.get("layer_types") or ())} - {"full_attention"}
    if windows:
        raise RaygptError(f"layer_types has {min(windows)}, and raygpt's attention is full; name another model")
    sizes = {"num_key_value_heads": 32, "head_dim": 128, **settings}  # Qwen3Config's defaults
    return {**decoder.keys(sizes), "preset": "qwen3", "mlp": "swiglu", "qk_norm": True}


FAMILY = replace(
    llama.FAMILY,
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    misfits=_misfits,
    config=_config,
    keys=_keys,
    required={**llama.FAMILY.required, "use_sliding_window": (False,), "attention_bias": (False,)},
)
