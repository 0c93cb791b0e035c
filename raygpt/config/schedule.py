"""`schedule`: the learning rate over the steps."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raygpt.config.parts import Integer, Number, Part, no_effect


class Schedule(Part):
    """The learning rate over the steps, as a fraction of optimizer.learning_rate."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="The shape after warm-up; wsd is constant, then falls at the end."
    )
    warmup_steps: Integer = Field(0, ge=0, description="Steps in which the rate rises from 0.")
    end: Number = Field(0.1, ge=0, le=1, description="The rate after the last step, as a fraction of the highest.")
    decay_share: Number = Field(0.2, gt=0, le=1, description="wsd: the fraction of steps in which the rate falls.")

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        # Compared with the default, because a resolved recipe writes every key.
        idle = {
            "decay_share": (self.kind != "wsd", "schedule.kind: wsd"),
            "end": (self.kind == "constant", "e.g. schedule.kind: cosine"),
        }
        for key, (is_idle, remedy) in idle.items():
            value, default = getattr(self, key), Schedule.model_fields[key].default
            if is_idle and value != default:
                raise ValueError(no_effect(f"schedule.{key}", value, default, f"schedule.kind {self.kind}", remedy))
        return self

    def fraction(self, step: Any, steps: int, xp: Any) -> Any:
        """The rate of the step after `step` steps, of `steps` in total, as a fraction of the highest rate.

        `xp` is numpy or jax.numpy. Warm-up rises to the full rate at step `warmup_steps`; no step has a rate of zero.
        """
        n, rest = step - self.warmup_steps, max(1, steps - self.warmup_steps)
        falling = max(1, round(self.decay_share * steps))
        gone = xp.clip((n - (rest - falling)) / falling if self.kind == "wsd" else n / rest, 0, 1)  # from 0 to 1
        down = {"constant": 0 * gone, "cosine": (1 - xp.cos(math.pi * gone)) / 2}.get(self.kind, gone)
        return xp.where(n < 0, (step + 1) / (self.warmup_steps + 1), 1 - (1 - self.end) * down)
