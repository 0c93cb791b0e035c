"""Whether a recipe goes on with the run that lies in its folder, and from where."""

from typing import Any

from raygpt import storage
from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.recipes.explain import flat
from raygpt.training import checkpoints

RECIPE = "recipe.yaml"
# What changes neither batches nor numbers may change between two parts of a run.
FREE = ("cluster.", "run.", "track.", "training.log_every", "training.eval_every", "training.checkpoint_every")


def check(run_folder: str, recipe: Recipe, force: bool) -> int:
    """The step that the run goes on after, 0 for a new one; refuses what would not be the same run."""
    uri = storage.join(run_folder, RECIPE)
    if not storage.exists(uri):
        return 0
    before = _values(load_recipe(uri))
    after = _values(recipe)
    longer = after["training.steps"] >= before["training.steps"]
    changed = [key for key in after if after[key] != before.get(key) and not key.startswith(FREE)]
    changed = [key for key in changed if not (key == "training.steps" and longer)]
    if changed and not force:
        differences = ", ".join(f"{key}: {before.get(key)} → {after[key]}" for key in changed)
        raise RaygptError(
            f"{run_folder} is a run of another recipe ({differences}); set run.name to begin a new one, "
            "or add --force to go on with this one all the same"
        )
    checkpoint, _ = checkpoints.newest(run_folder)
    return checkpoint.step if checkpoint else 0


def _values(recipe: Recipe) -> dict[str, Any]:
    return flat(recipe.to_dict())
