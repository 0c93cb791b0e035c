"""A class of transformers that some of our models can be exported to and imported from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.config import Model
from raygpt.engines.base import Arrays
from raygpt.models import Description, describe

HEAD = "lm_head.weight"  # of every class that has one
Convert = Callable[[Arrays, Description], dict[str, NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class Family:
    """How a class's config and weights correspond to our keys and parameters."""

    name: str
    model_type: str  # of its config.json
    architecture: str  # the class
    misfits: Callable[[Model], dict[str, Any]]  # the keys, with their values, that the class cannot express
    config: Callable[[Model, int, int], dict[str, Any]]  # of a model, its vocabulary and its end-of-text
    keys: Callable[[Mapping[str, Any]], dict[str, Any]]  # our keys of a config
    to_hugging_face: Convert
    from_hugging_face: Convert
    required: Mapping[str, tuple[Any, ...]]  # its config's keys -> the values that we compute, the default first
    always: Mapping[str, bool]  # our keys of parameters that the class always has
    prefix: str  # of every name but the head's; files of a bare model leave it out
    token_table: str
    unused: tuple[str, ...] = ()  # how names of arrays end that older files hold and no one needs

    def widened(self, model: Model) -> Model:
        """The same function with the parameters that the class always has."""
        return model.model_copy(update=dict(self.always))

    def full_config(self, model: Model, vocab: int, end_of_text: int) -> dict[str, Any]:
        """The content of a config.json."""
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**names, **self.config(self.widened(model), vocab, end_of_text)}

    def exported(self, parameters: Arrays, model: Model, vocab: int) -> dict[str, NDArray[Any]]:
        """Arrays as the class loads them, in fp32. Biases that the model does not have are zero, gains are one."""
        description = describe(self.widened(model), vocab)
        shapes = description.shapes
        missing = (p for p in description.parameters if p.name not in parameters)
        constants = {p.name: np.full(shapes[p.name], p.initial.size, np.float32) for p in missing}
        named = self.to_hugging_face({**parameters, **constants}, description)
        return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in named.items()}


def taken(left: dict[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array of that name, which is then no longer among those that are left; ValueError if its shape is another."""
    array = left.pop(name)
    if array.shape != shape:
        raise ValueError(f"{name} is {[*array.shape]}, and should be {[*shape]}")
    return array


def unlike(model: Model, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with the model's values, that are not as expected."""
    return {key: getattr(model, key) for key, value in expected.items() if getattr(model, key) != value}
