"""One training step: gradients of a batch in micro-batches, clipped, applied; and the scoring of rows.

Whatever the mesh and the accumulation, the numbers are those of one device that computes the batch at once: sums are
divided by the global count of tokens, padding rows weigh nothing, and dropout knows only seed, step and row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from raygpt.config import Recipe
from raygpt.engines.jax.attention import Attention
from raygpt.engines.jax.loss import chunk_count, cross_entropy
from raygpt.engines.jax.model import GPT, padded_vocab

Array = jax.Array


class State(NamedTuple):
    """Everything that a step changes."""

    parameters: Any
    optimizer: Any
    step: Array


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


def make_step(
    recipe: Recipe,
    graph: Any,
    optimizer: optax.GradientTransformation,
    attention: Attention,
    constrain: Callable[[Array], Array],
    vocab: int,
    learning_rate: optax.Schedule,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function to compile: (state, batch) to (state, metrics)."""
    tokens, context = recipe.training.batch_tokens, recipe.model.context
    seed, dropout = recipe.training.seed, recipe.model.dropout > 0

    def loss(parameters: Any, inputs: Array, targets: Array, weights: Array, keys: Array | None) -> Array:
        model: GPT = nnx.merge(graph, parameters)
        hidden = model(inputs, attention, keys, constrain=constrain)
        chunks = chunk_count(inputs.size, context, padded_vocab(vocab))
        return cross_entropy(hidden, model.table, targets, weights, vocab, chunks)[0]

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        accumulation, micro_rows, _ = batch.inputs.shape
        row_numbers = jnp.arange(accumulation * micro_rows).reshape(accumulation, micro_rows)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def micro(total: tuple[Array, Any], part: tuple[Batch, Array]) -> tuple[tuple[Array, Any], None]:
            one, numbers = part
            keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, numbers) if dropout else None
            value = jax.value_and_grad(loss)(state.parameters, one.inputs, one.targets, one.weights, keys)
            return jax.tree.map(jnp.add, total, value), None

        zero = (jnp.zeros((), batch.weights.dtype), jax.tree.map(jnp.zeros_like, state.parameters))
        sums, _ = jax.lax.scan(micro, zero, (batch, row_numbers))
        # Divided here and not in the loss: a 500,000th of a token's gradient is zero in fp16.
        value, gradients = jax.tree.map(lambda total: total / tokens, sums)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        metrics = Metrics(value, optax.tree.norm(gradients), jnp.asarray(learning_rate(state.step)))
        return State(parameters, optimizer_state, state.step + 1), metrics

    return step


def make_score(
    graph: Any, attention: Attention, constrain: Callable[[Array], Array], vocab: int
) -> Callable[[Any, Array, Array], Array]:
    """The function to compile: (parameters, inputs, targets) [rows, time] to the loss of each row, a mean over time."""

    def score(parameters: Any, inputs: Array, targets: Array) -> Array:
        model: GPT = nnx.merge(graph, parameters)
        hidden = model(inputs, attention, constrain=constrain)
        chunks = chunk_count(inputs.size, inputs.shape[1], padded_vocab(vocab))
        weights = jnp.zeros(len(inputs), jnp.promote_types(hidden.dtype, jnp.float32))
        return cross_entropy(hidden, model.table, targets, weights, vocab, chunks)[1] / inputs.shape[1]

    return score
