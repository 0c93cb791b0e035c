"""Muon for the matrices of a model. Each is made orthogonal whole, in one process, and they are divided among all."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raygpt.config import Optimizer
from raygpt.engines import muon
from raygpt.engines.torch.parameters import Slices
from raygpt.engines.torch.sharding import Mesh, local, shard_slices

BATCH = 24  # matrices that are computed at once: large products, in the memory of a few of them


class Muon:
    """The optimizer of matrices [out, in], which are whole here, or DTensors of which this process has a part."""

    def __init__(
        self,
        settings: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        dtype: torch.dtype,
        compiles: bool,
    ):
        self._settings, self._dtype = settings, dtype
        self._parameters = list(parameters.values())
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._owners = Owners(self._parameters, mesh)
        compiled: Any = partial(torch.compile, dynamic=False) if compiles else lambda function: function
        self._advance, self._update_of, self._change = map(compiled, (_advance, muon.update_of, _change))

    @torch.no_grad()
    def step(self, rate: float, updates: Tensor, divisor: Tensor, left_out: Tensor) -> None:
        """Change parameters and momentum by the gradients divided by `divisor`; `updates` came before this one. Where
        `left_out` is true nothing changes."""
        directions = self._directions(muon.momentum_at(self._settings, updates.double()), divisor, left_out)
        whole = self._owners.gather(directions)
        for numbers in _batches({number: tuple(sorted(matrix.shape)) for number, matrix in whole.items()}):
            wide = torch.stack([_wide(whole[number]) for number in numbers])  # [matrices, rows, columns]
            for number, result in zip(numbers, self._update_of(wide), strict=True):
                whole[number] = result if whole[number].shape == result.shape else result.mT
        self._apply(self._owners.scatter(whole, directions[0]), rate, left_out)
        for parameter in self._parameters:
            parameter.grad = None

    def _directions(self, momentum: Tensor, divisor: Tensor, left_out: Tensor) -> list[Tensor]:
        """This process's part of each direction; the momentum is advanced."""
        means = [local(mean) for mean in self.momentum.values()]
        gradients = [_gradient(parameter) for parameter in self._parameters]
        directions = list(means)
        for numbers in _batches({number: mean.shape for number, mean in enumerate(means)}):
            own = [means[number] for number in numbers], [gradients[number] for number in numbers]
            ahead = self._advance(*own, momentum, divisor, left_out, self._dtype)
            for number, direction in zip(numbers, ahead, strict=True):
                directions[number] = direction
        return directions

    def _apply(self, updates: Sequence[Tensor], rate: float, left_out: Tensor) -> None:
        """Change this process's part of each parameter."""
        weights, settings = [local(parameter) for parameter in self._parameters], self._settings
        lr = torch.full((), rate, dtype=weights[0].dtype, device=weights[0].device)  # a number would be compiled in
        for numbers in _batches({n: (w.shape, self._parameters[n].shape) for n, w in enumerate(weights)}):
            fan_out, fan_in = self._parameters[numbers[0]].shape
            by = lr, muon.shape_factor(fan_in, fan_out), settings.weight_decay, settings.cautious, left_out
            self._change([weights[number] for number in numbers], [updates[number] for number in numbers], *by)


# Compiled, these two read and write every array once, where it is: to stack the matrices first took two passes more.


def _advance(
    means: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum: Tensor,
    divisor: Tensor,
    left_out: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Advance the means in place. Returns the directions [matrices, …]."""
    directions = []
    for mean, total in zip(means, gradients, strict=True):
        gradient = total / divisor
        after = muon.running_mean(mean, gradient, momentum)
        directions.append(muon.running_mean(after, gradient, momentum).to(dtype))  # Nesterov's
        mean.copy_(torch.where(left_out, mean, after))
    return torch.stack(directions)


def _change(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    rate: Tensor,
    factor: float,
    decay: float,
    cautious: bool,
    left_out: Tensor,
) -> None:
    """Change the weights in place."""
    for weight, update in zip(weights, updates, strict=True):
        change = muon.decayed(factor * update.to(weight.dtype), weight, decay, cautious)
        weight.copy_(torch.where(left_out, weight, weight - rate * change))


def _batches(kinds: Mapping[int, Hashable]) -> Iterator[list[int]]:
    """Numbers of one kind, some at a time."""
    groups: dict[Hashable, list[int]] = {}
    for number, kind in kinds.items():
        groups.setdefault(kind, []).append(number)
    for numbers in groups.values():
        yield from (numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None  # a matrix takes part in every step
    return local(parameter.grad)


def _wide(matrix: Tensor) -> Tensor:
    """With no more rows than columns."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


class Owners:
    """Which process makes which matrix orthogonal: all take turns, so that each has as many of every shape."""

    def __init__(self, matrices: Sequence[Tensor], mesh: Mesh):
        self._shapes = [matrix.shape for matrix in matrices]
        self._rank, self._ranks = mesh.rank, range(mesh.size)
        first = mesh.rank - mesh.shard
        self._copy = range(first, first + mesh.num_shards)  # the processes that have a whole model between them
        order = sorted(range(len(matrices)), key=lambda number: sorted(self._shapes[number]))
        self._owned = [order[rank :: mesh.size] for rank in self._ranks]  # by process
        processes = [replace(mesh, rank=rank) for rank in self._ranks]
        self._slices = [[shard_slices(matrix, process) for matrix in matrices] for process in processes]

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """This process's matrices, whole, by number. Every process has a part of each and sends it to the owner."""
        own = self._owned[self._rank]
        if len(self._copy) == 1:
            return {number: parts[number] for number in own}
        sent = [[parts[n] for n in self._owned[rank]] if rank in self._copy else [] for rank in self._ranks]
        slices = [[self._slices[rank][n] for n in own] if rank in self._copy else [] for rank in self._ranks]
        whole = {number: parts[number].new_empty(self._shapes[number]) for number in own}
        for pieces, where in zip(_exchange(sent, slices, parts[0]), slices, strict=True):
            for number, piece, its in zip(own, pieces, where, strict=False):
                whole[number][its] = piece
        return whole

    def scatter(self, whole: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """The way back: this process's part of every matrix. Every copy of the model gets it."""
        if len(self._ranks) == 1:
            return [whole[number] for number in range(len(self._shapes))]
        sent = [[whole[n][self._slices[rank][n]] for n in whole] for rank in self._ranks]
        slices = [[self._slices[self._rank][n] for n in self._owned[rank]] for rank in self._ranks]
        received = _exchange(sent, slices, like)
        parts = {
            n: piece
            for own, pieces in zip(self._owned, received, strict=True)
            for n, piece in zip(own, pieces, strict=True)
        }
        return [parts[number] for number in range(len(self._shapes))]


def _exchange(sent: Sequence[Sequence[Tensor]], slices: Sequence[Sequence[Slices]], like: Tensor) -> list[list[Tensor]]:
    """Send each process its pieces, and receive from each the pieces of these sizes, in one all-to-all."""
    shapes = [[[side.stop - side.start for side in piece] for piece in pieces] for pieces in slices]
    outgoing = torch.cat([like.new_empty(0), *(piece.flatten() for pieces in sent for piece in pieces)])
    sizes = [sum(map(prod, pieces)) for pieces in shapes]
    incoming = outgoing.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [sum(piece.numel() for piece in pieces) for pieces in sent])
    return [
        [flat.view(shape) for flat, shape in zip(part.split([*map(prod, pieces)]), pieces, strict=True)]
        for part, pieces in zip(incoming.split(sizes), shapes, strict=True)
    ]
