"""Runs several evaluations of one model, by name."""

from collections.abc import Callable, Mapping, Sequence

from raygpt.errors import RaygptError
from raygpt.evaluation import tasks, validation
from raygpt.evaluation.tasks import TASKS, Figures
from raygpt.inference.loaded import LoadedModel

VALIDATION = "validation"
Chosen = Mapping[str, str | None]  # name -> file of its items, if one was named


def choose(names: Sequence[str]) -> Chosen:
    """["hellaswag=items.jsonl"] -> {"hellaswag": "items.jsonl"}; refuses unknown names."""
    known, seen = [VALIDATION, *TASKS], set()
    for name, equals, path in (word.partition("=") for word in names):
        if name not in known or (equals and (name == VALIDATION or not path)):
            raise RaygptError(f"--task {name}{equals}{path}: write {', '.join(known)}, or e.g. lambada=FILE.jsonl")
        if name in seen:
            raise RaygptError(f"--task {name}: is given twice; leave one out")
        seen.add(name)
    return tasks.choose(names)


def evaluate(
    loaded: LoadedModel,
    chosen: Chosen,
    limit: int | None = None,
    watch: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Figures]:
    """The result of each, by name. `watch` is called with the progress."""
    results = {}
    for name, path in chosen.items():

        def report(done: int, total: int, name: str = name) -> None:
            watch(name, done, total)

        if name == VALIDATION:
            results[name] = validation.validate(loaded, report)
        else:
            results[name] = tasks.evaluate(loaded, name, tasks.read_items(name, path, limit), report)
    return results
