"""One training step: gradients of a batch in micro-batches, clipped, applied; and the losses of windows.

Whatever the mesh and the accumulation, the numbers are those of one device that computes the batch at once: sums are
divided by the global sum of the tokens' weights, padding rows weigh nothing, and dropout knows only seed, step and row.
Nothing here waits for the device.
"""

from collections.abc import Callable
from math import nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raygpt.config import Recipe
from raygpt.engines.torch.dropout import dropout_keys
from raygpt.engines.torch.optimizer import learning_rate
from raygpt.engines.torch.sharding import Mesh, synchronised, total_norm
from raygpt.engines.torch.state import State


class Batch(NamedTuple):
    """This process's rows of a batch on its device, cut into micro-batches."""

    inputs: Tensor  # int32 [accumulation, rows, time]
    targets: Tensor
    numbers: Tensor  # int32 [accumulation, rows]: which row of the batch each is
    weights: Tensor  # [accumulation, rows, time]: how much each target counts; nothing in rows that only pad
    is_weighted: bool  # otherwise each target of the batch's rows counts 1


class Metrics(NamedTuple):
    """What a step reports, on its way from the device to the host."""

    values: Tensor  # loss, gradient norm before clipping, skipped steps and spikes so far
    lr: float
    arrived: torch.cuda.Event | None

    def read(self) -> dict[str, float]:
        """Wait for the values."""
        if self.arrived:
            self.arrived.synchronize()
        loss, norm, skipped, spikes = self.values.tolist()
        return {"loss": loss, "grad_norm": norm, "lr": self.lr, "skipped": skipped, "spikes": spikes}


def make_step(recipe: Recipe, mesh: Mesh, autocast: torch.autocast, scaled: bool) -> Callable[[State, Batch], Metrics]:
    """The function that computes a step. `scaled` is for fp16."""
    clip, rate = recipe.optimizer.clip, learning_rate(recipe)
    training, guarded = recipe.training, scaled or recipe.training.on_nan == "skip"
    backward = make_backward(recipe, mesh, autocast)

    def step(state: State, batch: Batch) -> Metrics:
        scale = state.scale.factor if scaled else torch.ones_like(state.scale.factor)
        loss = backward(state, batch, scale) / scale
        gradients = [parameter.grad for parameter in state.parameters.values() if parameter.grad is not None]
        norm = total_norm(gradients, mesh) / scale
        finite = loss.isfinite() & norm.isfinite()
        left_out = ~finite if guarded else torch.zeros_like(finite)
        if training.on_spike != "ignore":
            known = torch.where(finite, norm, nan) if scaled else norm  # what the scale made overflow is no spike
            is_spike, state.spikes = state.spikes.check(loss.float(), known.float(), training.spike_sigmas, torch)
            left_out = left_out | is_spike if training.on_spike == "skip" else left_out
        lr = rate(state.step)
        shrink = torch.clamp(norm / clip, min=1) if clip else 1
        state.optimizer.step(lr, scale * shrink, left_out.float())
        if scaled:
            state.scale = state.scale.after(finite, torch)
        state.step += 1
        skipped = state.step - state.numbers()["updates"]
        return _sent(torch.stack([loss, norm, skipped.to(loss.dtype), state.spikes.spikes.to(loss.dtype)]), lr)

    return step


def make_backward(recipe: Recipe, mesh: Mesh, autocast: torch.autocast) -> Callable[[State, Batch, Tensor], Tensor]:
    """(state, batch, scale) to the scaled loss of the whole batch; gradients are in `.grad` of the parameters."""
    tokens, seed, dropout = recipe.training.batch_tokens, recipe.training.seed, recipe.model.dropout > 0

    def backward(state: State, batch: Batch, scale: Tensor) -> Tensor:
        # Each process has a part of the loss: DDP and FSDP average over processes, but it has to be a sum.
        factors = batch.weights * (scale * mesh.dp_size / (_weight_sum(batch, mesh) if batch.is_weighted else tokens))
        total = torch.zeros_like(scale)
        for micro, (inputs, targets, numbers, factor) in enumerate(zip(*batch[:3], factors, strict=True), start=1):
            keys = dropout_keys(seed, state.step, numbers, state.objective.gpt.sites) if dropout else None
            with synchronised(state.module, last=micro == len(factors)):
                with autocast:
                    loss, _ = state.module(inputs, targets, factor, keys)
                loss.backward()
            total += loss.detach()
        if mesh.size > 1:
            dist.all_reduce(total)
        return total / mesh.dp_size

    return backward


def _weight_sum(batch: Batch, mesh: Mesh) -> Tensor:
    """The sum of all targets' weights in all processes; 1 if it is 0, so that the loss is 0."""
    total = batch.weights.sum()
    if mesh.size > 1:
        dist.all_reduce(total)
        total = total / mesh.tensor  # along which processes have the same rows
    return torch.where(total > 0, total, 1)


@torch.no_grad()
def window_losses(objective: nn.Module, inputs: Tensor, targets: Tensor, autocast: torch.autocast) -> Tensor:
    """The loss of each row [rows, time], a mean over time."""
    nothing = torch.zeros(inputs.shape, device=inputs.device)
    with autocast:
        return objective(inputs, targets, nothing, None)[1] / inputs.shape[1]


def _sent(values: Tensor, lr: float) -> Metrics:
    """Start to copy metrics to the host right after the step, not after all that is queued when they are read."""
    if values.device.type != "cuda":
        return Metrics(values, lr, None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return Metrics(host, lr, arrived)
