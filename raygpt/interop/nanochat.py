"""NanoChat as transformers has it: norms without gains, one of them behind the embedding, and a soft-cap of the logits.

Its RoPE turns the other way, which equals ours with the second half of every head's queries and keys negated: a norm
without gains and their products do not change by that.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import Model
from raygpt.engines.base import Arrays
from raygpt.interop import decoder
from raygpt.interop.family import Family, unlike
from raygpt.models import Description

LAYERS = {**decoder.LAYERS, "norm_gain": False, "embedding_norm": True, "qk_norm": True, "bias": False}
BLOCK = {**decoder.BLOCK, "up": "mlp.fc1", "down": "mlp.fc2"}
ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_new"}  # ours -> theirs
SOFTCAP = 15.0  # NanoChatConfig's default


def to_hugging_face(parameters: Arrays, description: Description) -> dict[str, NDArray[Any]]:
    """A model's arrays under transformers' names."""
    return decoder.to_hugging_face(_turned(parameters, description), description, BLOCK)


def from_hugging_face(arrays: Arrays, description: Description) -> dict[str, NDArray[Any]]:
    """The inverse; KeyError if an array is missing, ValueError if a shape is wrong or an array is unknown."""
    return _turned(decoder.from_hugging_face(arrays, description, BLOCK), description)


def _turned(parameters: Arrays, description: Description) -> dict[str, NDArray[Any]]:
    head = description.sizes["head_size"]
    signs = np.repeat(np.array([1, -1], np.float32), head // 2)
    kernels = ("blocks.query.kernel", "blocks.key.kernel")  # [layer, width, heads, head]
    return {**parameters, **{name: parameters[name] * signs for name in kernels}}


def _misfits(model: Model) -> dict[str, Any]:
    return unlike(model, LAYERS) | ({} if model.mlp in ACTIVATIONS else {"mlp": model.mlp})


def _config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    return {
        **decoder.config(model, vocab, end_of_text),
        "hidden_act": ACTIVATIONS[model.mlp],
        "final_logit_softcapping": model.softcap,
    }


def _keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **decoder.keys(settings),
        "preset": "nanochat",
        "norm_gain": False,
        "embedding_norm": True,
        "qk_norm": True,
        "mlp": "relu2" if settings.get("hidden_act", "relu2") == "relu2" else "gelu",
        "softcap": settings.get("final_logit_softcapping", SOFTCAP),
    }


FAMILY = Family(
    name="NanoChat",
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    misfits=_misfits,
    config=_config,
    keys=_keys,
    to_hugging_face=to_hugging_face,
    from_hugging_face=from_hugging_face,
    required={"hidden_act": ("relu2", "gelu_new", "gelu_pytorch_tanh"), "attention_bias": (False,)},
    always={},
    prefix=decoder.PREFIX,
    token_table=decoder.TOP["tokens"],
    unused=decoder.UNUSED,
)
