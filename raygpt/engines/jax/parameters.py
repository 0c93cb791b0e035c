"""A model's parameters as JAX keeps them: one array a name, layers stacked, the vocabulary padded."""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from raygpt.engines.base import Arrays
from raygpt.engines.padding import padded_vocab
from raygpt.models import Description, Parameter, random_numbers

Array = jax.Array
Keys = Mapping[str, NDArray[np.int32]]


def initial_keys(description: Description, seed: int) -> Keys:
    """The keys of every drawn parameter: [layers, 2]. Arguments of the compiled program, which serves any seed."""
    drawn = [parameter for parameter in description.parameters if parameter.initial.kind != "constant"]
    return {parameter.name: random_numbers.keys(parameter, seed, description.sizes["layer"]) for parameter in drawn}


def initial_values(description: Description, keys: Mapping[str, Array], dtype: Any) -> dict[str, Array]:
    """All parameters before step 0; under jit with shardings every device draws its own shards."""
    return {p.name: _first(p, description, keys.get(p.name)).astype(dtype) for p in description.parameters}


def _first(parameter: Parameter, description: Description, keys: Array | None) -> Array:
    shape = padded_shape(parameter, description)
    if keys is None:
        return jnp.full(shape, parameter.initial.size)
    own = shape[1:] if parameter.is_stacked else shape
    place = [jax.lax.broadcasted_iota(jnp.int32, own, axis) for axis in range(len(own))]
    index = sum(along * prod(own[axis + 1 :]) for axis, along in enumerate(place))
    of_layer = keys.reshape(-1, 2, *[1] * len(own)) if parameter.is_stacked else keys[0]
    key = (of_layer[:, 0], of_layer[:, 1]) if parameter.is_stacked else (of_layer[0], of_layer[1])
    values = random_numbers.draw(parameter.initial, index, key, jnp)
    if "vocabulary" not in parameter.axes:
        return values
    return jnp.where(place[parameter.own_axes.index("vocabulary")] < description.sizes["vocabulary"], values, 0)


def padded_shape(parameter: Parameter, description: Description) -> tuple[int, ...]:
    """The shape of a parameter's array here."""
    sizes = {**description.sizes, "vocabulary": padded_vocab(description.sizes["vocabulary"])}
    return tuple(sizes[axis] for axis in parameter.axes)


def from_plain(
    arrays: Arrays, description: Description, dtype: Any, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Arrays as `PlainState` has them, of all parameters or of some, padded with zeros; refuses what does not fit the
    description."""
    padded = {}
    for parameter in description.parameters:
        if names is not None and parameter.name not in names:
            continue
        array, shape = np.asarray(arrays[parameter.name]), description.shapes[parameter.name]
        if array.shape != shape:
            raise ValueError(f"{parameter.name} is {[*array.shape]}, and should be {[*shape]}")
        wanted = padded_shape(parameter, description)
        padded[parameter.name] = np.pad(array, [(0, w - n) for w, n in zip(wanted, shape, strict=True)]).astype(dtype)
    return padded


def to_plain(arrays: Mapping[str, Any], description: Description) -> dict[str, NDArray[Any]]:
    """The inverse: removes the padding."""
    return {
        name: np.asarray(arrays[name])[tuple(slice(size) for size in shape)]
        for name, shape in description.shapes.items()
        if name in arrays
    }
