"""Where parameters and rows lie when several processes, each with one device, train together.

Rows of a batch are shared out over data × fsdp. Along `data` every process has a copy (DDP), along `fsdp` each keeps
rows of every parameter and gathers a block's when it is computed (FSDP); with both it is a copy per group of shares.
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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from raygpt import config
from raygpt.engines.torch.loss import Objective
from raygpt.errors import RaygptError


@dataclass(frozen=True)
class Mesh:
    """Processes in data × fsdp, and the place of this one."""

    data: int
    fsdp: int
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        return self.data * self.fsdp

    @property
    def share(self) -> int:
        """Which share of the parameters this process has, of `fsdp`."""
        return self.rank % self.fsdp

    @property
    def is_first_copy(self) -> bool:
        """Whether it is for this process to write its share down."""
        return self.rank < self.fsdp

    @cached_property
    def devices(self) -> DeviceMesh:
        """Made once: each making costs a group of processes."""
        return init_device_mesh(self.device.type, (self.data, self.fsdp), mesh_dim_names=("data", "fsdp"))


def process_count() -> int:
    """Of those that joined, or this one alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def make_mesh(mesh: config.Mesh, device: torch.device) -> Mesh:
    """The mesh of a recipe over the processes that joined."""
    processes = process_count()
    resolved = mesh.over(processes)
    for axis in ("tensor", "context"):
        if resolved[axis] > 1:
            raise RaygptError(
                f"cluster.mesh.{axis}: {resolved[axis]} is not for engine torch; write cluster.mesh.fsdp instead, "
                "or engine: jax"
            )
    return Mesh(resolved["data"], resolved["fsdp"], dist.get_rank() if processes > 1 else 0, device)


def share_out(objective: Objective, mesh: Mesh) -> None:
    """Cut every parameter into the shares of `fsdp`; what is on no device yet never is there whole."""
    if mesh.fsdp == 1:
        return
    devices = mesh.devices if mesh.data > 1 else mesh.devices["fsdp"]
    for block in objective.gpt.blocks:
        fully_shard(block, mesh=devices)
    fully_shard(objective, mesh=devices)
    register_fsdp_forward_method(objective, "extend")


def join_copies(objective: Objective, mesh: Mesh) -> nn.Module:
    """What to call in training: copies of the model sum their gradients while the backward pass still runs."""
    if mesh.fsdp > 1 or mesh.data == 1:
        return objective
    return DistributedDataParallel(objective, gradient_as_bucket_view=True)


def synchronised(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """A context for one micro-batch: copies exchange gradients, summed until then, only in the last one's.

    Shares are exchanged in each: gradients of whole parameters would be as large as what FSDP shared out.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a parameter, or of an average of its gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor, mesh: Mesh) -> int:
    """Where those rows begin in the whole: all shares are of one size but the last ones."""
    return min(len(tensor), mesh.share * -(-len(tensor) // mesh.fsdp)) if isinstance(tensor, DTensor) else 0


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, gathered; every process takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Put this process's rows of the whole `values` into a parameter."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    local(tensor).copy_(values)
