"""A model's parameters and sizes, computed from its config. Everything else about the model follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from raygpt.config import Model
from raygpt.models.parameter import FirstValues, Parameter

ZEROS, ONES = FirstValues("constant", 0.0), FirstValues("constant", 1.0)


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
    def output_table(self) -> str:
        """The parameter that turns a hidden state into logits: the head, or the token embedding that it is tied to."""
        return "head" if "head" in self.by_name else "tokens"

    @property
    def count(self) -> int:
        """The exact number of parameters; 124,439,808 for GPT-2 small's 50257 tokens."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def flops_per_token(self) -> int:
        """Operations per token, forward and backward: 6 · parameters + 12 · layers · heads · head size · context.

        The second term is attention's scores and sums. An untied token embedding is only looked up, so it does not
        count; a tied one is multiplied as the head.
        """
        looked_up = 0 if self.output_table == "tokens" else prod(self.shapes["tokens"])
        attention = prod(self.sizes[axis] for axis in ("layer", "heads", "head", "context"))
        return 6 * (self.count - looked_up) + 12 * attention

    def cache_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of the key cache, and of the value cache: [layer, rows, kv_heads, context, head]."""
        layers, *rest = (self.sizes[axis] for axis in ("layer", "kv_heads", "context", "head"))
        return (layers, rows, *rest)


def describe(model: Model, vocab: int) -> Description:
    """The description of a config with `vocab` tokens; the vocabulary has no padding here."""
    head = model.width // model.heads
    sizes = {
        "layer": model.layers,
        "width": model.width,
        "heads": model.heads,
        "kv_heads": model.heads,
        "head": head,
        "hidden": 4 * model.width,
        "vocabulary": vocab,
        "context": model.context,
    }
    parameters = [
        _table("tokens", "vocabulary", model),
        _table("positions", "context", model),
        *_norm("blocks.norm1", model),
        *_linear("blocks.query", ("width",), ("heads", "head"), model, sizes),
        *_linear("blocks.key", ("width",), ("kv_heads", "head"), model, sizes),
        *_linear("blocks.value", ("width",), ("kv_heads", "head"), model, sizes),
        *_linear("blocks.out", ("heads", "head"), ("width",), model, sizes, to_residual=True),
        *_norm("blocks.norm2", model),
        *_linear("blocks.up", ("width",), ("hidden",), model, sizes),
        *_linear("blocks.down", ("hidden",), ("width",), model, sizes, to_residual=True),
        *_norm("norm", model),
    ]
    if not model.tied_head:
        first = _kernel_values(model, vocab, model.width)
        parameters.append(Parameter("head", ("vocabulary", "width"), "head", first, fan_in=("width",)))
    return Description(sizes, tuple(parameters))


def _table(name: str, axis: str, model: Model) -> Parameter:
    """An embedding: normal 0.02 as in GPT-2; beside Xavier's kernels with a variance of 1 / width, as in Flax."""
    deviation = model.width**-0.5 if model.init == "xavier" else 0.02
    return Parameter(name, (axis, "width"), "embedding", FirstValues("normal", deviation))


def _norm(name: str, model: Model) -> list[Parameter]:
    axes = ("layer", "width") if name.startswith("blocks.") else ("width",)
    gain = Parameter(f"{name}.gain", axes, "gain", ONES)
    return [gain, Parameter(f"{name}.bias", axes, "bias", ZEROS)] if model.bias else [gain]


def _linear(
    name: str,
    inward: tuple[str, ...],
    outward: tuple[str, ...],
    model: Model,
    sizes: Mapping[str, int],
    to_residual: bool = False,
) -> list[Parameter]:
    """A kernel [layer, *inward, *outward] and its bias."""
    fan_in, fan_out = (prod(sizes[axis] for axis in axes) for axes in (inward, outward))
    first = _kernel_values(model, fan_in, fan_out, to_residual)
    kernel = Parameter(f"{name}.kernel", ("layer", *inward, *outward), "matrix", first, fan_in=inward)
    return [kernel, Parameter(f"{name}.bias", ("layer", *outward), "bias", ZEROS)] if model.bias else [kernel]


def _kernel_values(model: Model, fan_in: int, fan_out: int, to_residual: bool = False) -> FirstValues:
    """GPT-2's normal 0.02, smaller for the projections that add to the residual stream; or Xavier's uniform."""
    if model.init == "xavier":
        return FirstValues("uniform", (6 / (fan_in + fan_out)) ** 0.5)
    return FirstValues("normal", 0.02 / (2 * model.layers) ** 0.5 if to_residual else 0.02)
