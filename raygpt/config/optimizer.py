"""`optimizer`: how a gradient becomes a step."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raygpt.config.model import Model
from raygpt.config.parts import Beta, Integer, Number, Part, no_effect, written

# What muon sets where the recipe does not. A matrix's update is orthogonal whatever the gradient's size: the rate is
# high, and nothing need be clipped.
MUON: dict[str, Any] = {
    "learning_rate": 0.02,
    "betas": (0.8, 0.95),
    "epsilon": 1e-10,
    "weight_decay": 0.0,
    "cautious": True,
    "clip": None,
}
REFERENCE_WIDTH = 768  # at which AdamW's rates beside Muon are those of the recipe
FIRST_MOMENTUM = 0.85  # of muon, before the first step: it rises from there
MUON_ONLY = ("momentum", "momentum_warmup", "embedding_rate", "head_rate", "gain_rate", "cautious")


class Optimizer(Part):
    """AdamW; or Muon for matrices and AdamW, with rates of its own, for everything else. The defaults are AdamW's."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW; or Muon for matrices, which changes the defaults of other keys."
    )
    learning_rate: Number = Field(
        1e-3, gt=0, description="The highest rate; the schedule scales it. muon: 0.02, of matrices."
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the gradient's mean and mean square. muon: [0.8, 0.95]."
    )
    epsilon: Number = Field(
        1e-8, gt=0, description="AdamW adds it to the divisor, so that it is never zero. muon: 1e-10."
    )
    weight_decay: Number = Field(
        0.1, ge=0, description="Fraction of a weight subtracted per step, times the rate. muon: 0."
    )
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="What decays: matrices (with adamw, embeddings too), or every parameter."
    )
    clip: Annotated[Number, Field(gt=0)] | None = Field(
        1.0, description="The gradient's largest global norm; null does not clip. muon: null."
    )
    momentum: Beta = Field(0.9, description="muon: decay rate of the running mean of a matrix's gradient.")
    momentum_warmup: Integer = Field(100, ge=0, description="muon: steps in which momentum rises from 0.85.")
    embedding_rate: Number = Field(0.2, gt=0, description="muon: AdamW's highest rate of embeddings.")
    head_rate: Number = Field(0.006, gt=0, description="muon: AdamW's highest rate of the head, tied or not.")
    gain_rate: Number = Field(0.02, gt=0, description="muon: AdamW's highest rate of gates, gains and biases.")
    cautious: bool = Field(
        False, description="muon (default true): a matrix decays only where its update has the same sign."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_muon(cls, value: object) -> object:
        return {**MUON, **value} if isinstance(value, Mapping) and value.get("kind") == "muon" else value

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        # Compared with the default, because a resolved recipe writes every key.
        for key in MUON_ONLY:
            value, default = getattr(self, key), Optimizer.model_fields[key].default
            if self.kind == "adamw" and value != default:
                beside, remedy = "optimizer.kind adamw", "optimizer.kind: muon"
                raise ValueError(no_effect(f"optimizer.{key}", value, default, beside, remedy))
        return self

    def without_effect(self, model: Model) -> str | None:
        """In one line, a key of muon with another value than its default that changes nothing; None without one."""
        for key, (beside, remedy) in self.idle_keys(model).items():
            value, default = getattr(self, key), MUON.get(key, Optimizer.model_fields[key].default)
            if value != default:
                return no_effect(f"optimizer.{key}", value, default, beside, remedy)
        return None

    def idle_keys(self, model: Model) -> dict[str, tuple[str, str]]:
        """Keys of muon that change nothing, with what makes them so and what to write for them to have an effect."""
        idle: dict[str, tuple[str, str]] = {}
        if self.kind != "muon":
            return idle
        # `models/description.py` lists the parameters of each role.
        if not (model.norm_gain or model.bias or model.x0_mixing or model.head_gates or model.value_embeddings):
            idle["gain_rate"] = ("a model that has no gains, biases or gates", "e.g. model.norm_gain: true")
        if model.tied_head and model.position != "learned" and not model.value_embeddings:
            remedy = f"optimizer.head_rate: {written(self.embedding_rate)}"
            idle["embedding_rate"] = ("a model whose only table is trained as its head", remedy)
        if self.weight_decay == 0:
            for key in ("cautious", "decay"):
                idle[key] = ("optimizer.weight_decay 0", "e.g. optimizer.weight_decay: 0.1")
        if self.momentum <= FIRST_MOMENTUM:
            beside = f"optimizer.momentum {written(self.momentum)}, since it can only rise from {FIRST_MOMENTUM}"
            idle["momentum_warmup"] = (beside, "e.g. optimizer.momentum: 0.9")
        return idle

    def peak_rate(self, role: str, width: int) -> float:
        """The highest rate of a role's parameters in a model of that width.

        With muon AdamW's rates are for a width of 768 and are multiplied by the root of 768 / width. A matrix's does
        not depend on the width: its update has singular values of 1, however large it is. None depends on the batch:
        from 4,096 to 32,768 tokens the same rates were the best.
        """
        if self.kind == "adamw" or role == "matrix":
            return self.learning_rate
        rates = {"embedding": self.embedding_rate, "head": self.head_rate}
        return rates.get(role, self.gain_rate) * math.sqrt(REFERENCE_WIDTH / width)

    def decays(self, role: str) -> bool:
        """Whether the parameters of a role decay."""
        embeddings = self.kind == "adamw" and role in ("embedding", "head")
        return self.decay == "all" or role == "matrix" or embeddings
