"""The recipes that come with raygpt, and how a recipe is read: from one of these or a file, with overrides."""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from raygpt import storage
from raygpt.config import FAMILY_KEYS, PRESETS, SIZE_KEYS, Optimizer, Recipe, Schedule, shown
from raygpt.errors import RaygptError
from raygpt.recipes.explain import explain_first, explain_option, flat, nearest, one_line


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    note: Callable[[str], None] = lambda text: None,
) -> Recipe:
    """The shipped recipe of this name, or the file at this path, with overrides such as `training.steps=20`.

    From Python, overrides may also be a mapping, nested or dotted. Raises RaygptError with one line. `note` gets a
    line if a key of the file had to follow an override.
    """
    name = str(name_or_path)
    where = f"recipe {name!r}"
    values = _parse_file(_read(name), where)
    changes = _changes(overrides)
    values = _without_replaced(values, changes)
    steps_before = values.get("training.steps")
    values |= changes
    if values.get("run.name") is None and not values.get("run"):
        values["run.name"] = run_name(name)
    is_shortened = "training.steps" in changes and not {"schedule", "schedule.warmup_steps"} & set(changes)
    if is_shortened and (warmup := _fitting_warmup(values, steps_before, where)) is not None:
        before, values["schedule.warmup_steps"] = values["schedule.warmup_steps"], warmup
        note(f"schedule.warmup_steps: {warmup} instead of {before}, to fit training.steps {values['training.steps']}")
    recipe = _validate(values, where)
    if recipe.reason_not_to_start:
        raise RaygptError(f"{where}: {recipe.reason_not_to_start}")
    return recipe


def read_recipe(path: str) -> Recipe:
    """The recipe of a run, which an earlier version may have written: with settings that `load_recipe` refuses."""
    where = f"recipe {path!r}"
    return _validate(_parse_file(_read(path), where), where)


def _without_replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A file's keys without those that it has for another model, optimizer, schedule or length than the overrides'."""
    replaced: set[str] = set()
    # The file's keys would override those of another preset or depth. Its context stays, and its depth for a family.
    for change, keys in (("depth", SIZE_KEYS), ("preset", (*SIZE_KEYS, *FAMILY_KEYS))):
        if changes.get(f"model.{change}") is not None:
            replaced |= {f"model.{key}" for key in keys}
    if "layers" in PRESETS.get(str(changes.get("model.preset")), {}):
        replaced.add("model.depth")
    # The file's rates are for another optimizer, its shape for another schedule. Its warm-up stays.
    for part, kind in (("optimizer", Optimizer().kind), ("schedule", Schedule().kind)):
        before = values.get(f"{part}.kind", kind)
        if changes.get(f"{part}.kind", before) != before:
            replaced |= {key for key in values if key.startswith(f"{part}.")} - {"schedule.warmup_steps"}
    # A length in one unit replaces the file's in the other.
    for unit, other in (("training.steps", "training.epochs"), ("training.epochs", "training.steps")):
        if changes.get(unit) is not None and other not in changes:
            replaced.add(other)
    return {key: value for key, value in values.items() if key not in replaced}


def _fitting_warmup(values: Mapping[str, Any], steps_before: Any, where: str) -> int | None:
    """The warm-up of a run whose new length is too short for the file's: as large a part of it; None if it fits."""
    warmup = _whole(values.get("schedule.warmup_steps"))
    most = _validate({**values, "schedule.warmup_steps": 0}, where).longest_warmup if warmup else None
    if not warmup or most is None or warmup <= most:
        return None
    before = _whole(steps_before) or 10 * warmup  # a tenth, if the file's length is in epochs
    return min(most, warmup * int(values["training.steps"]) // before)


def _whole(value: Any) -> int | None:
    """The number that a key's text is; None if it is none."""
    return int(text) if (text := str(value)).isdecimal() else None


def _validate(values: Mapping[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(_nested(values))
    except ValidationError as error:
        raise RaygptError(f"{where}: {explain_first(error)}") from None


def check_part(part: str, values: Mapping[str, Any]) -> Any:
    """Validate one part of a recipe: `data` from a command line, `cluster` from a program."""
    try:
        return getattr(Recipe.model_validate({part: values}), part)
    except ValidationError as error:
        raise RaygptError(explain_first(error)) from None


def shipped_recipes() -> dict[str, str]:
    """Name -> one-line description (its first comment) of each recipe that comes with raygpt."""
    files = [file for file in _recipe_folder().iterdir() if file.name.endswith(".yaml")]
    texts = {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in files}
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in sorted(texts.items())}


def recipe_text(name: str) -> str:
    """The YAML of a shipped recipe, comments and all."""
    shipped = list(shipped_recipes())
    if name not in shipped:
        meant = nearest(name.lower(), shipped, cutoff=0.5)
        hint = f"did you mean {meant!r}? " if meant else ""
        raise RaygptError(f"no recipe is called {shown(name)}; {hint}`raygpt recipes` lists them; a file ends in .yaml")
    return (_recipe_folder() / f"{name}.yaml").read_text("utf-8")


def _recipe_folder() -> Traversable:
    return resources.files("raygpt") / "recipes"


def _read(name: str) -> str:
    """The YAML of that name or at that path."""
    if name.startswith("-"):
        raise RaygptError(explain_option(name))
    if re.match(r"[a-z_]+\.[a-z_.]+=", name):
        raise RaygptError(f"{shown(name)} is a key, not a recipe; write the recipe first, e.g. tiny {name}")
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        return recipe_text(name)
    try:
        return storage.read_bytes(name).decode("utf-8-sig")  # -sig: some editors write a byte-order mark
    except FileNotFoundError:
        shipped = Path(name).name.removesuffix(".yaml")
        remedy = (
            f"write {shipped} for the one that comes with raygpt" if shipped in shipped_recipes() else "check the path"
        )
        raise RaygptError(f"recipe {name!r}: there is no such file; {remedy}") from None
    except IsADirectoryError:
        raise RaygptError(f"recipe {name!r}: is a folder; name the YAML file in it") from None
    except UnicodeDecodeError:
        raise RaygptError(f"recipe {name!r}: is not UTF-8 text; save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise RaygptError(f"recipe {name!r}: cannot be read ({error}); check the path") from None


class _Loader(yaml.SafeLoader):
    """YAML whose scalars stay text, except null: the recipe's types decide what `1e-3`, `007` or `on` means."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's way to say this
        first: [(tag, pattern) for tag, pattern in pairs if tag.endswith((":null", ":merge"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":str", ":seq", ":map"))
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse duplicate keys; PyYAML would silently take the last."""
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                problem = f"{key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RaygptError(f"{where}: {place}not YAML ({one_line(error.problem)}); fix it there") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RaygptError(f"{where}: not YAML ({one_line(error)}); fix it there") from None


def _parse_file(text: str, where: str) -> dict[str, Any]:
    """A file's keys, dotted, with their values."""
    tree = _parse(text, where)
    if tree is None:
        raise RaygptError(f"{where}: is empty; begin with a copy of one that `raygpt recipes` lists")
    if not isinstance(tree, Mapping):
        raise RaygptError(f"{where}: {shown(tree)} is not a mapping of keys; write e.g. engine: jax")
    try:
        parts = [flat({key: value}) for key, value in tree.items()]
    except RecursionError:  # `model: &m {layers: *m}`
        raise RaygptError(f"{where}: a key contains itself; write its value out") from None
    values: dict[str, Any] = {}
    for part in parts:
        if twice := values.keys() & part.keys():  # `training: {steps: 5}` and `training.steps: 6`
            raise RaygptError(f"{where}: {min(twice)!r} is given twice; leave one of the two out")
        values |= part
    return values


def _changes(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides in either form as dotted key -> value."""
    if isinstance(overrides, Mapping):
        return flat(overrides)
    changes: dict[str, Any] = {}
    for item in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = (piece.strip() for piece in item.partition("="))
        if item.startswith("-"):
            raise RaygptError(explain_option(item))
        if not (key and equals):
            raise RaygptError(f"override {shown(item)}: is not key=value; write e.g. training.steps=20")
        changes |= flat({key: read_override(text, f"override {shown(item)}")})
    return changes


def read_override(text: str, where: str) -> Any:
    """A list, a mapping or quoted text is parsed as YAML; the rest is literal, so that `*.txt` is not a YAML alias."""
    if text.startswith(("[", "{", '"', "'")):
        return _parse(text, where)
    return None if text in ("", "null", "~") else text


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}; a value in the way of a later key is replaced."""
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        node = tree
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[last] = value
    return tree


def run_name(recipe: str) -> str:
    """'my recipes/Tiny 2.yaml' -> 'Tiny-2'"""
    stem = re.sub(r"\.ya?ml$", "", Path(recipe).name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".")[:128] or "run"
