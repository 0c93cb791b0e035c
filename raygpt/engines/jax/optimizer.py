"""AdamW by Optax, and Muon, from a recipe, with their state in named slots."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from raygpt.config import Recipe
from raygpt.engines import muon
from raygpt.engines.jax.devices import DTYPES
from raygpt.engines.jax.matrices import Matrices
from raygpt.models import Description, Parameter

Array = jax.Array
Tree = dict[str, Array]  # by parameter
Slots = dict[str, Tree]


class Optimizer(NamedTuple):
    """Computes updates from gradients."""

    init: Callable[[Tree], Slots]  # parameters to slots before the first step
    update: Callable[[Tree, Tree, Slots, Array], tuple[Tree, Slots]]
    """(gradients, parameters, slots, updates so far) to what the rate is multiplied by, and the slots after it."""


def make_optimizer(recipe: Recipe, description: Description, mesh: Mesh, precision: str) -> Optimizer:
    """Clip by the global norm where asked for, then AdamW, or Muon for the matrices.

    Returns directions without the rate; the step subtracts rate × direction. A skipped step is not counted as an update
    here, but it does count for the rate.
    """
    settings = recipe.optimizer
    clip = optax.identity() if settings.clip is None else optax.clip_by_global_norm(settings.clip)
    matrices = [p for p in description.parameters if settings.kind == "muon" and p.role == "matrix"]
    parts = [_adamw(recipe, [p for p in description.parameters if p not in matrices])]
    if matrices:
        dtype = DTYPES[muon.precision_of(precision)]
        parts.append(_muon(recipe, Matrices(description, matrices, dtype, mesh)))

    def init(parameters: Tree) -> Slots:
        return _union(part.init(parameters) for part in parts)

    def update(gradients: Tree, parameters: Tree, slots: Slots, updates: Array) -> tuple[Tree, Slots]:
        gradients, _ = clip.update(gradients, clip.init(parameters))
        directions, after = zip(*(part.update(gradients, parameters, slots, updates) for part in parts), strict=True)
        return _union(directions), _union(after)

    return Optimizer(init, update)


def learning_rate(recipe: Recipe) -> Callable[[Array], Array]:
    """The rate of the step after a number of steps; with Muon, that of matrices."""
    peak, schedule, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    return lambda step: peak * schedule.fraction(step, steps, jnp)


def _adamw(recipe: Recipe, which: Sequence[Parameter]) -> Optimizer:
    """For these parameters. Beside Muon each role has a rate of its own: here, its ratio to the matrices' rate."""
    settings, width = recipe.optimizer, recipe.model.width
    adam = optax.scale_by_adam(b1=settings.betas[0], b2=settings.betas[1], eps=settings.epsilon)
    decay = optax.add_decayed_weights(settings.weight_decay, {p.name: settings.decays(p.role) for p in which})
    ratios = {p.name: settings.peak_rate(p.role, width) / settings.learning_rate for p in which}

    def init(parameters: Tree) -> Slots:
        return {slot: jax.tree.map(jnp.zeros_like, _only(which, parameters)) for slot in ("means", "squares")}

    def update(gradients: Tree, parameters: Tree, slots: Slots, updates: Array) -> tuple[Tree, Slots]:
        gradients, parameters = _only(which, gradients), _only(which, parameters)
        before = optax.ScaleByAdamState(updates, slots["means"], slots["squares"])
        direction, after = adam.update(gradients, before)
        direction, _ = decay.update(direction, decay.init(parameters), parameters)
        scaled = {name: by if ratios[name] == 1 else ratios[name] * by for name, by in direction.items()}
        return scaled, {"means": after.mu, "squares": after.nu}

    return Optimizer(init, update)


def _muon(recipe: Recipe, matrices: Matrices) -> Optimizer:
    """For the matrices: Nesterov momentum, made orthogonal."""
    settings, which = recipe.optimizer, matrices.which

    def init(parameters: Tree) -> Slots:
        return {"momentum": jax.tree.map(jnp.zeros_like, _only(which, parameters))}

    def update(gradients: Tree, parameters: Tree, slots: Slots, updates: Array) -> tuple[Tree, Slots]:
        gradients, parameters = _only(which, gradients), _only(which, parameters)
        count = updates.astype(next(iter(gradients.values())).dtype)
        running_mean = partial(muon.running_mean, decay=muon.momentum_at(settings, count))
        means = jax.tree.map(running_mean, slots["momentum"], gradients)
        direction = matrices.orthogonalise(jax.tree.map(running_mean, means, gradients))  # Nesterov's
        decayed = partial(muon.decayed, decay=settings.weight_decay, cautious=settings.cautious)
        return jax.tree.map(decayed, direction, parameters), {"momentum": means}

    return Optimizer(init, update)


def _only(which: Sequence[Parameter], tree: Tree) -> Tree:
    return {p.name: tree[p.name] for p in which if p.name in tree}


def _union(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
