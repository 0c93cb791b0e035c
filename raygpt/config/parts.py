"""What the parts of a recipe have in common: number types, strictness, and how errors quote a value."""

import re
from enum import Enum
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SEEDS = 2**32  # the range that NumPy, JAX and PyTorch all accept


def _not_bool(value: object) -> object:
    """Python's True is also 1; as text it is refused like any other word."""
    return str(value) if isinstance(value, bool) else value


Integer = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class May(Enum):
    """What a key's value may do, e.g. Annotated[Integer, May.CHANGE]; by default neither."""

    CHANGE = "when a run is resumed: where it runs, what is logged, how a step is computed"
    DIFFER = "from the run that another one starts from: its weights fit anyway"


class Part(BaseModel):
    """A group of keys. Unknown keys are errors; a part without keys (`training:`) is all defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, value: object) -> object:
        return {} if value is None else value


def refuse_credentials(key: str, address: str) -> None:
    """Refuse a password in an address: a recipe is written into its run, where everyone can read it."""
    if re.match(r"[a-z0-9+.-]+://[^/]*@", address, re.IGNORECASE):
        where = address.split("@", 1)[0].split("://")[0]
        raise ValueError(
            f"{key}: an address with a password in it would be written into the run; write {where}://BUCKET/…, and "
            "give the credentials by environment variables or your cloud's profile"
        )


def multiples_around(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`, without zero: '896 or 1024'."""
    below = number // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def no_effect(key: str, value: object, default: object, beside: str, remedy: str) -> str:
    """The line with which a key is refused that changes nothing beside others: what to write for it to have an effect,
    and its default."""
    return f"{key}: {written(value)} has no effect with {beside}; write {remedy}, or leave {key} at {written(default)}"


def written(value: object) -> str:
    """A number or a word as YAML has it: true, 10000."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def shown(value: object) -> str:
    """A value as an error quotes it: short, and on one line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
