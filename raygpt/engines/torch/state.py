"""Everything that a step changes: the model, AdamW's averages, the step, fp16's loss scale, what is usual."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raygpt.engines.base import SPIKE_MEMORY, SPIKE_STEPS
from raygpt.engines.torch.loss import Objective

PARAMETERS, MEANS, SQUARES = KINDS = ("parameters", "means", "squares")
FIRST_SCALE = 2.0**16  # of a micro-batch's mean loss in fp16, and
GROWTH_STEPS = 2000  # without an overflow, after which it doubles: both as in PyTorch's GradScaler


class LossScale(NamedTuple):
    """What a batch's loss is multiplied by, lest small gradients vanish.

    Used in fp16 alone, but there in every state: a run may go on where there is bf16, and come back.
    """

    value: Tensor
    good_steps: Tensor  # since it last changed

    def after(self, finite: Tensor) -> "LossScale":
        """Halved when a gradient overflowed, doubled after many steps without; decided on the device."""
        good = torch.where(finite, self.good_steps + 1, 0)
        grown = good == GROWTH_STEPS
        value = torch.where(finite, torch.where(grown, self.value * 2, self.value), self.value / 2)
        return LossScale(value, torch.where(grown, 0, good))


class Spikes(NamedTuple):
    """What loss and gradient norm usually are: so a step that is far off is known before it is applied.

    There in every state, whether the recipe looks for spikes or not: it may begin to.
    """

    loss_mean: Tensor
    loss_variance: Tensor
    norm_mean: Tensor
    norm_variance: Tensor
    usual_steps: Tensor  # that were counted in
    spikes: Tensor  # found so far

    def look(self, loss: Tensor, norm: Tensor, sigmas: float) -> tuple[Tensor, "Spikes"]:
        """Whether a step is a spike, and what is usual after it. A spike counts as no more than the limit: a loss that
        stays high becomes usual, in time."""
        known = self.usual_steps >= SPIKE_STEPS
        share = torch.clamp(1 / (self.usual_steps + 1), min=1 / SPIKE_MEMORY)
        means, variances = torch.stack(self[:4:2]), torch.stack(self[1:4:2])
        values = torch.stack([loss, norm]).float()
        limits = torch.where(known, means + sigmas * variances.sqrt(), torch.inf)
        is_spike = (values > limits).any()
        off = torch.where(values.isfinite(), torch.minimum(values, limits), means) - means
        means, variances = means + share * off, (1 - share) * (variances + share * off**2)
        return is_spike, Spikes(
            means[0], variances[0], means[1], variances[1], self.usual_steps + 1, self.spikes + is_spike
        )


@dataclass
class State:
    """A step changes it in place."""

    objective: Objective
    module: nn.Module  # the objective as training calls it: itself, or joined to its copies in other processes
    parameters: dict[str, nn.Parameter]  # this process's shares; the modules hold whole ones while they compute
    optimizer: torch.optim.AdamW
    step: int
    scale: LossScale
    spikes: Spikes

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, name, tensor) of every parameter and of both averages of its gradient."""
        for name, parameter in self.parameters.items():
            averages = self.optimizer.state[parameter]
            yield PARAMETERS, name, parameter.detach()
            yield MEANS, name, averages["exp_avg"]
            yield SQUARES, name, averages["exp_avg_sq"]

    def numbers(self) -> dict[str, Tensor]:
        """What else lies on the device, each a single number. Steps that were left out are no updates."""
        updates = next(iter(self.optimizer.state.values()))["step"]
        scale = {"loss_scale": self.scale.value, "good_steps": self.scale.good_steps}
        return {"updates": updates, **scale, **self.spikes._asdict()}

    def set_updates(self, count: Tensor | int) -> None:
        """AdamW counts them to know how far its averages are from zero."""
        for averages in self.optimizer.state.values():
            averages["step"].fill_(count)
