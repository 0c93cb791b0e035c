"""raygpt: pre-training of language models on Ray Train.

import raygpt

result = raygpt.train("tiny", **{"training.steps": 100})
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from collections.abc import Callable

    from raygpt.training.ray.launch import Result


def train(recipe: str, **overrides: Any) -> "Result":
    """Run a shipped recipe or a YAML file; overrides are dotted keys or whole parts, e.g. `training={"steps": 100}`."""
    import logging

    from raygpt.recipes import load_recipe
    from raygpt.training.prepared import check
    from raygpt.training.ray import launch

    loaded = load_recipe(recipe, overrides, logging.getLogger("raygpt").warning)
    check(loaded)
    with launch.on_cluster(loaded):
        return launch.train(launch.prepare_run(loaded))


def run(function: "Callable[..., None]", config: dict[str, Any] | None = None, **options: Any) -> "Result":
    """Run a JAX or PyTorch function on the same workers; see `raygpt.training.ray.function.run`."""
    from raygpt.training.ray import function as user_function

    return user_function.run(function, config, **options)
