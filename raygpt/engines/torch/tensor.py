"""Tensor parallelism (`cluster.mesh.tensor`) by DTensor.

Each process has some heads, a part of the MLP's hidden layer and a part of the vocabulary. Between the matrices all
have the full residual stream of the same rows, so each computes norms, positions and dropout. The loss is divided by
time: each computes its part of every row, with the full table, which is gathered for that. So no process computes
logits twice, and the loss is the same code on every mesh.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from raygpt.engines.torch.model import GPT
from raygpt.models import Parameter


def shard_matrices(gpt: GPT, devices: DeviceMesh) -> None:
    """Shard the matrices of a model in which no parameter is set yet."""
    for parameter in gpt.description.parameters:
        if parameter.is_vector or "tensor" not in parameter.mesh_axes:  # a bias is sharded with its kernel
            continue
        module = parameter.name.removeprefix("blocks.").removesuffix(".kernel")
        for owner in gpt.blocks if parameter.is_stacked else [gpt]:
            parallelize_module(owner, devices, {module: _style(parameter)})
    gpt.tensor_size = devices.size()


def _style(parameter: Parameter) -> ParallelStyle:
    """A table is sharded by tokens; a kernel along its input or its output axis."""
    if parameter.role != "matrix":
        return RowwiseParallel(input_layouts=Replicate())
    cut = parameter.axes[parameter.mesh_axes.index("tensor")]
    return RowwiseParallel() if cut in parameter.fan_in else ColwiseParallel()


def own_time(x: Tensor, devices: DeviceMesh) -> Tensor:
    """This process's part of x [rows, time, …], which all have; the gradients of all parts are gathered."""
    whole = DTensor.from_local(x, devices, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]).to_local()


def gather_table(table: Tensor) -> Tensor:
    """The full table, gathered from its parts; gradients, each of one process's tokens, are summed into the parts."""
    return table.full_tensor(grad_placements=[Partial()]) if isinstance(table, DTensor) else table
