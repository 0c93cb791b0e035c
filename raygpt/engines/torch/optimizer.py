"""AdamW and the learning rate, from a recipe, in PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raygpt.config import Recipe

SLOTS = {"means": "exp_avg", "squares": "exp_avg_sq"}  # what AdamW keeps of a parameter: our name -> PyTorch's


def make_optimizer(
    recipe: Recipe, parameters: Mapping[str, nn.Parameter], is_vector: Callable[[str], bool]
) -> torch.optim.AdamW:
    """Fused: one kernel for all parameters, which also clips and leaves steps out (`update`)."""
    settings = recipe.optimizer
    groups: dict[Any, dict[str, Any]] = {}  # one kernel is for parameters that lie on the same devices
    for name, parameter in parameters.items():
        decays = settings.decay == "all" or not is_vector(name)
        group = groups.setdefault((decays, getattr(parameter, "device_mesh", None)), {"params": []})
        group["params"].append(parameter)
        group["weight_decay"] = settings.weight_decay if decays else 0.0
    optimizer = torch.optim.AdamW(
        groups.values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in parameters.values():  # PyTorch makes these in the first step; a state is whole before it
        slots = {slot: torch.zeros_like(parameter) for slot in SLOTS.values()}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **slots}
    return optimizer


def update(optimizer: torch.optim.AdamW, rate: float, divisor: Tensor, left_out: Tensor) -> None:
    """Take a step with the gradients divided by `divisor`; none where `left_out` is 1. Nothing waits for the device.

    The two are those of PyTorch's GradScaler, which hands them to the fused kernel in the same way.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.grad_scale, optimizer.found_inf = divisor.float(), left_out  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def learning_rate(recipe: Recipe) -> Callable[[int], float]:
    """The rate of the step that follows so many others."""
    peak, schedule, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    return lambda step: peak * float(schedule.fraction(step, steps, np))
