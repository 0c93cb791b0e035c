"""`cluster.runtime_env`, checked by Ray's own rules before a cluster is started or a corpus prepared."""

from collections.abc import Mapping
from typing import Any

from ray.runtime_env import RuntimeEnv

from raygpt.errors import RaygptError, first_line
from raygpt.recipes.explain import nearest


def checked(env: Mapping[str, Any]) -> dict[str, Any]:
    """The environment as Ray takes it; refuses fields that Ray would ignore, and values that it cannot use."""
    known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
    for name in env:
        if name not in RuntimeEnv.known_fields:
            meant = nearest(name, known)
            hint = f"did you mean {meant!r}?" if meant else f"write one of {', '.join(known)}"
            raise RaygptError(f"cluster.runtime_env: {name!r} is no field of Ray's runtime environment; {hint}")
    typed = {name: value if name == "env_vars" else _typed(name, value) for name, value in env.items()}
    try:
        RuntimeEnv(**typed)
    except (TypeError, ValueError) as error:
        raise RaygptError(f"cluster.runtime_env: Ray refuses it ({first_line(error)}); correct it") from None
    return typed


def _typed(field: str, value: Any) -> Any:
    """A mapping with booleans, and `config` with numbers, which a recipe's YAML leaves as text."""
    if isinstance(value, Mapping):
        return {key: _typed_setting(setting, field == "config") for key, setting in value.items()}
    return value


def _typed_setting(setting: Any, may_be_number: bool) -> Any:
    if not isinstance(setting, str):
        return setting
    number = int(setting) if may_be_number and setting.removeprefix("-").isdecimal() else setting
    return {"true": True, "false": False}.get(setting, number)
