"""raygpt: GPT-2-style language-model pre-training on Ray Train.

import raygpt

result = raygpt.train("tiny", **{"training.steps": 100})
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raygpt.training.launch import Result

__version__ = "0.1.0"


def train(recipe: str, **overrides: Any) -> "Result":
    """Run a shipped recipe or a YAML file; overrides are dotted keys or whole parts, e.g. `training={"steps": 100}`."""
    from raygpt.recipes import load_recipe
    from raygpt.training import launch

    return launch.train(launch.prepare_run(load_recipe(recipe, overrides)))
