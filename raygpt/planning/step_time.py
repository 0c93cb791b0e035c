"""Seconds that a training step takes on a device, by kind: operations and bytes, divided by what hardware reaches.

`REACHED` says which fraction of the stated peak and bandwidth each engine's kernels reach. Those of GPUs are fitted to
steps measured on H200s (benchmarks/results/step-*.json, and plan-h200.json's cases that are marked so); those of TPUs
are assumed, none was measured. Exchange between devices is computed from the bytes that a mesh sends and the links'
stated speed, and was not measured either.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.muon import POLYNOMIALS
from raygpt.engines.padding import padded_vocab
from raygpt.models import Description, describe
from raygpt.planning.memory import Shards
from raygpt.planning.target import Target

INPUT_BANDWIDTH = 16e9  # bytes/s from the host: PCIe 4
HIDDEN = 2 / 3  # of the time of computing, as much exchange can go on behind it: the backward pass
NOT_HIDDEN = 0.1  # of the exchange, at least: the first gather, the last sum


@dataclass(frozen=True)
class Reached:
    """Fractions of a device's stated figures."""

    products: float  # of the peak
    attention: float  # with heads of 64; the larger, the better: see `of_head`
    memory: float  # of the bandwidth
    block: int = 128  # of attention's tiles: what a causal mask leaves of the tiles at the diagonal is computed too

    def of_head(self, size: int) -> float:
        """Attention's fraction with heads of this size: heads of 128 took 0.84 of the time of 64 at 8,192 tokens."""
        return self.attention * math.pow(min(size, 128) / 64, 0.25)


REACHED: Mapping[tuple[str, str], Reached] = {
    ("gpu", "fused"): Reached(0.78, 0.49, 0.51),
    ("gpu", "plain"): Reached(0.71, 0.49, 0.53),
    ("gpu", "torch"): Reached(0.71, 0.36, 0.57),
    ("tpu", "plain"): Reached(0.70, 0.35, 0.70),
    ("cpu", "plain"): Reached(0.60, 0.30, 0.50),
    ("cpu", "torch"): Reached(0.60, 0.30, 0.50),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    products: float
    attention: float
    memory_bound: float
    exchange: float  # what computing does not hide
    input: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def step_time(
    recipe: Recipe,
    vocab: int,
    devices: Devices,
    target: Target,
    mesh: Mapping[str, int],
    micro_rows: int,
    accumulation: int,
    precision: str,
) -> StepTime:
    """Of a step in so many micro-batches, of so many rows each over all devices."""
    description, device = describe(recipe.model, padded_vocab(vocab)), target.device
    kernels = "torch" if recipe.engine == "torch" else "fused" if devices.fused else "plain"
    reached = REACHED[device.platform, kernels]
    flops, bandwidth = device.flops(precision), device.bandwidth * reached.memory
    tokens = micro_rows * accumulation * recipe.model.context / target.count  # of each device
    work = Work(recipe, description, devices.number_bytes)
    products = (tokens * work.products + work.muon / target.count) / (flops * reached.products)
    attention = tokens * work.attention(reached.block) / (flops * reached.of_head(recipe.model.size_of_head))
    own = Shards(description, mesh).own
    streamed = tokens * work.streamed(kernels) + own * work.update_bytes(accumulation)
    memory_bound = streamed / bandwidth
    sent = exchange(recipe, description, target, mesh, tokens, accumulation, devices.number_bytes)
    computing = products + attention + memory_bound
    exposed = max(NOT_HIDDEN * sent, sent - HIDDEN * computing)
    return StepTime(products, attention, memory_bound, exposed, 8 * tokens / INPUT_BANDWIDTH)


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a model, per token where not said otherwise."""

    recipe: Recipe
    description: Description
    number_bytes: int

    @property
    def _again(self) -> float:
        """Forward passes of the blocks: two if they are recomputed whole."""
        return 2.0 if self.recipe.training.remat == "blocks" else 1.0

    @property
    def _heads(self) -> tuple[int, int]:
        sizes = self.description.sizes
        return sizes["heads"] * sizes["head"], sizes["kv_heads"] * sizes["head"]

    @property
    def products(self) -> float:
        """Operations of matrix products: two a parameter and pass, the backward pass being two."""
        shapes = self.description.shapes
        matrices = sum(prod(shapes[p.name]) for p in self.description.parameters if p.role == "matrix")
        return 2 * matrices * (2 + self._again) + self.head_products

    @property
    def head_products(self) -> float:
        """Those of the output table."""
        return 6 * prod(self.description.shapes[self.description.output_table])

    @property
    def all_scores(self) -> float:
        """Operations of an attention that computes all scores, not only those that a causal mask leaves."""
        return 12 * self.recipe.model.layers * self._heads[0] * self.recipe.model.context

    def attention(self, block: int) -> float:
        """Operations of attention: two products of half the scores forward, five backward."""
        kept = {"none": True, "products": self.recipe.engine == "torch", "blocks": False}[self.recipe.training.remat]
        forwards = 1.0 if kept else 2.0
        return self.recipe.model.layers * self._heads[0] * (self.recipe.model.context + block) * (2 * forwards + 5)

    def streamed(self, kernels: str) -> float:
        """Bytes that pass through memory between products: norms and residual sums, the activation, queries, keys and
        values, attention's own; the embedding; and the logits with their gradient."""
        sizes, model = self.description.sizes, self.recipe.model
        heads, kv_heads = self._heads
        turned = 5 * (heads + kv_heads) if model.qk_norm or model.position == "rope" else 0
        mlp = (8 if model.has_gate else 5) * sizes["hidden"]
        forwards = 1 + 0.4 * (self.recipe.training.remat != "none")  # of about 2.5 passes, one again
        layer = (16 * sizes["width"] + 9 * (heads + kv_heads) + turned + mlp) * forwards
        logits = (2 if kernels in ("fused", "torch") else 10) * sizes["vocabulary"]
        return self.number_bytes * (sizes["layer"] * layer + 6 * sizes["width"] + logits)

    def update_bytes(self, accumulation: int) -> float:
        """Bytes per parameter: the optimizer reads four numbers and writes three; gradients are read for their norm;
        each micro-batch rounds the parameters and, if there are several, adds to the gradients."""
        return 36 + accumulation * (6 + 12 * (accumulation > 1))

    @property
    def muon(self) -> float:
        """Operations that make all matrices orthogonal, a step."""
        if self.recipe.optimizer.kind != "muon":
            return 0.0
        total = 0.0
        for parameter in self.description.parameters:
            if parameter.role == "matrix":
                fan_in = prod(self.description.sizes[axis] for axis in parameter.fan_in)
                fan_out = prod(self.description.own_shape(parameter)) // fan_in
                short, long = sorted((fan_in, fan_out))
                total += self.description.sizes["layer"] * (4 * short**2 * long + 2 * short**3)
        return len(POLYNOMIALS) * total


def exchange(
    recipe: Recipe,
    description: Description,
    target: Target,
    mesh: Mapping[str, int],
    tokens: float,
    accumulation: int,
    number_bytes: int,
) -> float:
    """Seconds in which a device sends: gathered parameters and summed gradients along fsdp and data, activations along
    tensor and context. The outermost axis goes over the network where there are several nodes or slices."""
    shards, sizes = Shards(description, mesh), description.sizes
    whole = sum(shards.count(p, ("tensor",)) for p in description.parameters)
    forwards = 2 if recipe.training.remat == "none" else 3
    fsdp = accumulation * whole * (forwards * number_bytes + 4) * _of_others(mesh["fsdp"])
    data = 2 * 4 * shards.own * _of_others(mesh["data"])
    stream = tokens * mesh["tensor"] * number_bytes * sizes["layer"]  # of a group's tokens
    tensor = 8 * stream * sizes["width"] * _of_others(mesh["tensor"])  # four sums a layer, each sent twice
    context = 4 * stream * sizes["kv_heads"] * sizes["head"] * (mesh["context"] - 1)
    sent = {"data": data, "fsdp": fsdp, "tensor": tensor, "context": context}
    outer = next((axis for axis in ("data", "fsdp") if mesh[axis] % target.groups == 0), None)
    device, seconds = target.device, 0.0
    for axis, count in sent.items():
        crosses = target.groups > 1 and (axis == outer or outer is None)
        seconds += count / (device.network if crosses else device.link)
    return seconds


def _of_others(count: int) -> float:
    """The part of an array that the other devices have."""
    return (count - 1) / count
