"""AdamW from a recipe, by Optax, with its state in named slots."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from raygpt.config import Recipe
from raygpt.models import Description

Array = jax.Array
Tree = dict[str, Array]  # by parameter
Slots = dict[str, Tree]


class Optimizer(NamedTuple):
    """Computes updates from gradients."""

    init: Callable[[Tree], Slots]  # parameters to slots before the first step
    update: Callable[[Tree, Tree, Slots, Array], tuple[Tree, Slots]]
    """(gradients, parameters, slots, updates so far) to what the rate is multiplied by, and the slots after it."""


def make_optimizer(recipe: Recipe, description: Description) -> Optimizer:
    """Clip by the global norm where asked for, then AdamW at a rate of -1.

    The step applies the rate: a skipped step is not counted as an update here, but it does count for the rate.
    """
    settings = recipe.optimizer
    clip = optax.identity() if settings.clip is None else optax.clip_by_global_norm(settings.clip)
    adam = optax.scale_by_adam(b1=settings.betas[0], b2=settings.betas[1], eps=settings.epsilon)
    decays = {p.name: settings.decay == "all" or not p.is_vector for p in description.parameters}
    decay = optax.add_decayed_weights(settings.weight_decay, decays)

    def init(parameters: Tree) -> Slots:
        return {slot: jax.tree.map(jnp.zeros_like, parameters) for slot in ("means", "squares")}

    def update(gradients: Tree, parameters: Tree, slots: Slots, updates: Array) -> tuple[Tree, Slots]:
        gradients, _ = clip.update(gradients, clip.init(parameters))
        before = optax.ScaleByAdamState(updates, slots["means"], slots["squares"])
        direction, after = adam.update(gradients, before)
        direction, _ = decay.update(direction, decay.init(parameters), parameters)
        return direction, {"means": after.mu, "squares": after.nu}

    return Optimizer(init, update)


def learning_rate(recipe: Recipe) -> Callable[[Array], Array]:
    """The rate of the step after a number of steps."""
    peak, schedule, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    return lambda step: peak * schedule.fraction(step, steps, jnp)
