"""The tensors of our modules beside the description's arrays: names, layouts, and initial values.

A Linear's kernel is [out, in] where the description has [*in, *out] with heads as an axis; token tables are padded;
each layer has a tensor of its own where the description has one array for all.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from raygpt.engines.base import Arrays
from raygpt.engines.padding import padded_vocab
from raygpt.models import Description, Parameter, random_numbers
from raygpt.models.parameter import Role

Slices = tuple[slice, ...]  # of a shard in the whole, by dimension
Values = Callable[[str, Slices], Tensor]  # what a shard of the module's tensor of that name is set to


class Layout(Protocol):
    """How the tensors of a model's modules hold the description's parameters."""

    def role(self, name: str) -> Role:
        """Of the module's tensor of that name."""
        ...

    def initial_values(self, seed: int, device: torch.device) -> Values:
        """Before the first step, fp32."""
        ...

    def values(self, arrays: Arrays) -> Values:
        """Of the description's arrays: a model's parameters, or an optimizer's slot."""
        ...

    def arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """The way back, from whole tensors."""
        ...


class Place(NamedTuple):
    """Which of the description's parameters a tensor is, and of which layer."""

    parameter: Parameter
    layer: int  # 0 for those outside the layers


class OwnLayout:
    """That of raygpt's own modules."""

    def __init__(self, description: Description):
        self._description = description

    def find(self, name: str) -> Place:
        """blocks.3.query.weight -> blocks.query.kernel, 3; norm.weight -> norm.gain; tokens.weight -> tokens."""
        *path, kind = name.split(".")
        layer = int(path.pop(1)) if path[0] == "blocks" else 0
        module = ".".join(path)
        names = [f"{module}.bias"] if kind == "bias" else [module, f"{module}.kernel", f"{module}.gain"]
        found = (self._description.by_name[ours] for ours in names if ours in self._description.by_name)
        return Place(next(found), layer)

    def role(self, name: str) -> Role:
        """That of the description's parameter."""
        return self.find(name).parameter.role

    def initial_values(self, seed: int, device: torch.device) -> Values:
        """Drawn on the device for each shard; padding is zero."""

        def part(name: str, slices: Slices) -> Tensor:
            place = self.find(name)
            values = draw(place, self._index(place.parameter, slices, device), seed, self._description)
            if not _is_padded(place.parameter):
                return values
            rows = torch.arange(slices[0].start, slices[0].stop, device=device)
            return values * (rows < self._description.sizes["vocabulary"])[:, None]

        return part

    def values(self, arrays: Arrays) -> Values:
        """Shards of the description's arrays; refuses what does not fit it."""
        for name, shape in self._description.shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} is {[*arrays[name].shape]}, and should be {[*shape]}")

        def part(name: str, slices: Slices) -> Tensor:
            parameter, layer = self.find(name)
            array = arrays[parameter.name][layer] if parameter.is_stacked else arrays[parameter.name]
            return self._from_description(parameter, torch.tensor(array))[slices]

        return part

    def arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Layers stacked, without padding."""
        layers: dict[str, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            parameter, layer = self.find(name)
            layers.setdefault(parameter.name, {})[layer] = self._to_description(parameter, tensor.cpu())
        stacked = {name: torch.stack([parts[layer] for layer in sorted(parts)]) for name, parts in layers.items()}
        return {name: tensor.view(self._description.shapes[name]).numpy() for name, tensor in stacked.items()}

    def _to_description(self, parameter: Parameter, tensor: Tensor) -> Tensor:
        """One layer's: with the description's axes."""
        shape = self._description.own_shape(parameter)
        if parameter.is_kernel:
            return tensor.T.reshape(shape)
        return tensor[: shape[0]] if _is_padded(parameter) else tensor.view(shape)

    def _from_description(self, parameter: Parameter, array: Tensor) -> Tensor:
        if parameter.is_kernel:
            return array.reshape(self._description.fans(parameter)[0], -1).T
        if _is_padded(parameter):
            return F.pad(array, (0, 0, 0, padded_vocab(len(array)) - len(array)))
        return array.flatten() if parameter.is_vector else array

    def _index(self, parameter: Parameter, slices: Slices, device: torch.device) -> Tensor:
        """Of each element of a shard, counted along the description's axes: int32."""
        shape = self._description.own_shape(parameter)
        steps: tuple[int, ...] = (shape[-1], 1) if len(slices) == 2 else (1,)
        if parameter.is_kernel:
            steps = (1, self._description.fans(parameter)[1])  # [out, in] of what is counted [in, out]
        index = torch.zeros((), dtype=torch.int32, device=device)
        for side, step in zip(slices, steps, strict=True):
            index = index[..., None] + torch.arange(side.start, side.stop, dtype=torch.int32, device=device) * step
        return index


def _is_padded(parameter: Parameter) -> bool:
    return parameter.own_axes[0] == "vocabulary"


def draw(place: Place, index: Tensor, seed: int, description: Description) -> Tensor:
    """Initial values of elements by their index in a layer's array, fp32. Indices are int32: where an array has more
    elements they wrap, as a draw depends on their bits alone."""
    parameter, layer = place
    if parameter.initial.kind == "constant":
        return torch.full(index.shape, parameter.initial.size, device=index.device)
    key = random_numbers.keys(parameter, seed, description.sizes["layer"])[layer].tolist()
    return random_numbers.draw(parameter.initial, index, (key[0], key[1]), torch)


def draw_all(seed: int, description: Description, device: torch.device) -> dict[str, NDArray[Any]]:
    """All of a model's initial values, as arrays of this host."""
    arrays = {}
    for parameter in description.parameters:
        size = prod(description.own_shape(parameter))
        index = torch.arange(size, dtype=torch.int32, device=device)
        layers = range(description.sizes["layer"] if parameter.is_stacked else 1)
        drawn = torch.stack([draw(Place(parameter, layer), index, seed, description) for layer in layers])
        arrays[parameter.name] = drawn.view(description.shapes[parameter.name]).cpu().numpy()
    return arrays
