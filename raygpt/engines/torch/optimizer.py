"""AdamW, Muon and the learning rate, from a recipe, in PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raygpt.config import Recipe
from raygpt.engines import muon
from raygpt.engines.torch.devices import DTYPES
from raygpt.engines.torch.muon import Muon
from raygpt.engines.torch.sharding import Mesh
from raygpt.models.parameter import Role

SLOTS = {"means": "exp_avg", "squares": "exp_avg_sq"}  # what AdamW keeps of a parameter: our name -> PyTorch's


class Optimizer:
    """AdamW for all parameters, or Muon for the matrices and AdamW for the others."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: Mapping[str, nn.Parameter],
        role: Callable[[str], Role],
        mesh: Mesh,
        precision: str,
        compiles: bool = False,
    ):
        by_muon = {name for name in parameters if recipe.optimizer.kind == "muon" and role(name) == "matrix"}
        others = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
        matrices = {name: parameter for name, parameter in parameters.items() if name in by_muon}
        self._adamw = _make_adamw(recipe, others, role)
        states = {name: self._adamw.state[parameter] for name, parameter in others.items()}
        self.slots = {ours: {name: state[theirs] for name, state in states.items()} for ours, theirs in SLOTS.items()}
        """By name of the slot and of the parameter."""
        self._muon = None
        if matrices:
            dtype = DTYPES[muon.precision_of(precision)]
            self._muon = Muon(recipe.optimizer, matrices, mesh, dtype, compiles)
            self.slots["momentum"] = self._muon.momentum

    @property
    def updates(self) -> Tensor:
        """Steps so far that were not left out."""
        count: Tensor = next(iter(self._adamw.state.values()))["step"]
        return count

    def set_updates(self, count: Tensor | int) -> None:
        """Set AdamW's counts, which it uses for bias correction; there is one for each parameter."""
        for state in self._adamw.state.values():
            state["step"].fill_(count)

    def step(self, rate: float, divisor: Tensor, left_out: Tensor) -> None:
        """Take a step with the gradients divided by `divisor`; none where `left_out` is 1. Nothing waits for the
        device. For AdamW, the two are those of PyTorch's GradScaler, which hands them to the fused kernel in the same
        way."""
        if self._muon:
            self._muon.step(rate, self.updates, divisor, left_out > 0)
        for group in self._adamw.param_groups:
            group["lr"] = rate * group["ratio"]
        self._adamw.grad_scale, self._adamw.found_inf = divisor.float(), left_out  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def _make_adamw(
    recipe: Recipe, parameters: Mapping[str, nn.Parameter], role: Callable[[str], Role]
) -> torch.optim.AdamW:
    """Fused: one kernel for all parameters of a group, which also clips and leaves steps out."""
    settings, width = recipe.optimizer, recipe.model.width
    groups: dict[Any, dict[str, Any]] = {}  # one kernel is for parameters that lie on the same devices
    for name, parameter in parameters.items():
        decays, ratio = settings.decays(role(name)), settings.peak_rate(role(name), width) / settings.learning_rate
        group = groups.setdefault((decays, ratio, getattr(parameter, "device_mesh", None)), {"params": []})
        group["params"].append(parameter)
        group["weight_decay"] = settings.weight_decay if decays else 0.0
        group["ratio"] = ratio  # of its rate to that of matrices
    adamw = torch.optim.AdamW(
        groups.values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in parameters.values():  # PyTorch makes these in the first step; a state is whole before it
        slots = {slot: torch.zeros_like(parameter) for slot in SLOTS.values()}
        adamw.state[parameter] = {"step": torch.zeros((), device=parameter.device), **slots}
    return adamw


def learning_rate(recipe: Recipe) -> Callable[[int], float]:
    """The rate of the step that follows so many others; with Muon, that of matrices."""
    peak, schedule, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    return lambda step: peak * float(schedule.fraction(step, steps, np))
