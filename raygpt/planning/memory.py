"""Bytes that a training step needs on a device, by kind, at the moment when it needs most.

There are three such moments: when the loss is computed and what all layers keep for the backward pass is there; when
the backward pass is at the last layer, with recomputation or on a TPU; and when the optimizer has all gradients. `Kept`
counts what layers keep, in numbers per token. docs/plan.md says how far measured peaks are from these estimates.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.chunks import IN_PLACE_LOGITS, chunk_count, chunk_logits
from raygpt.engines.padding import padded_vocab
from raygpt.models import Description, Parameter, describe

TPU_LANES = 128  # of its vector unit: an array's last axis takes a multiple
MUON_BYTES = {"jax": 12, "torch": 8}  # of each matrix's numbers: directions, in fp32 or 16 bits, and copies of them
# Of a chunk without kernels: fp32, and their gradient in 16 bits; a soft-cap's slope is fp32 as well. On CPUs the
# exponentials are not fused.
LOGIT_BYTES, CAPPED_LOGIT_BYTES, CPU_LOGIT_BYTES = 6, 8, 10


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    logits: int
    workspace: int  # 16-bit copies of parameters, gathered shards, what the optimizer needs while it works

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def step_memory(
    recipe: Recipe, vocab: int, devices: Devices, mesh: Mapping[str, int], rows: int, accumulation: int
) -> Memory:
    """Of a step whose micro-batches have so many rows on each group of devices with different rows."""
    description = describe(recipe.model, padded_vocab(vocab))
    shards = Shards(description, mesh)
    state = 4 * shards.own, sum(4 * shards.count(p) * _slots(p, recipe) for p in description.parameters)
    gradients = 4 * shards.own
    tokens = rows * recipe.model.context // mesh["context"]
    logits = logits_bytes(recipe, description, devices, mesh, tokens)
    kept = Kept.of(recipe, description, devices, mesh)
    at_loss, at_backward = (tokens * count for count in kept.bytes_per_token(recipe.training.remat))
    summed = gradients if accumulation > 1 else 0
    if devices.platform == "cpu":  # where buffers are freed late
        return Memory(*state, gradients + summed, at_backward, logits, gradients)
    if devices.platform == "tpu":
        # A loop over layers has room for all their gradients from its beginning, and rounds their parameters before.
        # The output table's gradient is summed whole; and a loop over micro-batches keeps rounded parameters as well.
        number_bytes, table = devices.number_bytes, shards.output_table
        rounded = number_bytes * (shards.stacked + (shards.own if accumulation > 1 else 0))
        loss = Memory(*state, summed + 4 * table, at_loss, logits, rounded + number_bytes * table)
        begun = 4 * (shards.stacked + table)
        backward = Memory(*state, summed + begun, at_backward, 0, rounded + number_bytes * shards.gathered_layer)
    else:
        remat, is_jax = recipe.training.remat, recipe.engine == "jax"
        table = 4 * shards.count(description.by_name[description.output_table])
        # With `remat: blocks` no rounded copies of the layers stay. JAX then keeps each layer's own fp32 copy of its
        # part of the stacked parameters until the layer is computed again.
        slices = 4 * shards.stacked if is_jax and remat == "blocks" else 0
        copies = shards.gathered(devices.number_bytes, of_layers=remat != "blocks")
        # The gradient of the whole output table is summed over chunks of tokens; JAX has a chunk's part beside the sum.
        sums = 4 * shards.output_table * (2 if is_jax else mesh["fsdp"] > 1)
        loss = backward = Memory(*state, summed, at_loss, logits, slices + copies + sums)
        if remat != "none":
            # With `remat: products` JAX has room for all layers' gradients; with `blocks` they take that of the inputs.
            begun = table + (4 * shards.stacked if is_jax and remat == "products" else 0)
            backward = Memory(*state, begun + summed, at_backward, 0, slices + copies)
    update = Memory(*state, gradients + summed, 0, 0, _update_bytes(recipe, description, shards))
    return max(loss, backward, update, key=lambda memory: memory.total)


@dataclass(frozen=True)
class Shards:
    """The parameters of a model on each device of a mesh."""

    description: Description
    mesh: Mapping[str, int]

    def count(self, parameter: Parameter, axes: tuple[str, ...] = ("fsdp", "tensor")) -> int:
        """Numbers of a parameter on each device if it is sharded along these axes; one that does not divide is not."""
        shape = self.description.shapes[parameter.name]
        cut = [self.mesh[axis] if axis in axes else 1 for axis in parameter.mesh_axes]
        return prod(size // by if size % by == 0 else size for size, by in zip(shape, cut, strict=True))

    @property
    def own(self) -> int:
        return sum(self.count(parameter) for parameter in self.description.parameters)

    @property
    def stacked(self) -> int:
        """Those of the layers."""
        return sum(self.count(parameter) for parameter in self.description.parameters if parameter.is_stacked)

    @property
    def output_table(self) -> int:
        """The whole table, along fsdp."""
        return self.count(self.description.by_name[self.description.output_table], ("tensor",))

    @property
    def gathered_layer(self) -> int:
        """A whole layer, along fsdp; none if each device has it."""
        if self.mesh["fsdp"] == 1:
            return 0
        whole = sum(self.count(p, ("tensor",)) for p in self.description.parameters if p.is_stacked)
        return whole // self.description.sizes["layer"]

    def gathered(self, number_bytes: int, of_layers: bool = True) -> int:
        """Bytes of the copies that are computed with: rounded ones of all parameters, or of all but the layers'; if
        those are sharded, of the token tables and two layers."""
        if self.mesh["fsdp"] == 1:
            copied = self.own if of_layers else self.own - self.stacked
            return copied * number_bytes if number_bytes < 4 else 0
        tables = sum(self.count(p, ("tensor",)) for p in self.description.parameters if "vocabulary" in p.axes)
        return (tables + 2 * self.gathered_layer) * number_bytes


@dataclass(frozen=True)
class Kept:
    """Numbers that are kept of each token on a device, by what recomputation leaves of a layer."""

    layers: int
    everything: int  # of a layer
    products: int
    blocks: int
    beside: int  # of no layer, when the loss is computed: the last hidden state, gradients
    backward: int  # in the backward pass: gradients on their way back
    number_bytes: int

    @classmethod
    def of(cls, recipe: Recipe, description: Description, devices: Devices, mesh: Mapping[str, int]) -> "Kept":
        """The stream before attention and MLP, and their norms; queries, keys, values and attention's result, before
        and after their norm, by XLA on a GPU also a copy of each; the MLP before and after its activation."""
        model, sizes = recipe.model, description.sizes
        width, hidden = sizes["width"], sizes["hidden"] * (1 + model.has_gate)
        heads, kv_heads = (sizes[axis] * sizes["head_size"] for axis in ("heads", "kv_heads"))
        by_heads, again = 1.0 + (recipe.engine == "jax" and not devices.fused), 0
        splash = devices.platform == "tpu" and not devices.keeps_scores
        if splash:
            by_heads, again = _padding(sizes["head_size"]), heads  # its result also for the product behind it
        elif devices.platform == "tpu":
            by_heads = (3 + _padding(sizes["head_size"])) / 4  # XLA turns all but the result
        # A rotation's gradient needs no input, but PyTorch's queries, keys and values are parts of one array.
        torch_turns = recipe.engine == "torch" and model.position == "rope"
        turned = heads + kv_heads if model.qk_norm or torch_turns else 0
        # In units of activations: weights in their precision, and scores in fp32.
        scores = sizes["heads"] * model.context * (1 + 4 // devices.number_bytes) if devices.keeps_scores else 0
        gated = heads if model.head_gates else 0  # before their gates: 0.42 GiB of 24 × 1,024 tokens, as measured
        cut = int(2 * by_heads * (heads + kv_heads)) + again + turned + gated + hidden + sizes["hidden"] + scores
        # Of the linear layers, before biases; in the kernels' layout queries, keys and values are computed again.
        products, results = hidden + (0 if devices.fused else heads + 2 * kv_heads), 2
        if splash:  # what its gradient needs, and of the stream's width the result of the product behind it
            products, results = hidden + int(by_heads * 2 * (heads + kv_heads)), 1
        masks = 2 * width // devices.number_bytes if model.dropout else 0  # a byte each
        inputs = 2 if devices.fused and not model.unlike_gpt2 else 1  # the stream; in GPT-2's kernels normed as well
        beside, backward = cls._beside(recipe, description, devices, mesh)
        return cls(
            sizes["layer"],
            (4 + model.x0_mixing) * width + masks + cut // mesh["tensor"],
            (results + inputs) * width + products // mesh["tensor"],
            inputs * width,
            beside,
            backward,
            devices.number_bytes,
        )

    @staticmethod
    def _beside(recipe: Recipe, description: Description, devices: Devices, mesh: Mapping[str, int]) -> tuple[int, int]:
        """What no layer keeps, when the loss is computed and in the backward pass. A TPU's compiler says of each array
        when it is there: that is counted."""
        model, sizes = recipe.model, description.sizes
        width, hidden = sizes["width"], sizes["hidden"]
        heads, kv_heads = (sizes[axis] * sizes["head_size"] for axis in ("heads", "kv_heads"))
        values = 3 * model.value_embeddings * width  # looked up, and for two layers
        if devices.platform != "tpu":
            beside = 2 * hidden // mesh["tensor"] + values
            return beside, beside
        exact = 4 // min(devices.number_bytes, 4)  # fp32, in units of activations
        embedded = values + model.embedding_norm * width
        at_loss = (2 + exact) * width + embedded  # the hidden state in fp32 before its norm, after it, its gradient
        gradients = hidden * (1 + model.has_gate)
        if recipe.training.remat != "none":
            # The stream and its gradient. The sums of Splash's softmax are fp32 numbers, each repeated in all lanes.
            sums = 0 if devices.keeps_scores else exact * sizes["heads"] * TPU_LANES
            return at_loss, embedded + 2 * width + (gradients + sums) // mesh["tensor"]
        # What Splash's gradient takes and gives, of which it wants copies; queries and keys are turned back in fp32.
        copies = int(_padding(sizes["head_size"]) * (3 * heads + 4 * kv_heads))
        turned = exact * (heads + kv_heads) if model.qk_norm or model.position == "rope" else 0
        return at_loss, embedded + 3 * width + (gradients + copies + turned) // mesh["tensor"]

    def bytes_per_token(self, remat: str) -> tuple[int, int]:
        """When the loss is computed, and in the backward pass, which may have computed a layer again."""
        kept = self.layers * {"none": self.everything, "products": self.products, "blocks": self.blocks}[remat]
        again = 0 if remat == "none" else self.everything
        return (kept + self.beside) * self.number_bytes, (kept + again + self.backward) * self.number_bytes


def _padding(head: int) -> float:
    """How much larger an array becomes whose last axis is a head, on a TPU."""
    return -(-head // TPU_LANES) * TPU_LANES / head


def logits_bytes(
    recipe: Recipe, description: Description, devices: Devices, mesh: Mapping[str, int], tokens: int
) -> int:
    """Of one chunk: kernels keep 16-bit logits, JAX's beside their gradient; elsewhere they are fp32."""
    engine = recipe.engine
    chunk = tokens * columns(description, mesh) // logit_chunks(description, engine, devices, mesh, tokens)
    if _in_place(engine, devices):
        return chunk * devices.number_bytes * (2 if engine == "jax" else 1)
    if devices.platform == "cpu":
        return chunk * CPU_LOGIT_BYTES
    return chunk * (LOGIT_BYTES if recipe.model.softcap is None else CAPPED_LOGIT_BYTES)


def logit_chunks(description: Description, engine: str, devices: Devices, mesh: Mapping[str, int], tokens: int) -> int:
    """Into how many chunks an engine cuts so many tokens."""
    wide = columns(description, mesh)
    limit = IN_PLACE_LOGITS if _in_place(engine, devices) else chunk_logits(wide, on_cpu=devices.platform == "cpu")
    return chunk_count(tokens, wide, limit)


def columns(description: Description, mesh: Mapping[str, int]) -> int:
    """Logits of a token on a device."""
    return description.sizes["vocabulary"] // mesh["tensor"]


def _in_place(engine: str, devices: Devices) -> bool:
    """Whether a kernel turns logits into their gradient."""
    return devices.platform == "gpu" and (devices.fused or engine == "torch")


def _slots(parameter: Parameter, recipe: Recipe) -> int:
    """Averages that the optimizer keeps of a parameter: AdamW two, Muon one of a matrix."""
    return 1 if recipe.optimizer.kind == "muon" and parameter.role == "matrix" else 2


def _update_bytes(recipe: Recipe, description: Description, shards: Shards) -> int:
    """What Muon needs while it makes matrices orthogonal."""
    if recipe.optimizer.kind != "muon":
        return 0
    return MUON_BYTES[recipe.engine] * sum(shards.count(p) for p in description.parameters if p.role == "matrix")
