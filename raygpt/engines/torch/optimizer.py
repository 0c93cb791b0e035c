"""AdamW and the learning rate, from a recipe, in PyTorch."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from raygpt.config import Recipe


def make_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Fused: one kernel for all parameters, which also clips and leaves steps out (`update`)."""
    settings, parameters = recipe.optimizer, list(parameters)
    groups: dict[Any, dict[str, Any]] = {}  # one kernel is for parameters that lie on the same devices
    for parameter in parameters:
        decays = parameter.ndim > 1 or settings.decay == "all"
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
    for parameter in parameters:  # PyTorch makes these in the first step; a state is whole before it
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
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
    """The rate of step n. Warm-up rises to the full rate at step `warmup_steps`; no step has a rate of zero."""
    peak, plan, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    return lambda step: peak * plan.share(step, steps)
