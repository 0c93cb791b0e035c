"""`optimizer`: how a gradient becomes a step."""

from typing import Annotated, Literal

from pydantic import Field

from raygpt.config.parts import Beta, Number, Part


class Optimizer(Part):
    """AdamW."""

    learning_rate: Number = Field(1e-3, gt=0, description="The highest rate; the schedule scales it.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="Decay rates of the gradient's running mean and mean square."
    )
    epsilon: Number = Field(1e-8, gt=0, description="Added to the divisor, so that it is never zero.")
    weight_decay: Number = Field(0.1, ge=0, description="Fraction of a weight subtracted per step, times the rate.")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="What decays: matrices and embeddings only, or biases and norms too."
    )
    clip: Annotated[Number, Field(gt=0)] | None = Field(
        1.0, description="The gradient's largest global norm; null does not clip."
    )
