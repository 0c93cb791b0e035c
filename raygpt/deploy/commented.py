"""YAML with comments: a tree of plain values in which `Noted` says why a value is there.

>>> print(to_yaml({"replicas": Noted("one pod for each worker", 4)}))
# one pod for each worker
replicas: 4
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import yaml


@dataclass(frozen=True)
class Noted:
    """A value and the reason for it."""

    why: str
    value: Any


def plain(tree: Any) -> Any:
    """The tree without its notes, as a YAML parser returns it."""
    match tree:
        case Noted():
            return plain(tree.value)
        case dict():
            return {key: plain(value) for key, value in tree.items()}
        case list():
            return [plain(value) for value in tree]
    return tree


def notes(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, why) of every note, in the order of the file: ("spec.rayClusterSpec.authOptions", "only pods …")."""
    match tree:
        case Noted():
            yield path, tree.why
            yield from notes(tree.value, path)
        case dict():
            for key, value in tree.items():
                yield from notes(value, f"{path}.{key}" if path else key)
        case list():
            for number, value in enumerate(tree):
                yield from notes(value, f"{path}[{number}]")


def to_yaml(tree: Any) -> str:
    """The tree as YAML, each note as a comment above its key."""
    return "\n".join(_lines(tree)) + "\n"


def _lines(tree: Any) -> Iterator[str]:
    if isinstance(tree, list):
        for item in tree:
            lines = ["|", *item.splitlines()] if isinstance(item, str) and "\n" in item else list(_lines(item))
            comments = list(takewhile(lambda line: line.startswith("#"), lines))  # values that begin so are quoted
            first, *rest = lines[len(comments) :]
            yield from comments
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    elif isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _entry(key, value)
    else:
        yield _scalar(tree)


def _entry(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Noted):
        yield f"# {value.why}"
        value = value.value
    if isinstance(value, str) and "\n" in value:
        yield f"{_scalar(key)}: |"
        yield from (f"  {line}" for line in value.splitlines())
    elif isinstance(value, dict | list) and value:
        yield f"{_scalar(key)}:"
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{_scalar(key)}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
