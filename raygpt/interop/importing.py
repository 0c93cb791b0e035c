"""A model that transformers saved as a run at step 0, for `run.start_from`: any size, safetensors only."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from raygpt import storage
from raygpt.config import Model, Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import FILE_NAME, Gpt2, Tokenizer
from raygpt.engines import engine_of, require
from raygpt.engines.base import PlainState
from raygpt.errors import RaygptError, first_line
from raygpt.interop.exporting import CONFIG, WEIGHTS
from raygpt.interop.families import family_named
from raygpt.interop.family import HEAD, Family
from raygpt.interop.tokenizer_json import from_json
from raygpt.models import describe
from raygpt.recipes.explain import explain_first
from raygpt.runs import RECIPE, OpenRun, checkpoints, open_run

INDEX = f"{WEIGHTS}.index.json"  # of models that are split into several files
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
WANTED = [CONFIG, FILE_NAME, "*.safetensors", INDEX]  # of a repository on the Hub


def import_run(source: str, out: str, engine: str = "jax", context: int | None = None) -> OpenRun:
    """A run at step 0 with the weights and the tokenizer of a folder, or of a repository on the Hub.

    `context` shortens the model's own, which may be far more than one trains with, or has memory to cache.
    """
    out = storage.absolute(out).rstrip("/")
    if storage.sizes(out) or storage.folders(out):
        raise RaygptError(f"{out} is not empty; name a new folder for the run")
    folder = _folder(source)
    family, keys, end_of_text = _config(folder)
    tokenizer = _tokenizer(folder, end_of_text)
    recipe = _recipe(_shortened(keys, context), tokenizer, out, engine)
    require(engine)
    parameters = _parameters(folder, family, recipe.model, tokenizer.vocab)
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


def _config(folder: Path) -> tuple[Family, dict[str, Any], int | None]:
    """The family, our keys, and the token at which texts end."""
    settings: dict[str, Any] = _read_json(folder / CONFIG, "it is no model of transformers")
    try:
        family = family_named(settings)
        keys = family.keys(settings)
    except RaygptError as error:
        raise RaygptError(f"{folder}: {error}") from None
    except KeyError as error:
        raise RaygptError(f"{folder / CONFIG} has no {error.args[0]}; copy it again") from None
    ends = settings.get("eos_token_id")  # a list in chat models
    return family, keys, next(iter(ends), None) if isinstance(ends, list) else ends


def _tokenizer(folder: Path, end_of_text: int | None) -> Tokenizer:
    saved = _read_json(folder / FILE_NAME, "save its tokenizer there: AutoTokenizer.from_pretrained(…).save_pretrained")
    return from_json(saved, str(folder / FILE_NAME), end_of_text)


def _read_json(path: Path, otherwise: str) -> Any:
    read = storage.read_json(str(path), "copy it again")
    if read is None:
        raise RaygptError(f"{path.parent} has no {path.name}; {otherwise}")
    return read


def _shortened(keys: Mapping[str, Any], context: int | None) -> Mapping[str, Any]:
    if context is None:
        return keys
    if keys.get("position") != "rope":
        raise RaygptError(f"--context: this model has a table of {keys['context']} positions; leave --context out")
    if context > keys["context"]:
        raise RaygptError(f"--context: this model was made for {keys['context']} tokens; write that or less")
    return {**keys, "context": context}


def _recipe(keys: Mapping[str, Any], tokenizer: Tokenizer, out: str, engine: str) -> Recipe:
    """A recipe with what is known of the model; the rest is defaults, which a run that starts from it replaces."""
    home, _, name = out.rpartition("/")
    values = {
        "engine": engine,
        "model": keys,
        "data": {"tokenizer": "gpt2" if isinstance(tokenizer, Gpt2) else out},
        "training": {"batch_tokens": keys["context"]},
        "run": {"name": name, "storage": home},
    }
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RaygptError(explain_first(error)) from None
    return recipe.model_copy(update={"model": recipe.model.without_derived()})


def _parameters(folder: Path, family: Family, model: Model, vocab: int) -> dict[str, NDArray[Any]]:
    """By our names, without what is no parameter and the vocabulary's padding."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in _files(folder):
        arrays |= _arrays(path)
    named = {name if name.startswith((family.prefix, HEAD)) else f"{family.prefix}{name}": array
             for name, array in arrays.items() if not name.endswith(family.unused)}  # fmt: skip
    if model.tied_head:
        named.pop(HEAD, None)
    for name in {family.token_table, HEAD} & named.keys():
        if len(named[name]) < vocab:
            raise RaygptError(
                f"{folder}: {len(named[name])} tokens in {name}, {vocab} in its tokenizer; name a whole model"
            )
        named[name] = named[name][:vocab]
    try:
        return family.from_hugging_face(named, describe(model, vocab))
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
    import ml_dtypes  # noqa: F401 - numpy's bf16, which comes with jax
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
    state = engine.load(PlainState(parameters))
    part, folder = checkpoints.parts_folder(out) / "import", checkpoints.folder_of(out, 0)
    storage.delete_folder(str(part))  # left by an interrupted import to an object store
    engine.save(state, str(part))
    engine.wait_for_save()
    facts = {"engine": recipe.engine, "recipe": recipe.to_dict(), "tokenizer": tokenizers.fingerprint(tokenizer)}
    checkpoints.commit(folder, 0, {**facts, "data": []}, checkpoints.publish(part, folder))
