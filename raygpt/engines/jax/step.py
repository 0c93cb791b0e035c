"""One training step: gradients of a batch in micro-batches, clipped, applied; and the losses of rows.

Whatever the mesh and the accumulation, the numbers are those of one device that computes the batch at once: sums are
divided by the global sum of the tokens' weights, padding weighs nothing, and dropout knows only seed, step and row.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from raygpt.config import Recipe
from raygpt.engines.chunks import chunk_count, chunk_logits
from raygpt.engines.jax import loss
from raygpt.engines.jax.model import GPT
from raygpt.engines.jax.optimizer import Optimizer, Slots, Tree
from raygpt.engines.jax.sharding import gather_tables
from raygpt.engines.loss_scale import LossScale
from raygpt.engines.microbatches import row_numbers
from raygpt.engines.spikes import Spikes
from raygpt.models import Description

Array = jax.Array
Losses = Callable[..., tuple[Array, Array]]


class State(NamedTuple):
    """Everything that a step changes."""

    parameters: Tree
    slots: Slots  # the optimizer's state
    updates: Array  # int32: steps that were not skipped
    step: Array
    scale: LossScale
    spikes: Spikes


class Batch(NamedTuple):
    """A batch on the devices, split into micro-batches."""

    inputs: Array  # int32 [accumulation, rows, time]
    targets: Array
    weights: Array  # [accumulation, rows, time]: of each target in the loss; 0 in rows that only pad
    counted: Array | None  # the sum of all weights; None where only the step can know it


class Metrics(NamedTuple):
    """What a step reports, still on the device."""

    loss: Array
    grad_norm: Array  # before clipping
    lr: Array
    skipped: Array  # skipped steps so far
    spikes: Array  # spikes so far


class Forward(NamedTuple):
    """The forward pass on a mesh."""

    gpt: GPT
    description: Description
    mesh: Mesh

    @property
    def vocab(self) -> int:
        return self.description.sizes["vocabulary"]

    def __call__(
        self, parameters: Tree, inputs: Array, keys: Array | None
    ) -> tuple[Array, Array, int, tuple[int, int]]:
        """The last hidden state, the output table, the number of chunks, and the numbers of devices over which rows and
        time are divided."""
        gathered = gather_tables(self.mesh, self.description, parameters)
        hidden = self.gpt(gathered, inputs, keys)
        axes, table = self.mesh.shape, gathered[self.description.output_table]
        shards = axes["data"] * axes["fsdp"], axes["context"]
        tokens, columns = inputs.size // prod(shards), len(table) // axes["tensor"]
        limit = chunk_logits(columns, on_cpu=self.mesh.devices.flat[0].platform == "cpu")
        return hidden, table, chunk_count(tokens, columns, limit), shards


def make_losses(forward: Forward) -> Losses:
    """(parameters, inputs, targets, weights, dropout's keys) to the weighted sum of the tokens' losses and each row's,
    a row's loss being the sum over its tokens."""

    def losses(
        parameters: Tree, inputs: Array, targets: Array, weights: Array, keys: Array | None = None
    ) -> tuple[Array, Array]:
        hidden, table, chunks, shards = forward(parameters, inputs, keys)
        return loss.cross_entropy(
            hidden, table, targets, weights, forward.vocab, chunks, shards, forward.gpt.model.softcap
        )

    return losses


def make_token_logprobs(forward: Forward) -> Callable[[Tree, Array, Array], tuple[Array, Array]]:
    """The function to compile: (parameters, inputs, targets) [rows, time] to each target's log-probability, and
    whether it is the likeliest."""

    def token_logprobs(parameters: Tree, inputs: Array, targets: Array) -> tuple[Array, Array]:
        hidden, table, chunks, shards = forward(parameters, inputs, None)
        return loss.token_logprobs(hidden, table, targets, forward.vocab, chunks, shards, forward.gpt.model.softcap)

    return token_logprobs


def make_window_losses(losses: Losses) -> Callable[[Tree, Array, Array], Array]:
    """The function to compile: (parameters, inputs, targets) [rows, time] to the loss of each row, a mean over time."""

    def window_losses(parameters: Tree, inputs: Array, targets: Array) -> Array:
        return losses(parameters, inputs, targets, jnp.zeros(inputs.shape))[1] / inputs.shape[1]

    return window_losses


def make_step(
    recipe: Recipe,
    losses: Losses,
    optimizer: Optimizer,
    learning_rate: Callable[[Array], Array],
    scaled: bool = False,
    row_shards: int = 1,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function to compile: (state, batch) to (state, metrics). `scaled` is for fp16; `row_shards` is the number of
    groups of devices with different rows."""
    training = recipe.training
    guarded = scaled or "skip" in (training.on_nan, training.on_spike)
    sums = make_sums(recipe, losses, row_shards)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        factor = state.scale.factor if scaled else jnp.ones((), batch.weights.dtype)
        totals = sums(state, batch._replace(weights=batch.weights * factor))
        # Divided here and not in the loss: a 500,000th of a token's gradient is zero in fp16.
        counted = batch.weights.sum() if batch.counted is None else batch.counted
        divisor = jnp.maximum(counted, 1e-9) * factor  # the loss of a batch whose weights are all zero is 0
        loss, gradients = jax.tree.map(lambda total: total / divisor, totals)
        norm, rate = optax.tree.norm(gradients), jnp.asarray(learning_rate(state.step))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        good, spikes = finite if scaled or training.on_nan == "skip" else jnp.ones((), bool), state.spikes
        if training.on_spike != "ignore":
            known = jnp.where(finite, norm, jnp.nan) if scaled else norm  # what the scale made overflow is no spike
            values = loss.astype(jnp.float32), known.astype(jnp.float32)
            is_spike, spikes = spikes.check(values[0], values[1], training.spike_sigmas, jnp)
            good &= ~is_spike if training.on_spike == "skip" else True

        direction, slots = optimizer.update(gradients, state.parameters, state.slots, state.updates)
        parameters = optax.apply_updates(state.parameters, optax.tree.scale(-rate, direction))
        after = State(parameters, slots, state.updates + 1, state.step + 1, state.scale, spikes)
        if guarded:  # on the device, so that the host does not wait
            stay = state._replace(step=after.step, spikes=spikes)
            after = jax.tree.map(partial(jnp.where, good), after, stay)
        if scaled:
            after = after._replace(scale=state.scale.after(finite, jnp))
        skipped = after.step - after.updates
        return after, Metrics(loss, norm, rate, skipped.astype(loss.dtype), spikes.spikes.astype(loss.dtype))

    return step


def make_sums(recipe: Recipe, losses: Losses, row_shards: int = 1) -> Callable[[State, Batch], tuple[Array, Any]]:
    """(state, batch) to the weighted sum of all tokens' losses and its gradients, one micro-batch after another."""
    seed, dropout = recipe.training.seed, recipe.model.dropout > 0

    def sums(state: State, batch: Batch) -> tuple[Array, Any]:
        accumulation, micro_rows, _ = batch.inputs.shape
        all_numbers = jnp.asarray(row_numbers(recipe.rows, accumulation, micro_rows, row_shards))
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def micro(inputs: Array, targets: Array, weights: Array, numbers: Array) -> tuple[Array, Any]:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, numbers) if dropout else None
            compute = jax.value_and_grad(losses, has_aux=True)
            (value, _), gradients = compute(state.parameters, inputs, targets, weights, keys)
            return value, gradients

        def add(total: tuple[Array, Any], part: tuple[Array, ...]) -> tuple[tuple[Array, Any], None]:
            return jax.tree.map(jnp.add, total, micro(*part)), None

        parts = (batch.inputs, batch.targets, batch.weights, all_numbers)
        if accumulation == 1:  # no loop, which XLA would remove, and no gradients added to zeros
            return micro(*(part[0] for part in parts))
        zero = (jnp.zeros((), batch.weights.dtype), jax.tree.map(jnp.zeros_like, state.parameters))
        return jax.lax.scan(add, zero, parts)[0]

    return sums
