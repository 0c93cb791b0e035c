"""Tensor parallelism (`cluster.mesh.tensor`) by DTensor.

Each process has some heads, a part of the MLP's hidden layer and a part of the vocabulary. Between the matrices all
have the full residual stream of the same rows, so each computes norms, positions and dropout. The loss is divided by
time: each computes its part of every row, with the full table, which is gathered for that. So no process computes
logits twice, and the loss is the same code on every mesh. Gains that are for all heads are copied as DTensors, whose
gradients, each of one process's heads, `layers.full` sums.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from raygpt.engines.torch.model import GPT
from raygpt.models import Parameter

OF_HEADS = ("head_size", "value_layers")  # axes of vectors that are for the heads of all processes


def shard_matrices(gpt: GPT, devices: DeviceMesh) -> None:
    """Shard the matrices of a model in which no parameter is set yet."""
    for parameter in gpt.description.parameters:
        module = parameter.name.removeprefix("blocks.").rpartition(".")[0] or parameter.name
        for owner in gpt.blocks if parameter.is_stacked else [gpt]:
            if parameter.own_axes[0] in OF_HEADS:
                norm = owner.get_submodule(module)
                if not any(isinstance(each, DTensor) for each in norm.parameters()):  # with its gain, also its bias
                    distribute_module(norm, devices)
            elif not parameter.is_vector and "tensor" in parameter.mesh_axes:  # a bias is sharded with its kernel
                parallelize_module(owner, devices, {module: _style(parameter)})
                if parameter.name in gpt.description.token_tables:
                    owner.get_submodule(module).register_forward_hook(_copied)
    gpt.tensor_size = devices.size()


def _copied(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """A copy of a table's rows, made after they were exchanged: a compiled block cannot take the exchange's result."""
    return out.clone()


def _style(parameter: Parameter) -> ParallelStyle:
    """A table is sharded by tokens, and what a value embedding gives by heads; a kernel along its input or its output
    axis."""
    if not parameter.is_kernel:
        out = Shard(-1) if parameter.name.startswith("values") else Replicate()
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
    cut = parameter.axes[parameter.mesh_axes.index("tensor")]
    return RowwiseParallel() if cut in parameter.fan_in else ColwiseParallel()


def own_time(x: Tensor, devices: DeviceMesh) -> Tensor:
    """This process's part of x [rows, time, …], which all have; the gradients of all parts are gathered."""
    whole = DTensor.from_local(x, devices, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]).to_local()
