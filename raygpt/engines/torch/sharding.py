"""How parameters and rows are distributed over several processes, each with one device.

Rows of a batch are divided over data × fsdp. Along `data` every process has a copy (DDP), along `fsdp` each keeps
rows of every parameter and gathers a block's when it is computed (FSDP); with both it is a copy per group of shards.
Along `tensor` processes compute the same rows, each with a part of every matrix, of which `fsdp` then takes rows.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raygpt.config import Recipe
from raygpt.engines.torch.loss import Objective
from raygpt.engines.torch.parameters import Slices
from raygpt.engines.torch.tensor_parallel import shard_matrices


@dataclass(frozen=True)
class Mesh:
    """Processes in data × fsdp × tensor, and the coordinates of this one."""

    data: int
    fsdp: int
    tensor: int
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def dp_size(self) -> int:
        """The degree of data parallelism: groups of processes with different rows."""
        return self.data * self.fsdp

    @property
    def dp_rank(self) -> int:
        """This process's group."""
        return self.rank // self.tensor

    @property
    def num_shards(self) -> int:
        """Processes over which one copy of the parameters is sharded."""
        return self.fsdp * self.tensor

    @property
    def shard(self) -> int:
        """Which shard this process has."""
        return self.rank % self.num_shards

    @property
    def is_first_copy(self) -> bool:
        """Whether this process saves its shard."""
        return self.rank < self.num_shards

    @property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """(this process's, processes) along the axes that cut parameters, in the order in which they cut."""
        return {"tensor": (self.rank % self.tensor, self.tensor), "fsdp": (self.dp_rank % self.fsdp, self.fsdp)}

    @cached_property
    def devices(self) -> DeviceMesh:
        """Created once: each creation makes new process groups."""
        return init_device_mesh(
            self.device.type, (self.data, self.fsdp, self.tensor), mesh_dim_names=("data", "fsdp", "tensor")
        )


def process_count() -> int:
    """The number of connected processes, or 1."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def make_mesh(recipe: Recipe, device: torch.device) -> Mesh:
    """The mesh of a recipe over the connected processes."""
    processes = process_count()
    sizes = recipe.mesh_over(processes)
    rank = dist.get_rank() if processes > 1 else 0
    return Mesh(sizes["data"], sizes["fsdp"], sizes["tensor"], rank, device)


def shard_parameters(objective: Objective, mesh: Mesh) -> None:
    """Shard every parameter along `tensor` and `fsdp`; no device ever has all of a parameter that is not set yet."""
    if mesh.tensor > 1:
        objective.tensor = mesh.devices["tensor"]
        shard_matrices(objective.gpt, objective.tensor)
    if mesh.dp_size == 1 or mesh.num_shards == 1:
        return
    # DDP does not support DTensor: with `tensor`, copies are made by FSDP with one shard.
    devices = mesh.devices["data", "fsdp"] if mesh.data > 1 else mesh.devices["fsdp"]
    for block in objective.gpt.blocks:
        fully_shard(block, mesh=devices)
    fully_shard(objective, mesh=devices)
    for method in ("next_logits", "token_logprobs"):
        register_fsdp_forward_method(objective, method)


def replicate(objective: Objective, mesh: Mesh) -> nn.Module:
    """The module to call in training: copies of the model sum their gradients during the backward pass."""
    if mesh.num_shards > 1 or mesh.data == 1:
        return objective
    return DistributedDataParallel(objective, gradient_as_bucket_view=True)


def synchronised(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """A context for one micro-batch: copies exchange gradients, summed until then, only in the last one's.

    Shards are exchanged in each: gradients of full parameters would need the memory that FSDP saves.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a parameter, or of an average of its gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slices(tensor: Tensor, mesh: Mesh) -> Slices:
    """The slices of that part in the full tensor, by dimension."""
    firsts, sizes = [0] * tensor.ndim, list(tensor.shape)
    for axis, (place, processes) in mesh.coordinates.items():
        dimension = _cut(tensor, axis)
        if dimension is not None:
            size = -(-sizes[dimension] // processes)  # all parts have the same size, except the last ones
            before = min(place * size, sizes[dimension])
            firsts[dimension] += before
            sizes[dimension] = min(size, sizes[dimension] - before)
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def is_owner(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether this process's part is unique, or the first of identical ones along `tensor`."""
    return mesh.coordinates["tensor"][0] == 0 or _cut(tensor, "tensor") is not None


def _cut(tensor: Tensor, axis: str) -> int | None:
    """The dimension in which an axis of the mesh shards a tensor."""
    if not isinstance(tensor, DTensor):
        return None
    placement = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)).get(axis)
    return getattr(placement, "dim", None)  # for FSDP on top of `tensor`, PyTorch's placement is not a `Shard`


def total_norm(gradients: list[Tensor], mesh: Mesh) -> Tensor:
    """The norm of all gradients, of which this process has parts."""
    norm = torch.nn.utils.get_total_norm([local(gradient) for gradient in gradients if is_owner(gradient, mesh)])
    if mesh.num_shards == 1:
        return norm
    squares = norm**2
    dist.all_reduce(squares)
    return (squares / mesh.data).sqrt()


def gather_tensor(tensor: Tensor, mesh: Mesh) -> Tensor:
    """All of a parameter, gathered; every process takes part."""
    if not isinstance(tensor, DTensor):
        return tensor
    total = torch.zeros(tensor.shape, dtype=tensor.dtype, device=mesh.device)
    if mesh.is_first_copy and is_owner(tensor, mesh):
        total[shard_slices(tensor, mesh)] = local(tensor)
    dist.all_reduce(total)
    return total
