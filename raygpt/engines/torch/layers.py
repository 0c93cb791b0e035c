"""The layers that a model is made of: norm, attention's projections, MLP, logits.

Parameters are fp32; autocast makes the matrix products in the dtype of the arithmetic. Norms, rotations and soft-caps
are computed in fp32 at least.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from raygpt.config import Model
from raygpt.engines.torch.devices import accurate
from raygpt.engines.torch.kernels import norm_rotate
from raygpt.engines.torch.rope import rotate

SLOPE = 2 * (2 / math.pi) ** 0.5  # GELU is x · logistic(2u), with 2u = x (SLOPE + CURVE x²)
CURVE = 0.044715 * SLOPE


class Gain(nn.Module):
    """Learned numbers that something is multiplied by."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, with a gain and a bias as far as the model has them."""

    def __init__(self, size: int, model: Model):
        super().__init__()
        self.size, self.kind, self.epsilon = (size,), model.norm, model.norm_epsilon
        self.weight = nn.Parameter(torch.empty(size)) if model.norm_gain else None
        self.bias = nn.Parameter(torch.empty(size)) if model.norm == "layer" and model.bias else None

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(accurate(x.dtype))
        gain, bias = (None if each is None else full(each) for each in (self.weight, self.bias))
        if self.kind == "rms":
            return F.rms_norm(exact, self.size, gain, self.epsilon).to(x.dtype)
        return F.layer_norm(exact, self.size, gain, bias, self.epsilon).to(x.dtype)


def full(parameter: Tensor) -> Tensor:
    """A parameter in full where `tensor` shards or copies it. Gradients are summed: each process's are of its own heads
    or tokens."""
    if not isinstance(parameter, DTensor):
        return parameter
    # not full_tensor(), which PyTorch 2.11's compiler cannot trace
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def attention_inputs(
    x: Tensor,
    layers: Sequence[nn.Linear],
    head: int,
    norms: tuple[Norm | None, Norm | None],
    rotation: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x [rows, time, width], each [rows, time, its heads, head].

    Queries and keys are normed and rotated, where the model does.
    """
    joint = _joint_product(x, layers)
    if joint is not None and rotation is not None and norm_rotate.can_run(joint, rotation, head):
        query_norm, key_norm = norms
        if query_norm and key_norm and query_norm.kind == "rms":
            heads, kv_heads = (len(layer.weight) // head for layer in layers[:2])
            gains = query_norm.weight, key_norm.weight
            return norm_rotate.norm_rotate(joint, rotation, gains, heads, kv_heads, query_norm.epsilon)
    products = _apart(x, layers) if joint is None else _split(joint, layers)
    query, key, value = (out.unflatten(-1, (-1, head)) for out in products)
    query, key = (y if norm is None else norm(y) for y, norm in zip((query, key), norms, strict=True))
    if rotation is not None:
        query, key = rotate(query, rotation), rotate(key, rotation)
    return query, key, value


def _products(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """What several layers make of one input."""
    joint = _joint_product(x, layers)
    return _apart(x, layers) if joint is None else _split(joint, layers)


def _joint_product(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor | None:
    """By one product, which is faster, where the layers' kernels lie on this device.

    Compiled, joining the kernels costs nothing: it is part of the copy that autocast makes of them.
    """
    kernels: list[Tensor] = [layer.weight for layer in layers]
    # One token at a time on a CPU: joining them would take longer.
    if isinstance(kernels[0], DTensor) or not (x.is_cuda or torch.is_grad_enabled()):
        return None
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return F.linear(x, torch.cat(kernels), torch.cat(biases) if biases else None)


def _split(joint: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    return joint.split([len(layer.weight) for layer in layers], dim=-1)


def _apart(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    if isinstance(layers[0].weight, DTensor):
        # One DTensor for all of them: the gradients of x are summed over the processes once, not for each.
        x = DTensor.from_local(x, layers[0].weight.device_mesh, [Replicate()], run_check=False)
    return [layer(x) for layer in layers]


def gate_heads(gate: nn.Linear | None, x: Tensor, heads: Tensor) -> Tensor:
    """Heads [rows, time, heads, head], each multiplied by its gate, from 0 to 2, if the model has gates. Without one a
    head always contributes: attention's weights sum to 1."""
    if gate is None:
        return heads
    sums = gate(x[..., : gate.in_features])  # [rows, time, heads]
    return (heads * (2 * torch.sigmoid(sums.to(accurate(x.dtype))))[..., None]).to(x.dtype)


def mlp(x: Tensor, kind: str, up: nn.Linear, down: nn.Linear, gate: nn.Linear | None = None) -> Tensor:
    """x [rows, time, width] by way of a hidden layer [rows, time, hidden]."""
    if gate is None:
        out: Tensor = down(ACTIVATIONS[kind](up(x)))
    else:
        gated, linear = _products(x, (gate, up))
        out = down(ACTIVATIONS[kind](gated) * linear)
    return out


def gelu(x: Tensor) -> Tensor:
    """GPT-2's, by tanh. Compiled for a GPU it goes by the logistic function: 0.5 (1 + tanh(u)) is that of 2u, and an
    exponential is a few instructions where CUDA's tanh is a long function."""
    if not (x.is_cuda and torch.compiler.is_compiling()):
        return F.gelu(x, approximate="tanh")
    exact = x.to(accurate(x.dtype))
    return (exact * torch.sigmoid(exact * (SLOPE + CURVE * exact * exact))).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    """The square of what is positive."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by `model.mlp`
    "gelu": gelu,
    "relu2": relu2,
    "swiglu": F.silu,  # of the gate
}


def product(x: Tensor, kernel: Tensor) -> Tensor:
    """x [tokens, in] by a kernel [out, in]."""
    return x @ kernel.T


def logits(
    hidden: Tensor,
    table: Tensor,
    cap: float | None = None,
    product: Callable[[Tensor, Tensor], Tensor] = product,
) -> Tensor:
    """Hidden states [tokens, width] by the output table [vocabulary, width]: [tokens, vocabulary], padding included.

    In the dtype of the hidden states, capped ones in fp32 at least; whoever sums or compares them does so too.
    """
    out = product(hidden, table.to(hidden.dtype))
    return out if cap is None else cap * torch.tanh(out.to(accurate(out.dtype)) / cap)
