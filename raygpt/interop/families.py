"""Which class of transformers a model is exported to, and which one a config.json names."""

from collections.abc import Mapping
from typing import Any

from raygpt.config import Model
from raygpt.errors import RaygptError
from raygpt.formatting import value_text
from raygpt.interop import gpt2, llama, nanochat, qwen3
from raygpt.interop.family import Family

FAMILIES = {family.model_type: family for family in (gpt2.FAMILY, llama.FAMILY, qwen3.FAMILY, nanochat.FAMILY)}
INSTEAD = "raygpt generate and raygpt eval read the run as it is"


def family_of(model: Model) -> Family:
    """The first class that computes what the model does; a refusal names the keys that are in the way."""
    misfits = {family: family.misfits(family.widened(model)) for family in FAMILIES.values()}
    for family, keys in misfits.items():
        if not keys:
            return family
    nearest = min(misfits, key=lambda family: len(misfits[family]))
    nowhere = [key for key in misfits[nearest] if all(key in keys for keys in misfits.values())]
    if nowhere:
        it = "it" if len(nowhere) == 1 else "them"
        raise RaygptError(f"{_listed(model, nowhere)}: no class of transformers has {it}; {INSTEAD}")
    raise RaygptError(
        f"{_listed(model, list(misfits[nearest]))}: no class of transformers has this together with the model's other "
        f"keys, not even the nearest, {nearest.name}; {INSTEAD}"
    )


def family_named(settings: Mapping[str, Any]) -> Family:
    """The family of a config.json, whose keys all have values that we compute."""
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise RaygptError(f"is a model of type {kind}, which raygpt does not have; name one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for key, allowed in {**family.required, "quantization_config": (None,)}.items():
        value = settings.get(key, allowed[0])
        if value not in allowed:
            raise RaygptError(
                f"{key} is {value_text(value)}, and raygpt's {family.name} has {value_text(allowed[0])}; "
                "name another model"
            )
    return family


def _listed(model: Model, keys: list[str]) -> str:
    return ", ".join(f"model.{key} {value_text(getattr(model, key))}" for key in keys)
