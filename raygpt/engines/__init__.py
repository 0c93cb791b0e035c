"""What computes a recipe: JAX or PyTorch. Each is imported only when it is asked for."""

from importlib import import_module
from typing import Any

from raygpt.config import Model
from raygpt.engines.base import Weights


def engine_of(name: str) -> Any:
    """The module of an engine: `set_up` of a process, `find_devices` for a recipe, and its `Engine`."""
    return import_module(f"raygpt.engines.{name}.engine")


def read_weights(name: str, folder: str, model: Model, vocab: int) -> Weights:
    """The state in a checkpoint that an engine wrote, as plain arrays that the other can load."""
    weights: Weights = import_module(f"raygpt.engines.{name}.checkpoint").read_weights(folder, model, vocab)
    return weights
