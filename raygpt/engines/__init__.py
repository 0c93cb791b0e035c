"""What computes a recipe: JAX or PyTorch. Each is imported only when it is asked for."""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from raygpt.config import Model
from raygpt.engines.base import Arrays, Reader, Weights
from raygpt.engines.torch import require_torch


def require(name: str, implementation: str = "raygpt") -> None:
    """Refuse, with the remedy, where a package that an engine needs is missing.

    Training asks for the recipe's `model.implementation`; a reader is raygpt's own whatever trained the run.
    """
    if name == "torch":
        require_torch(implementation)


def for_gpus(name: str) -> str | None:
    """What to install for an engine to use NVIDIA's GPUs, where what is installed here cannot."""
    if name == "jax" and not find_spec("jax_plugins") and not metadata.entry_points(group="jax_plugins"):
        return "pip install 'raygpt[cuda]'"
    if name == "torch" and metadata.version("torch").endswith("+cpu"):
        return "install PyTorch's CUDA build"
    return None


def engine_of(name: str) -> Any:
    """The module of an engine: `set_up` of a process, `find_devices` for a recipe, and its `Engine`."""
    return import_module(f"raygpt.engines.{name}.engine")


def make_reader(name: str, model: Model, vocab: int) -> Reader:
    """What reads a trained model with an engine's arithmetic, in this process."""
    engine_of(name).set_up()
    reader: Reader = import_module(f"raygpt.engines.{name}.reader").Reader(model, vocab)
    return reader


def read_parameters(name: str, folder: str, model: Model, vocab: int) -> Arrays:
    """The parameters in a checkpoint that an engine wrote; what else is in it is left where it is."""
    parameters: Arrays = import_module(f"raygpt.engines.{name}.checkpoint").read_parameters(folder, model, vocab)
    return parameters


def devices_of(name: str) -> Any:
    """What an engine finds here: `use_all_cores`, `names`, `is_accelerated`, `peak_bytes`, and JAX's `one`. No model is
    imported."""
    return import_module(f"raygpt.engines.{name}.devices")


def read_weights(name: str, folder: str, model: Model, vocab: int) -> Weights:
    """The state in a checkpoint that an engine wrote, as plain arrays that the other can load."""
    weights: Weights = import_module(f"raygpt.engines.{name}.checkpoint").read_weights(folder, model, vocab)
    return weights
