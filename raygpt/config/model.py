"""`model`: what is trained."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raygpt.config.parts import Integer, May, Number, Part, multiples_around, no_effect, shown

# What a preset sets, where the recipe does not: a published size of GPT-2, or the keys of a family, of any depth.
PRESETS: dict[str, dict[str, Any]] = {
    name: {"layers": layers, "heads": heads, "width": width, "context": 1024}
    for name, layers, heads, width in (
        ("gpt2", 12, 12, 768),
        ("gpt2-medium", 24, 16, 1024),
        ("gpt2-large", 36, 20, 1280),
        ("gpt2-xl", 48, 25, 1600),
    )
}
_MODERN = {"context": 1024, "norm": "rms", "position": "rope", "bias": False, "tied_head": False, "init": "modern"}
PRESETS |= {
    "llama": {**_MODERN, "mlp": "swiglu"},
    "qwen3": {**_MODERN, "mlp": "swiglu", "qk_norm": True, "norm_epsilon": 1e-6, "rope_base": 1e6},
    "nanochat": {
        **_MODERN,
        "mlp": "relu2",
        "qk_norm": True,
        "norm_gain": False,
        "norm_epsilon": 1e-6,
        "embedding_norm": True,
        "softcap": 15.0,
    },
}
SIZE_KEYS = ("layers", "heads", "width")  # which a depth sets
FAMILY_KEYS = {key for preset in PRESETS.values() for key in preset} - {*SIZE_KEYS, "context"}  # which a preset sets
HEAD, WIDTH_PER_LAYER = 128, 64  # of a model that is chosen by its depth
GATED = ("swiglu",)
HIDDEN_MULTIPLE = 128  # of swiglu's hidden layer: matrix units need multiples
DERIVED = {"head_size": "size_of_head", "kv_heads": "key_heads", "hidden": "size_of_hidden"}  # key -> its size, if null


class Model(Part):
    """A decoder-only transformer. The defaults are GPT-2's layers in the tiny model's size."""

    preset: Annotated[
        Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama", "qwen3", "nanochat"] | None, May.DIFFER
    ] = Field(None, description="A published size of GPT-2, or a family: its keys, where they are not set here.")
    depth: Annotated[Annotated[Integer, Field(gt=0)] | None, May.DIFFER] = Field(
        None, description="One dial for the size: sets layers, width (64 a layer) and heads (of 128)."
    )
    layers: Integer = Field(4, gt=0, description="Transformer blocks.")
    heads: Integer = Field(4, gt=0, description="Attention heads; must divide width, unless head_size is set.")
    width: Integer = Field(128, gt=0, description="Size of the residual stream.")
    context: Integer = Field(128, gt=0, description="Tokens that the model sees at once.")
    head_size: Annotated[Integer, Field(gt=0)] | None = Field(None, description="Size of a head; null: width / heads.")
    kv_heads: Annotated[Integer, Field(gt=0)] | None = Field(
        None, description="Heads of keys and values, each for heads / kv_heads of queries; null: heads."
    )
    norm: Literal["layer", "rms"] = Field("layer", description="LayerNorm, or RMSNorm: without mean and bias.")
    norm_gain: bool = Field(True, description="Norms multiply by a learned gain.")
    norm_epsilon: Annotated[Number, May.DIFFER] = Field(1e-5, gt=0, description="Added to the variance in each norm.")
    embedding_norm: bool = Field(False, description="A norm between the token embedding and the first block.")
    qk_norm: bool = Field(False, description="Queries and keys pass a norm over each head, before RoPE.")
    position: Literal["learned", "rope"] = Field(
        "learned", description="A table of positions, or queries and keys that are rotated by them."
    )
    rope_base: Annotated[Number, May.DIFFER] = Field(
        1e4, gt=1, description="rope: pair n of a head turns by base^(-2n/head_size) a token; transformers' rope_theta."
    )
    rope_share: Annotated[Number, May.DIFFER] = Field(
        1.0, gt=0, le=1, description="rope: the fraction of a head that is rotated, fastest first."
    )
    mlp: Literal["gelu", "relu2", "swiglu"] = Field(
        "gelu", description="The hidden layer: GPT-2's GELU, the square of ReLU, or SiLU of a gate."
    )
    hidden: Annotated[Integer, Field(gt=0)] | None = Field(
        None, description="Size of the hidden layer; null: 4 · width, for swiglu 8/3 · width."
    )
    softcap: Annotated[Annotated[Number, Field(gt=0)] | None, May.DIFFER] = Field(
        None, description="Logits become c · tanh(logits / c), none larger than c; null: not capped."
    )
    value_embeddings: Integer = Field(
        0, ge=0, description="Token tables added to the values of as many first and last layers."
    )
    x0_mixing: bool = Field(False, description="Each block's input is a learned mixture with that of the first.")
    head_gates: bool = Field(False, description="Each head's output is multiplied by a learned gate of the input.")
    dropout: Annotated[Number, May.DIFFER] = Field(
        0.0, ge=0, lt=1, description="Fraction of activations dropped in training."
    )
    bias: bool = Field(True, description="Biases in linear layers and LayerNorm.")
    tied_head: bool = Field(True, description="The output head is the token embedding, transposed.")
    init: Annotated[Literal["gpt2", "xavier", "modern"], May.DIFFER] = Field(
        "gpt2", description="First weights: gpt2 as published, xavier uniform, modern with zero outputs."
    )
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32", "fp64"], May.DIFFER] = Field(
        "auto", description="Precision of the arithmetic; parameters are fp32 or more. auto: the device's best."
    )
    implementation: Annotated[Literal["raygpt", "huggingface"], May.DIFFER] = Field(
        "raygpt", description="Whose GPT-2: raygpt's own, or that of transformers, which needs engine torch."
    )

    @model_validator(mode="before")
    @classmethod
    def _keys_of_preset_and_depth(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        preset = PRESETS.get(str(value.get("preset")), {})
        family = preset if "layers" not in preset else {}
        depth = value.get("depth")
        if depth is None and family and not any(key in value for key in SIZE_KEYS):
            depth = 12
        try:
            sizes = {} if depth is None else _sizes_of(int(depth))
        except (ValueError, TypeError, OverflowError):
            return value  # no whole number, as its field says
        return {**preset, **sizes, **value, **({} if depth is None else {"depth": depth})}

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_hidden(self) -> int:
        gated = -(-8 * self.width // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE
        return self.hidden or (gated if self.has_gate else 4 * self.width)

    @property
    def has_gate(self) -> bool:
        """Whether the MLP's hidden layer is multiplied by a second one, its gate."""
        return self.mlp in GATED

    def without_derived(self) -> Self:
        """The same model with null for sizes that follow from others, as in a recipe that does not set them."""
        model = self
        for key, size in DERIVED.items():
            without = model.model_copy(update={key: None})
            model = without if getattr(without, size) == getattr(model, size) else model
        return model

    @property
    def unlike_gpt2(self) -> dict[str, Any]:
        """The keys, with their values, by which the layers differ from GPT-2's."""
        differs = {key: getattr(self, key) for key in LAYER_KEYS if getattr(self, key) != _default(key)}
        sizes = {
            "head_size": self.size_of_head * self.heads != self.width,
            "kv_heads": self.key_heads != self.heads,
            "hidden": self.size_of_hidden != 4 * self.width,
        }
        return differs | {key: getattr(self, key) for key, other in sizes.items() if other}

    @model_validator(mode="after")
    def _sizes_are_complete(self) -> Self:
        given = [key for key in SIZE_KEYS if key in self.model_fields_set]
        missing = [key for key in SIZE_KEYS if key not in given]
        if self.preset and given and missing:  # the defaults are a tiny GPT-2's
            raise ValueError(
                f"model.{missing[0]}: is missing beside model.{given[0]} {getattr(self, given[0])}, and preset "
                f"{self.preset} has no size of its own; write model.depth instead, or all of layers, heads and width"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_size is None and self.width % self.heads:
            raise ValueError(
                f"model.width: {self.width} does not divide into model.heads {self.heads} equal heads; "
                f"write {multiples_around(self.width, self.heads)}"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"model.kv_heads: {self.kv_heads} does not divide model.heads {self.heads}; write a divisor of it"
            )
        if self.position == "rope" and self.size_of_head % 2:
            raise ValueError(
                f"model.position: rope rotates pairs, and a head of {self.size_of_head} is odd; write an even "
                "model.head_size"
            )
        if self.position == "rope" and int(self.rope_share * self.size_of_head // 2) < 1:
            least = math.ceil(1e4 * 2 / self.size_of_head) / 1e4  # rounded up
            raise ValueError(
                f"model.rope_share: {self.rope_share:g} of a head of {self.size_of_head} is not one pair to rotate; "
                f"write {least:g} or more"
            )
        if self.value_embeddings * 2 > self.layers:
            raise ValueError(
                f"model.value_embeddings: {self.value_embeddings} tables are for as many layers at both ends, and "
                f"there are {self.layers}; write {self.layers // 2} or less"
            )
        if self.value_embeddings and self.key_heads * self.size_of_head != self.width:
            raise ValueError(
                f"model.value_embeddings: its tables are as wide as model.width {self.width}, and the values are "
                f"{self.key_heads * self.size_of_head}; leave out model.kv_heads and model.head_size"
            )
        return self

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        for key in ("rope_base", "rope_share"):
            value, default = getattr(self, key), _default(key)
            if self.position != "rope" and value != default:
                beside = f"model.position {self.position}"
                raise ValueError(no_effect(f"model.{key}", value, default, beside, "model.position: rope"))
        if self.norm == "layer" and self.bias and not self.norm_gain:
            raise ValueError("model.norm_gain: a LayerNorm with a bias has a gain too; write model.bias: false")
        if self.implementation == "huggingface" and self.unlike_gpt2:
            key, value = next(iter(self.unlike_gpt2.items()))
            raise ValueError(
                f"model.{key}: {shown(value)} is not transformers' GPT-2; write model.implementation: raygpt"
            )
        return self


# Which of a model's keys say what its layers compute, besides sizes.
LAYER_KEYS = (
    "norm",
    "norm_gain",
    "embedding_norm",
    "qk_norm",
    "position",
    "mlp",
    "softcap",
    "value_embeddings",
    "x0_mixing",
    "head_gates",
)


def _default(key: str) -> Any:
    return Model.model_fields[key].default


def _sizes_of(depth: int) -> dict[str, int]:
    """Layers, heads and width of a depth: 12 is GPT-2 small's size, 18 its medium's, 30 its largest's."""
    heads = max(1, -(-depth * WIDTH_PER_LAYER // HEAD))
    return dict(zip(SIZE_KEYS, (depth, heads, heads * HEAD), strict=True))
