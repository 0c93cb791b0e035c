"""A model's parameters and sizes, computed from its config. Everything else about the model follows from them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from raygpt.config import Model
from raygpt.models.parameter import InitialValues, Parameter

GATE_INPUTS = 12  # how many numbers of a block's normed input a head's gate is computed from
ZEROS, ONES = InitialValues("constant", 0.0), InitialValues("constant", 1.0)


@dataclass(frozen=True)
class Description:
    """The size of every axis, and every parameter in the order of the forward pass."""

    sizes: Mapping[str, int]
    parameters: tuple[Parameter, ...]

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter's array, layers first. Models with equal shapes can load each other's states."""
        return {p.name: tuple(self.sizes[axis] for axis in p.axes) for p in self.parameters}

    def own_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of one layer's array."""
        return tuple(self.sizes[axis] for axis in parameter.own_axes)

    @property
    def token_tables(self) -> list[str]:
        """The tables in which tokens are looked up: their embedding, and value embeddings."""
        return [p.name for p in self.parameters if "vocabulary" in p.axes and p.name != "head"]

    @property
    def output_table(self) -> str:
        """The parameter that turns a hidden state into logits: the head, or the token embedding that it is tied to."""
        return "head" if "head" in self.by_name else "tokens"

    @property
    def count(self) -> int:
        """The exact number of parameters; 124,439,808 for GPT-2 small's 50257 tokens."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def multiplied(self) -> int:
        """The number of parameters without token tables that are only looked up; one that is also the head counts."""
        return self.count - sum(prod(self.shapes[name]) for name in self.token_tables if name != self.output_table)

    @property
    def block_parameters(self) -> int:
        """The number of parameters of all blocks: without embeddings, head and final norm."""
        return sum(prod(self.shapes[p.name]) for p in self.parameters if p.is_stacked)

    @property
    def flops_per_token(self) -> int:
        """Operations per token, forward and backward: 6 · `multiplied` + 12 · layers · heads · head size · context.

        The second term is attention's scores and sums.
        """
        attention = prod(self.sizes[axis] for axis in ("layer", "heads", "head_size", "context"))
        return 6 * self.multiplied + 12 * attention

    def fans(self, parameter: Parameter) -> tuple[int, int]:
        """How many inputs and outputs a matrix has."""
        fan_in = prod(self.sizes[axis] for axis in parameter.fan_in)
        return fan_in, prod(self.own_shape(parameter)) // fan_in

    def cache_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of the key cache, and of the value cache: [layer, rows, kv_heads, context, head_size]."""
        layers, *rest = (self.sizes[axis] for axis in ("layer", "kv_heads", "context", "head_size"))
        return (layers, rows, *rest)


def describe(model: Model, vocab: int) -> Description:
    """The description of a config with `vocab` tokens; the vocabulary has no padding here."""
    sizes = {
        "layer": model.layers,
        "width": model.width,
        "heads": model.heads,
        "kv_heads": model.key_heads,
        "head_size": model.size_of_head,
        "hidden": model.size_of_hidden,
        "vocabulary": vocab,
        "context": model.context,
        "value_layers": 2 * model.value_embeddings,
        "gate_inputs": min(GATE_INPUTS, model.width),
        "one": 1,
    }
    return Description(sizes, tuple(_parameters(model, sizes)))


def _parameters(model: Model, sizes: Mapping[str, int]) -> Iterator[Parameter]:
    linear = partial(_linear, model=model, sizes=sizes)
    yield _tied_table(model) if model.tied_head else _table("tokens", "vocabulary", model)
    if model.position == "learned":
        yield _table("positions", "context", model)
    if model.value_embeddings:
        yield from (_table(f"values{n}", "vocabulary", model) for n in range(model.value_embeddings))
        yield Parameter("value_gains", ("value_layers",), "gain", InitialValues("constant", 0.5))
    if model.embedding_norm:
        yield from _norm("embedding_norm", "width", model)
    if model.x0_mixing:
        yield Parameter("blocks.residual.gain", ("layer", "one"), "gain", ONES)
        yield Parameter("blocks.x0.gain", ("layer", "one"), "gain", ZEROS)
    yield from _norm("blocks.norm1", "width", model)
    yield from linear("blocks.query", ("width",), ("heads", "head_size"))
    yield from linear("blocks.key", ("width",), ("kv_heads", "head_size"))
    yield from linear("blocks.value", ("width",), ("kv_heads", "head_size"))
    if model.qk_norm:
        yield from _norm("blocks.query_norm", "head_size", model)
        yield from _norm("blocks.key_norm", "head_size", model)
    if model.head_gates:
        yield Parameter(
            "blocks.head_gate.kernel", ("layer", "gate_inputs", "heads"), "head_gate", ZEROS, ("gate_inputs",)
        )
    yield from linear("blocks.out", ("heads", "head_size"), ("width",), to_residual=True)
    yield from _norm("blocks.norm2", "width", model)
    if model.has_gate:
        yield from linear("blocks.gate", ("width",), ("hidden",))
    yield from linear("blocks.up", ("width",), ("hidden",))
    yield from linear("blocks.down", ("hidden",), ("width",), to_residual=True)
    yield from _norm("norm", "width", model)
    if not model.tied_head:
        first = ZEROS if model.init == "modern" else _kernel_values(model, sizes["vocabulary"], model.width)
        yield Parameter("head", ("vocabulary", "width"), "head", first, fan_in=("width",))


def value_table_of(model: Model, layer: int) -> tuple[str, int] | None:
    """The table that is added to a layer's values, and the place of its gain: the n-th table is for the n-th layer and
    for the n-th of as many last ones."""
    tables, last = model.value_embeddings, layer - (model.layers - model.value_embeddings)
    if layer < tables:
        return f"values{layer}", layer
    return (f"values{last}", tables + last) if last >= 0 else None


def _table(name: str, axis: str, model: Model) -> Parameter:
    """An embedding: normal 0.02 as in GPT-2; beside Xavier's kernels with a variance of 1 / width, as in Flax."""
    deviation = {"gpt2": 0.02, "xavier": model.width**-0.5, "modern": 1.0}[model.init]
    return Parameter(name, (axis, "width"), "embedding", InitialValues("normal", deviation))


def _tied_table(model: Model) -> Parameter:
    """The token embedding that is also the output head. Its first values and its rate are a head's: with an embedding's
    the logits, sums of `width` products, would be huge."""
    tokens = _table("tokens", "vocabulary", model)
    first = InitialValues("normal", 0.02) if model.init == "modern" else tokens.initial
    return replace(tokens, role="head", initial=first, fan_in=("width",))


def _norm(name: str, axis: str, model: Model) -> Iterator[Parameter]:
    """A gain and a bias over an axis, as far as the model's norms have them."""
    axes = ("layer", axis) if name.startswith("blocks.") else (axis,)
    if model.norm_gain:
        yield Parameter(f"{name}.gain", axes, "gain", ONES)
    if model.norm == "layer" and model.bias:
        yield Parameter(f"{name}.bias", axes, "bias", ZEROS)


def _linear(
    name: str,
    inward: tuple[str, ...],
    outward: tuple[str, ...],
    model: Model,
    sizes: Mapping[str, int],
    to_residual: bool = False,
) -> Iterator[Parameter]:
    """A kernel [layer, *inward, *outward] and its bias."""
    fan_in, fan_out = (prod(sizes[axis] for axis in axes) for axes in (inward, outward))
    first = _kernel_values(model, fan_in, fan_out, to_residual)
    yield Parameter(f"{name}.kernel", ("layer", *inward, *outward), "matrix", first, fan_in=inward)
    if model.bias:
        yield Parameter(f"{name}.bias", ("layer", *outward), "bias", ZEROS)


def _kernel_values(model: Model, fan_in: int, fan_out: int, to_residual: bool = False) -> InitialValues:
    """GPT-2's normal 0.02, smaller for the projections that add to the residual stream; Xavier's uniform; or uniform
    with those projections zero, so that every block begins as the identity."""
    if model.init == "xavier":
        return InitialValues("uniform", (6 / (fan_in + fan_out)) ** 0.5)
    if model.init == "modern":
        return ZEROS if to_residual else InitialValues("uniform", 0.5 * (3 / fan_in) ** 0.5)
    return InitialValues("normal", 0.02 / (2 * model.layers) ** 0.5 if to_residual else 0.02)
