"""`model`: what is trained."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from raygpt.config.parts import Part, Real, Whole, multiples_around

# Layers, heads, width of the four published GPT-2 sizes; all have a context of 1024.
PRESETS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


class Model(Part):
    """GPT-2's shape. The defaults are the tiny model's."""

    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] | None = Field(
        None, description="A published size: layers, heads, width and context (1024) that are not set here."
    )
    layers: Whole = Field(4, gt=0, description="Transformer blocks.")
    heads: Whole = Field(4, gt=0, description="Attention heads; must divide width.")
    width: Whole = Field(128, gt=0, description="Size of the residual stream.")
    context: Whole = Field(128, gt=0, description="Tokens that the model sees at once.")
    dropout: Real = Field(0.0, ge=0, lt=1, description="Share of activations dropped in training.")
    bias: bool = Field(True, description="Biases in linear layers and norms.")
    tied_head: bool = Field(True, description="The output head is the token embedding, transposed.")
    init: Literal["gpt2", "xavier"] = Field(
        "gpt2", description="gpt2: normal 0.02, residual projections / sqrt(2·layers); xavier: uniform."
    )
    norm_epsilon: Real = Field(1e-5, gt=0, description="Added to the variance in each norm.")
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = Field(
        "auto", description="Of the arithmetic; parameters stay fp32. auto: the best that the device has."
    )
    implementation: Literal["raygpt", "huggingface"] = Field(
        "raygpt", description="Whose GPT-2: raygpt's own, or that of transformers, which needs engine torch."
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_from_preset(cls, value: object) -> object:
        if not isinstance(value, Mapping) or str(value.get("preset")) not in PRESETS:
            return value
        layers, heads, width = PRESETS[str(value["preset"])]
        return {"layers": layers, "heads": heads, "width": width, "context": 1024, **value}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"model.width: {self.width} does not divide into model.heads {self.heads} equal heads; "
                f"write {multiples_around(self.width, self.heads)}"
            )
        return self

    def parameters(self, vocab: int) -> int:
        """The exact number of parameters with `vocab` tokens; 124,439,808 for GPT-2 small's 50257."""
        width, bias = self.width, int(self.bias)
        norm = width + bias * width
        attention = 4 * width * width + bias * 4 * width  # query, key, value and the projection back
        mlp = 8 * width * width + bias * 5 * width  # to 4·width and back
        embeddings = (vocab + self.context) * width
        head = 0 if self.tied_head else vocab * width  # never has a bias
        return embeddings + self.layers * (2 * norm + attention + mlp) + norm + head

    def flops_per_token(self, vocab: int) -> int:
        """Operations per token, forward and backward: 6 · parameters + 12 · layers · width · context.

        The second term is attention's scores and sums. An untied input embedding is only looked up, so its
        table does not count; a tied one does its multiplying as the head.
        """
        looked_up = 0 if self.tied_head else vocab * self.width
        return 6 * (self.parameters(vocab) - looked_up) + 12 * self.layers * self.width * self.context
