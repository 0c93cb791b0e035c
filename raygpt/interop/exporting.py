"""A run's model as a folder that transformers opens: weights, config, tokenizer, and a card that says what it is."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.config import Model
from raygpt.corpus.tokenizers import END_OF_TEXT, FILE_NAME
from raygpt.engines.base import Arrays
from raygpt.errors import RaygptError
from raygpt.inference.loaded import Weighed
from raygpt.interop import card
from raygpt.interop.tokenizer_json import to_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(found: Weighed, folder: str) -> dict[str, int]:
    """Write the folder; name and size of every file in it."""
    from safetensors.numpy import save_file

    folder = storage.absolute(folder)
    if storage.sizes(folder) or storage.folders(folder):
        raise RaygptError(f"{folder} is not empty; name a new folder, or delete it")
    tokenizer = to_json(found.tokenizer)
    texts = {
        CONFIG: _json(config(found.model, found.tokenizer.vocab, found.tokenizer.end_of_text)),
        "generation_config.json": _json(_ends(found.tokenizer.end_of_text)),
        FILE_NAME: _json(tokenizer),
        "tokenizer_config.json": _json(_tokenizer_config(found.model)),
        **card.files(found),
    }
    for name, text in texts.items():
        storage.write_bytes(storage.join(folder, name), text.encode())
    with storage.written_whole(storage.join(folder, WEIGHTS)) as path:
        save_file(dict(weights(found.parameters, found.model)), path, {"format": "pt"})
    return storage.sizes(folder)


def weights(parameters: Arrays, model: Model) -> dict[str, NDArray[Any]]:
    """Under their names already. transformers' GPT-2 always has biases: where ours has none, they are zero."""
    arrays = {name: np.ascontiguousarray(array) for name, array in parameters.items()}
    if model.bias:
        return arrays
    missing = {}
    for name, array in arrays.items():
        if name.endswith(".weight") and not name.startswith(("transformer.wte", "transformer.wpe", "lm_head")):
            missing[name.removesuffix("weight") + "bias"] = np.zeros(array.shape[-1], array.dtype)
    return {**arrays, **missing}


def config(model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
    """What transformers' GPT2LMHeadModel is made from."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
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
        "attn_pdrop": 0.0,  # ours drops nothing inside attention
        "torch_dtype": "float32",
        **_ends(end_of_text),
    }


def _ends(end_of_text: int) -> dict[str, int]:
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def _tokenizer_config(model: Model) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
