"""Exports a run's model as a folder that transformers opens: weights, config, tokenizer, and a model card."""

import json
from typing import Any

from raygpt import storage
from raygpt.config import Model
from raygpt.corpus.tokenizers import END_OF_TEXT, FILE_NAME
from raygpt.errors import RaygptError
from raygpt.inference.loaded import CheckpointWeights
from raygpt.interop import card, gpt2
from raygpt.interop.tokenizer_json import to_json
from raygpt.models import describe

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(found: CheckpointWeights, folder: str) -> dict[str, int]:
    """Write the folder. Returns name and size of every file."""
    from safetensors.numpy import save_file

    folder = storage.absolute(folder)
    if storage.sizes(folder) or storage.folders(folder):
        raise RaygptError(f"{folder} is not empty; name a new folder, or delete it")
    tokenizer = to_json(found.tokenizer)
    texts = {
        CONFIG: _json(gpt2.config(found.model, found.tokenizer.vocab, found.tokenizer.end_of_text)),
        "generation_config.json": _json(_ends(found.tokenizer.end_of_text)),
        FILE_NAME: _json(tokenizer),
        "tokenizer_config.json": _json(_tokenizer_config(found.model)),
        **card.files(found),
    }
    for name, text in texts.items():
        storage.write_bytes(storage.join(folder, name), text.encode())
    named = gpt2.to_hugging_face(found.parameters, describe(found.model, found.tokenizer.vocab))
    with storage.atomic_write(storage.join(folder, WEIGHTS)) as path:
        save_file(dict(gpt2.with_biases(named)), path, {"format": "pt"})
    return storage.sizes(folder)


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
