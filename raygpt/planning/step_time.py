"""Seconds that a training step takes on a device, by kind: operations and bytes, divided by what hardware reaches.

`REACHED` says which fraction of the stated peak and bandwidth each engine's kernels reach. Those of GPUs are fitted to
steps measured on H200s (benchmarks/results/step-*.json, and plan-h200.json's cases that are marked so), those of CPUs
to plan-cpu.json's, where the peak is that of NumPy's products; those of TPUs are assumed, none was measured. Exchange
between devices is computed from the bytes that a mesh sends and the links' stated speed, and was not measured either.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import gcd, prod

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
SCORE_PASSES = 8  # of writing or reading all scores: products, mask, softmax, and their gradients
CLOSED_SIDE = 16  # chips of a side of v5e and v6e, whose ends are connected; those of v4 and v5p are from 4 on


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
    ("cpu", "plain"): Reached(1.00, 1.00, 0.37),
    ("cpu", "torch"): Reached(0.75, 1.00, 0.30),
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
    scores = work.all_scores if devices.keeps_scores else work.attention(reached.block)
    attention = tokens * scores / (flops * reached.of_head(recipe.model.size_of_head))
    own = Shards(description, mesh).own
    streamed = tokens * (work.streamed(kernels) + devices.keeps_scores * work.score_bytes)
    streamed += own * work.update_bytes(accumulation)
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
        return sizes["heads"] * sizes["head_size"], sizes["kv_heads"] * sizes["head_size"]

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

    @property
    def score_bytes(self) -> float:
        """Bytes of scores that pass through memory, where attention keeps them: there and back in either direction."""
        sizes, context = self.description.sizes, self.recipe.model.context
        return SCORE_PASSES * self.number_bytes * sizes["layer"] * sizes["heads"] * context

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
        """Bytes per parameter: a gradient is written, and read for its norm; the optimizer reads four numbers and
        writes three; each micro-batch rounds the parameters and, if there are several, adds to the gradients."""
        return 36 + accumulation * (6 + 12 * (accumulation > 1))

    @property
    def muon(self) -> float:
        """Operations that make all matrices orthogonal, a step."""
        if self.recipe.optimizer.kind != "muon":
            return 0.0
        total = 0.0
        for parameter in self.description.parameters:
            if parameter.role == "matrix":
                short, long = sorted(self.description.fans(parameter))
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
    """Seconds in which a device sends. Nodes or slices are along the outermost axes, `data` and then `fsdp`; an axis
    that has devices in several is summed or gathered inside each first, so that a device sends only its part beyond."""
    sent = sent_bytes(recipe, description, mesh, tokens, accumulation, number_bytes)
    groups, seconds = target.groups, 0.0
    for axis in ("data", "fsdp", "context", "tensor"):
        outer = gcd(mesh[axis], groups)
        groups, inner = groups // outer, mesh[axis] // outer
        if mesh[axis] > 1:
            whole = sent[axis] / _of_others(mesh[axis])
            seconds += whole * _of_others(inner) / _link(target, inner)
            seconds += whole / inner * _of_others(outer) / target.device.network
    return seconds


def sent_bytes(
    recipe: Recipe,
    description: Description,
    mesh: Mapping[str, int],
    tokens: float,
    accumulation: int,
    number_bytes: int,
) -> dict[str, float]:
    """Bytes that a device sends in a step along each axis: parameters and summed gradients along fsdp and data,
    activations along tensor and context. docs/scale.md compares those of JAX with compiled programs."""
    shards, sizes = Shards(description, mesh), description.sizes
    parameters = description.parameters
    whole = {p.name: shards.count(p, ("tensor",)) for p in parameters}
    layers, tables = (sum(whole[p.name] for p in parameters if p.is_stacked == stacked) for stacked in (True, False))
    others = {axis: _of_others(size) for axis, size in mesh.items()}
    stream = tokens * mesh["tensor"] * number_bytes * sizes["layer"]  # of a group's tokens
    sent = {
        "tensor": 8 * stream * sizes["width"] * others["tensor"],  # four sums a layer, each sent twice
        "context": 4 * stream * sizes["kv_heads"] * sizes["head_size"] * (mesh["context"] - 1),
    }
    if recipe.engine == "torch":
        forwards = 2 if recipe.training.remat == "none" else 3
        fsdp = (layers + tables) * (forwards * number_bytes + 4)
        return {**sent, "fsdp": accumulation * fsdp * others["fsdp"], "data": 8 * shards.own * others["data"]}
    # Of a layer that is computed again, only what comes before attention is gathered a third time.
    attention = {name: whole[f"blocks.{name}.kernel"] for name in ("query", "key", "value", "out")}
    again = sum(attention.values()) - attention["out"] if recipe.training.remat != "none" else 0
    # Gradients are rounded before they are summed, but for the output table's. Only the MLP's are left divided by the
    # sum; those of attention and of the tables are summed whole, which sends them twice.
    added = layers + sum(attention.values())
    summed = 2 * (number_bytes * tables + (4 - min(4, number_bytes)) * whole[description.output_table])
    spread = 2 * number_bytes * shards.stacked if recipe.optimizer.kind == "muon" else 0  # there and back
    fsdp = accumulation * (number_bytes * (2 * layers + tables + again + added) + summed) + spread
    data = 2 * number_bytes * shards.stacked + summed / mesh["fsdp"]
    return {**sent, "fsdp": fsdp * others["fsdp"], "data": accumulation * data * others["data"]}


def _link(target: Target, size: int) -> float:
    """Bytes/s that a device sends along an axis of so many devices in its node or slice. In a slice an axis that is no
    longer than its sides has the links of one dimension; and half of them if its ends are not connected."""
    device, sides = target.device, target.sides
    if not sides:
        return device.link
    closed = min(sides) % 4 == 0 if len(sides) == 3 else max(sides) >= CLOSED_SIDE
    return device.link / (1 if size > max(sides) else len(sides)) / (1 if closed else 2)


def _of_others(count: int) -> float:
    """The part of an array that the other devices have."""
    return (count - 1) / count
