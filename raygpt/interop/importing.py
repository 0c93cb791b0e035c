"""Hugging Face's GPT-2 weights as a run at step 0, for `run.start_from`: any size, safetensors only."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from raygpt import storage
from raygpt.config import PRESETS, SIZES, Model, Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import FILE_NAME, Gpt2, Tokenizer
from raygpt.engines import engine_of, require
from raygpt.engines.base import Weights
from raygpt.errors import RaygptError, first_line
from raygpt.interop import gpt2
from raygpt.interop.exporting import CONFIG, WEIGHTS
from raygpt.interop.tokenizer_json import from_json
from raygpt.models import describe
from raygpt.recipes.explain import explain_first
from raygpt.runs import RECIPE, OpenRun, checkpoints, open_run

INDEX = f"{WEIGHTS}.index.json"  # of models that are split into several files
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
WANTED = [CONFIG, FILE_NAME, "*.safetensors", INDEX]  # of a repository on the Hub
AS_OURS = {  # key of the config -> its default, and the values that our GPT-2 supports
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
}


def import_run(source: str, out: str, engine: str = "jax") -> OpenRun:
    """A run at step 0 with the weights and the tokenizer of a folder, or of a repository on the Hub."""
    out = storage.absolute(out).rstrip("/")
    if storage.sizes(out) or storage.folders(out):
        raise RaygptError(f"{out} is not empty; name a new folder for the run")
    folder = _folder(source)
    settings = _config(folder)
    tokenizer = _tokenizer(folder)
    recipe = _recipe(settings, tokenizer, out, engine)
    require(engine)
    parameters = _parameters(folder, settings, recipe.model, tokenizer.vocab)
    _write(recipe, tokenizer, parameters, out)
    return open_run(out)


def _folder(source: str) -> Path:
    """The folder itself, or a copy of what is needed of a repository."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise RaygptError(f"{source}: there is no such folder; name one that holds {CONFIG} and {WEIGHTS}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise RaygptError(
            f"{source}: there is no such folder; a name on the Hugging Face Hub needs the extra hf: "
            "pip install 'raygpt[hf]'"
        ) from None
    try:
        return Path(snapshot_download(source, allow_patterns=WANTED))
    except Exception as error:  # the network's and the Hub's exceptions have no common class
        raise RaygptError(
            f"{source} is neither a folder here nor a repository that can be reached ({first_line(error)}); "
            "check the name"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = _read_json(folder / CONFIG, "it is no model of transformers")
    kind = settings.get("model_type")
    if kind != "gpt2":
        raise RaygptError(f"{folder}: is a model of type {kind}, and raygpt trains GPT-2; name one of type gpt2")
    for key, (default, allowed) in AS_OURS.items():
        value = settings.get(key, default)
        if value not in allowed:
            raise RaygptError(f"{folder}: {key} is {value}, and raygpt's GPT-2 has {allowed[0]}; name another model")
    inner = settings.get("n_inner")
    if inner not in (None, 4 * settings["n_embd"]):
        raise RaygptError(f"{folder}: n_inner is {inner}, and raygpt's GPT-2 has 4 · n_embd; name another model")
    return settings


def _tokenizer(folder: Path) -> Tokenizer:
    saved = _read_json(folder / FILE_NAME, "save its tokenizer there: AutoTokenizer.from_pretrained(…).save_pretrained")
    return from_json(saved, str(folder / FILE_NAME))


def _read_json(path: Path, otherwise: str) -> Any:
    read = storage.read_json(str(path), "copy it again")
    if read is None:
        raise RaygptError(f"{path.parent} has no {path.name}; {otherwise}")
    return read


def _recipe(settings: Mapping[str, Any], tokenizer: Tokenizer, out: str, engine: str) -> Recipe:
    """A recipe with what is known of the model; the rest is defaults, which a run that starts from it replaces."""
    home, _, name = out.rpartition("/")
    model = {
        "layers": settings["n_layer"],
        "heads": settings["n_head"],
        "width": settings["n_embd"],
        "context": settings["n_positions"],
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "tied_head": settings.get("tie_word_embeddings", True),
    }
    preset = [name for name, keys in PRESETS.items() if all(model.get(key) == keys.get(key) for key in SIZES)]
    values = {
        "engine": engine,
        "model": {**model, **({"preset": preset[0]} if preset else {})},
        "data": {"tokenizer": "gpt2" if isinstance(tokenizer, Gpt2) else out},
        "training": {"batch_tokens": model["context"]},
        "run": {"name": name, "storage": home},
    }
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RaygptError(explain_first(error)) from None


def _parameters(folder: Path, settings: Mapping[str, Any], model: Model, vocab: int) -> dict[str, NDArray[Any]]:
    """By our names, without masks and the vocabulary's padding."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in _files(folder):
        arrays |= _arrays(path)
    named = {name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": array
             for name, array in arrays.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}  # fmt: skip
    if settings.get("tie_word_embeddings", True):
        named.pop("lm_head.weight", None)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in named and len(named[name]) < vocab:
            raise RaygptError(
                f"{folder}: {len(named[name])} tokens in {name}, {vocab} in its tokenizer; name a whole model"
            )
        if name in named:
            named[name] = named[name][:vocab]
    try:
        return gpt2.from_hugging_face(named, describe(model, vocab))
    except (KeyError, ValueError) as error:
        raise RaygptError(f"the weights are not those of the config: {error}; copy the model again") from None


def _files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one, or those that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(_read_json(folder / INDEX, "")["weight_map"].values()))]
    if any((folder / name).is_file() for name in PICKLED):
        raise RaygptError(
            f"{folder} has its weights as a pickle ({PICKLED[0]}), which can run any code and is not read; make "
            "safetensors of it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise RaygptError(f"{folder} has no {WEIGHTS}; name a folder that transformers saved a model into")


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """fp32, whatever it was saved in."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return {name: np.asarray(file.get_tensor(name), dtype=np.float32) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        raise RaygptError(f"{path} cannot be read ({error}); copy it again") from None


def _write(recipe: Recipe, tokenizer: Tokenizer, parameters: dict[str, NDArray[Any]], out: str) -> None:
    """The run's files; the checkpoint's marker comes last."""
    storage.write_bytes(storage.join(out, RECIPE), recipe.to_yaml().encode())
    tokenizers.save(tokenizer, out)
    engine = engine_of(recipe.engine).Engine(recipe, tokenizer.vocab)
    state = engine.load(Weights(parameters))
    part, folder = checkpoints.parts_of(out) / "import", checkpoints.folder_of(out, 0)
    storage.delete_folder(str(part))  # left by an interrupted import to an object store
    engine.save(state, str(part))
    engine.wait_for_save()
    facts = {"engine": recipe.engine, "recipe": recipe.to_dict(), "tokenizer": tokenizers.fingerprint(tokenizer)}
    checkpoints.commit(folder, 0, {**facts, "data": []}, checkpoints.publish(part, folder))
