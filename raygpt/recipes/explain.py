"""Descriptions of a recipe's keys, and validation errors in one line: the key, what is wrong, what to write."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from raygpt.config import Part, Recipe, shown

# Names from nanoGPT and other trainers, for the hint in an error only: none of them is accepted.
OTHER_NAMES = {
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "n_embd": "model.width",
    "block_size": "model.context",
    "seq_len": "model.context",
    "dtype": "model.precision",
    "dataset": "data.source",
    "vocab_size": "data.tokenizer",
    "lr": "optimizer.learning_rate",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "grad_clip": "optimizer.clip",
    "min_lr": "schedule.end",
    "decay_lr": "schedule.kind",
    "lr_decay_iters": "training.steps",
    "warmup_iters": "schedule.warmup_steps",
    "max_iters": "training.steps",
    "max_steps": "training.steps",
    "max_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "batch_size": "training.batch_tokens",
    "gradient_accumulation_steps": "training.batch_tokens",
    "log_interval": "training.log_every",
    "eval_interval": "training.eval_every",
    "eval_iters": "training.eval_rows",
    "device": "cluster.accelerator",
    "num_workers": "cluster.workers",
    "out_dir": "run.storage",
    "init_from": "run.start_from",
    "wandb_log": "track.wandb",
    "wandb_project": "track.wandb",
    "wandb_run_name": "run.name",
    "backend": "engine",
}

_WRONG = {
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_parsing_size": "is too large",
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "bool_type": "is not true or false",
    "bool_parsing": "is not true or false",
    "string_type": "is not text",
    "tuple_type": "is not a list",
    "too_long": "has too many items",
    "string_too_short": "is empty",
    "model_type": "is not a mapping of keys",
}


@dataclass(frozen=True)
class Key:
    """One key of a recipe, as its comment in the YAML describes it."""

    name: str  # dotted
    type: str
    default: str
    description: str


def keys() -> list[Key]:
    """Every key of a recipe, in order."""
    return _keys_of(Recipe, "")


def _keys_of(part: type[Part], prefix: str) -> list[Key]:
    found: list[Key] = []
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Part):
            found += _keys_of(kind, f"{prefix}{name}.")
        else:
            said = next((extra for extra in field.metadata if isinstance(extra, str)), None)
            type_text = said or _type_text(kind)
            found.append(Key(prefix + name, type_text, _value_text(field.default), field.description or ""))
    return found


def _type_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(_type_text(option) for option in get_args(kind))
    if get_origin(kind) is Annotated:
        return _type_text(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"[{', '.join(_type_text(item) for item in get_args(kind))}]"
    return {str: "text", type(None): "null"}.get(kind) or str(kind.__name__)


def _value_text(value: object) -> str:
    """As one would write it in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def explain_first(error: ValidationError) -> str:
    # A misspelt key comes first: it may be why another is missing.
    first, *others = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    more = f" (and {len(others)} more)" if others else ""
    return one_line(_explain(first)) + more


def _explain(detail: ErrorDetails) -> str:
    path = detail["loc"]
    if path[:2] == ("data", "source"):
        path = path[:2] + path[3:]  # without pydantic's tag, 'one' or 'mixture'
    key = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, path)))
    kind, value = detail["type"], detail["input"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        unknown = next(iter(flat({key: value})))
        return f"unknown key {shown(unknown)}; {_hint(unknown)}"
    if kind == "missing":
        return f"{key} is missing; {_example(key)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        meant = nearest(str(value), choices)
        remedy = f"did you mean {meant!r}?" if meant else _example(key)
        return f"{key}: {shown(value)} is none of {', '.join(choices)}; {remedy}"
    wrong = _WRONG.get(kind) or detail["msg"].replace("Input should", "should")
    return f"{key}: {shown(value)} {wrong}; {_example(key)}"


def _example(key: str) -> str:
    """What to write for a key: its default, which is always right."""
    name = re.sub(r"\[\d+\]$", "", key)
    defaults = {known.name: known.default for known in keys()}
    if key.startswith("data.source["):
        return "write e.g. data.source: [{source: stdlib, weight: 1}]"
    return f"write e.g. {name}: {defaults[name]}" if name in defaults else "write its keys below it, indented"


def _hint(unknown: str) -> str:
    """The key that was meant: by its name in other trainers, its name in another part, or a near name."""
    if unknown.startswith("data.source["):
        return "a text of a mixture has the keys source and weight"
    known = [key.name for key in keys()]
    last = unknown.split(".")[-1]
    namesakes = [key for key in known if key.split(".")[-1] == last]
    meant = (
        OTHER_NAMES.get(last)
        or nearest(unknown, namesakes, cutoff=0)
        or nearest(unknown, [*Recipe.model_fields, *known])
    )
    if meant and unknown.startswith(f"{meant}."):  # like no key of that part
        names = (key.removeprefix(f"{meant}.") for key in known if key.startswith(f"{meant}."))
        return f"the keys of {meant} are {', '.join(names)}"
    if meant:
        return f"did you mean {meant!r}?"
    return f"the parts of a recipe are {', '.join(Recipe.model_fields)}"


def explain_option(option: str) -> str:
    """Why `--max_iters=5`, as other programs have it, is refused, and how it is written here: training.steps=5."""
    name, _, value = option.lstrip("-").partition("=")
    known = [key.name for key in keys()]
    same = next((key for key in known if name in (key, key.split(".")[-1])), None)
    meant = OTHER_NAMES.get(name.replace("-", "_")) or same
    example = f"e.g. {meant}={value or '…'}" if meant else "e.g. training.steps=20"
    return f"{option.partition('=')[0]}: is no option, `--help` lists them; a key is written without dashes, {example}"


def nearest(word: str, options: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The option most similar to a word, else the first that starts with it."""
    close = difflib.get_close_matches(word, options, n=1, cutoff=cutoff)
    beginning = [option for option in options if word and option.startswith(word)]
    return next(iter(close + beginning), None)


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    dotted: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            dotted |= flat(value, f"{prefix}{key}.")
        else:
            dotted[f"{prefix}{key}"] = str(value) if isinstance(value, Path) else value
    return dotted


def one_line(text: object) -> str:
    return " ".join(str(text).split())
