"""Exports a run's model as a folder that transformers opens: weights, config, tokenizer, and a model card."""

import json
from typing import Any

from raygpt import storage
from raygpt.corpus.tokenizers import FILE_NAME, Tokenizer
from raygpt.errors import RaygptError
from raygpt.inference.loaded import CheckpointWeights
from raygpt.interop import card
from raygpt.interop.families import family_of
from raygpt.interop.tokenizer_json import to_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(found: CheckpointWeights, folder: str) -> dict[str, int]:
    """Write the folder. Returns name and size of every file."""
    from safetensors.numpy import save_file

    folder = storage.absolute(folder)
    if storage.sizes(folder) or storage.folders(folder):
        raise RaygptError(f"{folder} is not empty; name a new folder, or delete it")
    model, tokenizer = found.model, found.tokenizer
    family = family_of(model)
    texts = {
        CONFIG: _json(family.full_config(model, tokenizer.vocab, tokenizer.end_of_text)),
        "generation_config.json": _json(_ends(tokenizer.end_of_text)),
        FILE_NAME: _json(to_json(tokenizer)),
        "tokenizer_config.json": _json(_tokenizer_config(tokenizer, model.context)),
        **card.files(found, family),
    }
    for name, text in texts.items():
        storage.write_bytes(storage.join(folder, name), text.encode())
    with storage.atomic_write(storage.join(folder, WEIGHTS)) as path:
        save_file(family.exported(found.parameters, model, tokenizer.vocab), path, {"format": "pt"})
    return storage.sizes(folder)


def _ends(end_of_text: int) -> dict[str, int]:
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def _tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    end_of_text = tokenizer.decode([tokenizer.end_of_text])
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
