"""Lengths in epochs as steps, once it is known how much text there is."""

import math

from pydantic import ValidationError

from raygpt.config import Recipe
from raygpt.config.training import STEPS
from raygpt.errors import RaygptError
from raygpt.recipes.explain import explain_first


def in_steps(recipe: Recipe, windows: int) -> Recipe:
    """The recipe with epochs converted to steps; an epoch is as many steps as it takes to see all windows."""
    training = recipe.training
    if not windows:
        raise RaygptError(
            f"data.source: has fewer tokens than a window of {recipe.model.context + 1}; set model.context lower, or "
            "use more text"
        )
    epoch = -(-windows // recipe.rows)
    steps = training.steps if training.epochs is None else _steps_in(training.epochs, epoch)
    lengths = {"steps": steps, "epochs": None}
    lengths |= {key: epoch for key in ("eval_every", "checkpoint_every") if getattr(training, key) == "epoch"}
    try:
        return Recipe.model_validate(dict(recipe) | {"training": training.model_copy(update=lengths)})
    except ValidationError as error:  # a warm-up longer than the run
        raise RaygptError(explain_first(error)) from None


def _steps_in(epochs: float, epoch: int) -> int:
    if epochs * epoch > STEPS - 1:
        raise RaygptError(
            f"training.epochs: {epochs:g} of {epoch:,} steps are more than {STEPS - 1:,} steps; write fewer"
        )
    return math.ceil(epochs * epoch)
