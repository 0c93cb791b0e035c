"""The engines that compute a recipe: JAX or PyTorch. Each is imported only when it is used."""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from raygpt.config import Model
from raygpt.engines.base import Arrays, PlainState, Reader, Slots
from raygpt.engines.torch import require_torch


def require(name: str, implementation: str = "raygpt") -> None:
    """Raise if a package that an engine needs is missing.

    Training needs the recipe's `model.implementation`; a reader is always raygpt's own.
    """
    if name == "torch":
        require_torch(implementation)


def for_gpus(name: str) -> str | None:
    """What to install so that an engine can use NVIDIA's GPUs; None if it can."""
    if name == "jax" and not find_spec("jax_plugins") and not metadata.entry_points(group="jax_plugins"):
        return "pip install 'raygpt[cuda]'"
    if name == "torch" and metadata.version("torch").endswith("+cpu"):
        return "install PyTorch's CUDA build"
    return None


def engine_of(name: str) -> Any:
    """The module of an engine: `set_up` of a process, `find_devices` for a recipe, and its `Engine`."""
    return import_module(f"raygpt.engines.{name}.engine")


def make_reader(name: str, model: Model, vocab: int) -> Reader:
    """A reader of trained models by an engine, in this process."""
    engine_of(name).set_up()
    reader: Reader = import_module(f"raygpt.engines.{name}.reader").Reader(model, vocab)
    return reader


def make_slots(name: str, reader: Reader, count: int) -> Slots:
    """Slots in which a reader of an engine generates so many texts side by side."""
    slots: Slots = import_module(f"raygpt.engines.{name}.slots").Slots(reader, count)
    return slots


def read_parameters(name: str, folder: str, model: Model, vocab: int) -> Arrays:
    """The parameters in a checkpoint that an engine wrote; the optimizer's state is not read."""
    parameters: Arrays = import_module(f"raygpt.engines.{name}.checkpoint").read_parameters(folder, model, vocab)
    return parameters


def devices_of(name: str) -> Any:
    """An engine's module of devices: `use_all_cores`, `names`, `is_accelerated`, `limit_memory`, `free_bytes`,
    `peak_bytes`, and JAX's `one`. It does not import a model."""
    return import_module(f"raygpt.engines.{name}.devices")


def read_plain_state(name: str, folder: str, model: Model, vocab: int) -> PlainState:
    """The state in a checkpoint that an engine wrote, as plain arrays that the other can load."""
    state: PlainState = import_module(f"raygpt.engines.{name}.checkpoint").read_plain_state(folder, model, vocab)
    return state
