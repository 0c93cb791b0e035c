"""`model`: what is trained."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from raygpt.config.parts import Integer, May, Number, Part, multiples_around

# Layers, heads, width of the four published GPT-2 sizes; all have a context of 1024.
PRESETS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


class Model(Part):
    """GPT-2's shape. The defaults are the tiny model's."""

    preset: Annotated[Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] | None, May.DIFFER] = Field(
        None, description="A published size: layers, heads, width and context (1024) that are not set here."
    )
    layers: Integer = Field(4, gt=0, description="Transformer blocks.")
    heads: Integer = Field(4, gt=0, description="Attention heads; must divide width.")
    width: Integer = Field(128, gt=0, description="Size of the residual stream.")
    context: Integer = Field(128, gt=0, description="Tokens that the model sees at once.")
    dropout: Annotated[Number, May.DIFFER] = Field(
        0.0, ge=0, lt=1, description="Fraction of activations dropped in training."
    )
    bias: bool = Field(True, description="Biases in linear layers and norms.")
    tied_head: bool = Field(True, description="The output head is the token embedding, transposed.")
    init: Annotated[Literal["gpt2", "xavier"], May.DIFFER] = Field(
        "gpt2", description="gpt2: normal 0.02, residual projections / sqrt(2·layers); xavier: uniform."
    )
    norm_epsilon: Annotated[Number, May.DIFFER] = Field(1e-5, gt=0, description="Added to the variance in each norm.")
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32", "fp64"], May.DIFFER] = Field(
        "auto", description="Of the arithmetic; parameters stay fp32. auto: the best that the device has."
    )
    implementation: Annotated[Literal["raygpt", "huggingface"], May.DIFFER] = Field(
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
