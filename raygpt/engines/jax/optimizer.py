"""AdamW and the learning rate, from a recipe, in Optax."""

from typing import Any

import jax
import optax

from raygpt.config import Recipe

DECAYED = ("kernel", "embedding")  # matrices; the rest are biases and the scales of norms


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clip by the global norm where asked for, then AdamW at a rate of -1.

    The rate is the step's and applied there: a step that is left out does not count here, but it does for the rate.
    """
    settings = recipe.optimizer
    # Their states have one structure, whatever the settings: a run that begins with another's state may change them.
    return optax.chain(
        optax.identity() if settings.clip is None else optax.clip_by_global_norm(settings.clip),
        optax.scale_by_adam(b1=settings.betas[0], b2=settings.betas[1], eps=settings.epsilon),
        optax.add_decayed_weights(settings.weight_decay, _matrices if settings.decay == "matrices" else _everything),
    )


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """The rate of step n. Warm-up rises to the full rate at step `warmup_steps`; no step has a rate of zero."""
    peak, plan, steps = recipe.optimizer.learning_rate, recipe.schedule, recipe.steps
    rest = max(1, steps - plan.warmup_steps)
    falling = max(1, round(plan.decay_share * steps))
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=plan.end),
        "linear": optax.linear_schedule(peak, peak * plan.end, rest),
        "wsd": optax.linear_schedule(peak, peak * plan.end, falling, transition_begin=rest - falling),
    }[plan.kind]
    if not plan.warmup_steps:
        return after
    rising = optax.linear_schedule(peak / (plan.warmup_steps + 1), peak, plan.warmup_steps)
    return optax.join_schedules([rising, after], [plan.warmup_steps])


def _matrices(parameters: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(part, "key", None) in DECAYED for part in path), parameters
    )


def _everything(parameters: Any) -> Any:
    return jax.tree.map(lambda _: True, parameters)
