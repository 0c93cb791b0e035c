"""Muon's matrices made orthogonal: each whole on one device, all of them shared out among the devices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from raygpt.engines import muon
from raygpt.engines.jax.sharding import constrain_in_turn, spreading
from raygpt.models import Description, Parameter

Array = jax.Array


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model: one of each layer, in an array [layer, *in, *out] of each parameter."""

    description: Description
    which: Sequence[Parameter]
    dtype: Any  # of the products
    mesh: Mesh

    def orthogonalise(self, directions: Mapping[str, Array]) -> dict[str, Array]:
        """The updates of these directions. Matrices of one shape are computed together, in few large products."""
        groups: dict[Any, list[Parameter]] = {}
        for parameter in self.which:
            key = *sorted(self.description.fans(parameter)), *self._cut(parameter)
            groups.setdefault(key, []).append(parameter)
        with jax.named_scope("muon"):
            return {name: update for group in groups.values() for name, update in self._computed(group, directions)}

    def _computed(self, group: Sequence[Parameter], directions: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        wide = [self._wide(parameter, directions[parameter.name]).astype(self.dtype) for parameter in group]
        ends = np.cumsum([len(matrices) for matrices in wide])
        rows, columns = wide[0].shape[1:]
        specs, devices = spreading(self.mesh, self._cut(group[0]), (int(ends[-1]), rows, columns))
        padding = jnp.zeros((-ends[-1] % devices, rows, columns), self.dtype)
        whole = constrain_in_turn(self.mesh, specs, jnp.concatenate([*wide, padding]))  # [matrices, rows, columns]
        results = constrain_in_turn(self.mesh, specs[::-1], muon.update_of(whole))
        for parameter, result in zip(group, jnp.split(results, ends)[:-1], strict=True):
            like = directions[parameter.name]
            turned = result.mT if self._is_tall(parameter) else result
            factor = muon.shape_factor(*self.description.fans(parameter))
            yield parameter.name, factor * turned.reshape(like.shape).astype(like.dtype)

    def _wide(self, parameter: Parameter, array: Array) -> Array:
        """[layer, *in, *out] to [layer, rows, columns] with no more rows than columns."""
        matrices = array.reshape(-1, *self.description.fans(parameter))
        return matrices.mT if self._is_tall(parameter) else matrices

    def _is_tall(self, parameter: Parameter) -> bool:
        """Of a square matrix whether its outputs are the residual stream: so all of them are sharded alike."""
        fan_in, fan_out = self.description.fans(parameter)
        return fan_in > fan_out or (fan_in == fan_out and "width" not in parameter.fan_in)

    def _cut(self, parameter: Parameter) -> tuple[Any, Any]:
        """The axes of the mesh along which rows and columns are cut."""
        axes = parameter.mesh_axes[-len(parameter.own_axes) :]
        inward, outward = axes[0], axes[len(parameter.fan_in)]
        return (outward, inward) if self._is_tall(parameter) else (inward, outward)
