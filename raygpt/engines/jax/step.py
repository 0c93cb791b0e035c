"""One training step: gradients of a batch in micro-batches, clipped, applied; and the scoring of rows.

Whatever the mesh and the accumulation, the numbers are those of one device that computes the batch at once: sums are
divided by the global count of tokens, padding rows weigh nothing, and dropout knows only seed, step and row.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from raygpt.config import Recipe
from raygpt.engines.jax.attention import Attention
from raygpt.engines.jax.loss import chunk_count_on, cross_entropy, grades
from raygpt.engines.jax.model import GPT, Layers
from raygpt.engines.jax.scaling import Scale
from raygpt.engines.jax.sharding import constrain_residual, gather_tables
from raygpt.engines.jax.spikes import Spikes

Array = jax.Array
Losses = Callable[..., tuple[Array, Array]]


class State(NamedTuple):
    """Everything that a step changes."""

    parameters: Any
    optimizer: Any
    step: Array
    scale: Scale  # used in fp16 alone, but there in every state: a run may go on where there is bf16
    spikes: Spikes


class Batch(NamedTuple):
    """A batch on the devices, cut into micro-batches."""

    inputs: Array  # int32 [accumulation, rows, time]
    targets: Array
    weights: Array  # [accumulation, rows]: 1, or 0 for rows that only fill up


class Metrics(NamedTuple):
    """What a step reports, still on the device."""

    loss: Array
    grad_norm: Array  # before clipping
    lr: Array
    skipped: Array  # steps that were left out so far
    spikes: Array  # steps that were far off so far


def make_losses(graph: Any, attention: Attention, mesh: Mesh, vocab: int, layers: Layers) -> Losses:
    """The forward pass: (parameters, inputs, targets, weights, dropout's keys) to the weighted sum of the rows' losses
    and each row's, a row's loss being the sum over its tokens."""
    compute = make_forward(graph, attention, mesh, layers)

    def losses(
        parameters: Any, inputs: Array, targets: Array, weights: Array, keys: Array | None = None
    ) -> tuple[Array, Array]:
        hidden, table, chunks, shards = compute(parameters, inputs, keys)
        return cross_entropy(hidden, table, targets, weights, vocab, chunks, shards)

    return losses


def make_grade(
    graph: Any, attention: Attention, mesh: Mesh, vocab: int, layers: Layers
) -> Callable[[Any, Array, Array], tuple[Array, Array]]:
    """The function to compile: (parameters, inputs, targets) [rows, time] to each target's log-probability, and
    whether it is the likeliest."""
    compute = make_forward(graph, attention, mesh, layers)

    def grade(parameters: Any, inputs: Array, targets: Array) -> tuple[Array, Array]:
        hidden, table, chunks, shards = compute(parameters, inputs, None)
        return grades(hidden, table, targets, vocab, chunks, shards)

    return grade


def make_forward(graph: Any, attention: Attention, mesh: Mesh, layers: Layers) -> Callable[..., Any]:
    """(parameters, inputs, dropout's keys) to the last hidden state, the table that makes logits of it, into how many
    chunks to cut that, and over how many devices rows and time are shared out."""

    def forward(parameters: Any, inputs: Array, keys: Array | None) -> tuple[Array, Array, int, tuple[int, int]]:
        model: GPT = nnx.merge(graph, gather_tables(mesh, parameters))
        hidden = model(inputs, attention, keys, layers=layers, constrain=partial(constrain_residual, mesh))
        axes, table = mesh.shape, model.table
        shards = axes["data"] * axes["fsdp"], axes["context"]
        own = inputs.size // prod(shards), len(table) // axes["tensor"]
        return hidden, table, chunk_count_on(mesh.devices.flat[0].platform, *own), shards

    return forward


def make_step(
    recipe: Recipe,
    losses: Losses,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    scaled: bool = False,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function to compile: (state, batch) to (state, metrics). `scaled` is for fp16."""
    training, tokens = recipe.training, recipe.training.batch_tokens
    guarded = scaled or "skip" in (training.on_nan, training.on_spike)
    sums = make_sums(recipe, losses)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        factor = state.scale.factor if scaled else jnp.ones((), batch.weights.dtype)
        totals = sums(state, batch._replace(weights=batch.weights * factor))
        # Divided here and not in the loss: a 500,000th of a token's gradient is zero in fp16.
        loss, gradients = jax.tree.map(lambda total: total / (tokens * factor), totals)
        norm, rate = optax.tree.norm(gradients), jnp.asarray(learning_rate(state.step))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        good, spikes = finite if scaled or training.on_nan == "skip" else jnp.ones((), bool), state.spikes
        if training.on_spike != "ignore":
            is_spike, spikes = spikes.look(loss, norm, training.spike_sigmas)
            good &= ~is_spike if training.on_spike == "skip" else True

        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, optax.tree.scale(-rate, updates))
        after = State(parameters, optimizer_state, state.step + 1, state.scale, spikes)
        if guarded:  # on the device: the host need not wait to know
            stay = state._replace(step=after.step, spikes=spikes)
            after = jax.tree.map(partial(jnp.where, good), after, stay)
        if scaled:
            after = after._replace(scale=state.scale.after(finite))
        skipped = after.step - optax.tree.get(after.optimizer, "count", default=after.step)
        return after, Metrics(loss, norm, rate, skipped.astype(loss.dtype), spikes.found.astype(loss.dtype))

    return step


def make_sums(recipe: Recipe, losses: Losses) -> Callable[[State, Batch], tuple[Array, Any]]:
    """(state, batch) to the weighted sum of all rows' losses and its gradients, one micro-batch after another."""
    seed, dropout = recipe.training.seed, recipe.model.dropout > 0

    def sums(state: State, batch: Batch) -> tuple[Array, Any]:
        accumulation, micro_rows, _ = batch.inputs.shape
        row_numbers = jnp.arange(accumulation * micro_rows).reshape(accumulation, micro_rows)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def micro(one: Batch, numbers: Array) -> tuple[Array, Any]:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, numbers) if dropout else None
            (value, _), gradients = jax.value_and_grad(losses, has_aux=True)(state.parameters, *one, keys)
            return value, gradients

        def add(total: tuple[Array, Any], part: tuple[Batch, Array]) -> tuple[tuple[Array, Any], None]:
            return jax.tree.map(jnp.add, total, micro(*part)), None

        if accumulation == 1:  # no loop, which XLA would remove, and no gradients added to zeros
            return micro(*jax.tree.map(lambda x: x[0], (batch, row_numbers)))
        zero = (jnp.zeros((), batch.weights.dtype), jax.tree.map(jnp.zeros_like, state.parameters))
        return jax.lax.scan(add, zero, (batch, row_numbers))[0]

    return sums


def make_score(losses: Losses) -> Callable[[Any, Array, Array], Array]:
    """The function to compile: (parameters, inputs, targets) [rows, time] to the loss of each row, a mean over time."""

    def score(parameters: Any, inputs: Array, targets: Array) -> Array:
        return losses(parameters, inputs, targets, jnp.zeros(len(inputs)))[1] / inputs.shape[1]

    return score
