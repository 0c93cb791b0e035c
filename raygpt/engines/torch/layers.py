"""The layers that a model is made of: norm, attention's projections, MLP, logits.

Parameters are fp32; autocast makes the matrix products in the dtype of the arithmetic. Norms are computed in fp32 at
least.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from raygpt.engines.torch.devices import accurate

SLOPE = 2 * (2 / math.pi) ** 0.5  # 2u = x (SLOPE + CURVE x²)
CURVE = 0.044715 * SLOPE


class Norm(nn.Module):
    """LayerNorm, with a bias or without, computed in fp32 at least."""

    def __init__(self, width: int, epsilon: float, bias: bool):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(accurate(x.dtype)), self.weight.shape, self.weight, self.bias, self.epsilon).to(
            x.dtype
        )


def project(x: Tensor, layers: Sequence[nn.Linear], head: int) -> list[Tensor]:
    """Queries, keys and values of x [rows, time, width], each [rows, its heads, time, head]."""
    return [out.unflatten(-1, (-1, head)).transpose(1, 2) for out in _products(x, layers)]


def _products(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """What several layers make of one input: by one product, which is faster, where their kernels lie on this device.

    Compiled, joining the kernels costs nothing: it is part of the copy that autocast makes of them.
    """
    kernels: list[Tensor] = [layer.weight for layer in layers]
    if isinstance(kernels[0], DTensor):
        # One DTensor for all of them: the gradients of x are summed over the processes once, not for each.
        shared = DTensor.from_local(x, kernels[0].device_mesh, [Replicate()], run_check=False)
        return [layer(shared) for layer in layers]
    if not (x.is_cuda or torch.is_grad_enabled()):  # one token at a time on a CPU: joining them would take longer
        return [layer(x) for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    out = F.linear(x, torch.cat(kernels), torch.cat(biases) if biases else None)
    return out.split([len(kernel) for kernel in kernels], dim=-1)


def mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """x [rows, time, width] by way of a hidden layer [rows, time, hidden]."""
    out: Tensor = down(gelu(up(x)))
    return out


def gelu(x: Tensor) -> Tensor:
    """GPT-2's, by tanh. Compiled for a GPU it goes by the logistic function: 0.5 (1 + tanh(u)) is that of 2u, and an
    exponential is a few instructions where CUDA's tanh is a long function."""
    if not (x.is_cuda and torch.compiler.is_compiling()):
        return F.gelu(x, approximate="tanh")
    exact = x.to(accurate(x.dtype))
    return (exact * torch.sigmoid(exact * (SLOPE + CURVE * exact * exact))).to(x.dtype)


def product(x: Tensor, kernel: Tensor) -> Tensor:
    """x [tokens, in] by a kernel [out, in]."""
    return x @ kernel.T


def logits(hidden: Tensor, table: Tensor, product: Callable[[Tensor, Tensor], Tensor] = product) -> Tensor:
    """Hidden states [tokens, width] by the output table [vocabulary, width]: [tokens, vocabulary], padding included.

    In the dtype of the hidden states; whoever sums or compares them does so in fp32 at least.
    """
    return product(hidden, table.to(hidden.dtype))
