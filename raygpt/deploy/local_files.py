"""Which files of this machine a recipe names: a cluster does not see them."""

from raygpt.config import Recipe
from raygpt.corpus.sources import is_path
from raygpt.storage import is_remote


def local_files(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, path) of every file or folder that is named by a path."""
    named = [("data.source", source.source) for source in recipe.data.sources]
    if isinstance(recipe.data.val, str):
        named.append(("data.val", recipe.data.val))
    if "/" in recipe.data.tokenizer or recipe.data.tokenizer.endswith(".json"):
        named.append(("data.tokenizer", recipe.data.tokenizer))
    named += [("training.eval_tasks", task.partition("=")[2]) for task in recipe.training.eval_tasks if "=" in task]
    if recipe.run.start_from and "/" in recipe.run.start_from:
        named.append(("run.start_from", recipe.run.start_from))
    return [(key, name.removeprefix("wikitext:")) for key, name in named if not _is_elsewhere(name)]


def _is_elsewhere(name: str) -> bool:
    """Whether every machine finds it: a dataset by name, the standard library, an address."""
    return not is_path(name) or is_remote(name)
