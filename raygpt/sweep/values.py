"""The values that a sweep tries, as the command line writes them.

optimizer.learning_rate=1e-3,2e-3,4e-3     these
optimizer.learning_rate=log:1e-3..1e-1     each about twice the last: log:1e-3..1e-1:5 has five
model.dropout=0..0.2:3                     evenly spaced: 0, 0.1, 0.2
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raygpt.config import May, keys_with, shown
from raygpt.errors import RaygptError
from raygpt.recipes import read_override

EVENLY = 5  # values of a range that does not say how many
DIGITS = 3  # of a value of a range, where so few tell its values apart
MOST_DIGITS = 16  # that numbers have
MOST_VALUES, MOST_TRIALS = 100, 1000
LONGEST_NAME = 100  # of a trial; that of a run has 128 characters, and a fork's has its step behind it
NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
RANGE = re.compile(rf"(log:)?({NUMBER})\.\.({NUMBER})(?::([0-9]+))?")
# Losses on other text cannot be compared; the other keys do not change a loss.
FIXED = ("data.", "run.", *keys_with(May.CHANGE))


@dataclass(frozen=True)
class Axis:
    """A key and the values that are tried, as text."""

    key: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last word of the key, for names of runs: learning_rate."""
        return self.key.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Trial:
    """A value for each key that is swept."""

    name: str
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        """The values as the command line writes them."""
        return [f"{key}={value}" for key, value in self.values.items()]


def divide(words: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """The keys to sweep, sorted, as trials are named by them in this order; and the other overrides."""
    axes, overrides = list[Axis](), list[str]()
    for word in words:
        key, _, text = (piece.strip() for piece in word.partition("="))
        values = _values(key, text)
        if len(values) < 2:
            overrides.append(word)
        elif key in [axis.key for axis in axes]:
            raise RaygptError(f"{key}: is given twice; write all its values in one list")
        else:
            axes.append(Axis(key, values))
    fixed = {word.partition("=")[0].strip() for word in overrides}
    if twice := [axis.key for axis in axes if axis.key in fixed]:
        raise RaygptError(f"{twice[0]}: is given twice, with several values and with one; leave one of the two out")
    return sorted(axes, key=lambda axis: axis.key), overrides


def trials_of(axes: Sequence[Axis]) -> list[Trial]:
    """Every combination of the values."""
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        raise RaygptError(f"sweep: {count:,} combinations are too many; write fewer values")
    trials = []
    for values in itertools.product(*(axis.values for axis in axes)):
        names = [_plain(f"{axis.name}-{value}") for axis, value in zip(axes, values, strict=True)]
        trials.append(Trial("_".join(names), {axis.key: value for axis, value in zip(axes, values, strict=True)}))
    if not _can_be_runs(
        {trial.name for trial in trials}, count
    ):  # e.g. values of punctuation alone, which have no names
        trials = [replace(trial, name=f"trial-{n}") for n, trial in enumerate(trials, 1)]
    return trials


def fork_name(trial: str, step: int) -> str:
    """The run that continues a trial from a step with a falling rate."""
    return f"{trial}.{step}"


def _can_be_runs(names: set[str], count: int) -> bool:
    """Whether each trial has a name of its own that is not too long and that no fork of another trial can have."""
    if len(names) < count or max(map(len, names)) > LONGEST_NAME:
        return False
    halves = (name.rpartition(".") for name in names)
    return not any(step.isdecimal() and trial in names for trial, _, step in halves)


def number_of(text: str) -> float | None:
    """A value as a number, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


def _values(key: str, text: str) -> tuple[str, ...]:
    """The values of a key that can be swept; none for another key, one where there is nothing to sweep."""
    if key.startswith(FIXED):
        if text.startswith("log:"):
            raise not_swept(key)
        return ()
    if found := RANGE.fullmatch(text):
        return _spread(key, found)
    if text.startswith("log:"):
        raise RaygptError(f"{key}: {shown(text)} is no range; write e.g. log:1e-3..1e-1, or log:1e-3..1e-1:5 for five")
    values = [piece.strip() for piece in re.split(r",(?![^\[{]*[\]}])", text)]
    if len(values) > 1 and len({str(_parsed(read_override(value, key))) for value in values}) < len(values):
        raise RaygptError(f"{key}: {shown(text)} has a value twice; write each once")
    return tuple(values)


def not_swept(key: str) -> RaygptError:
    """Of a key that is no axis of a sweep."""
    return RaygptError(f"{key}: is not swept, as it says where or how a run works, or what it reads, not how it learns")


def _parsed(value: Any) -> Any:
    """A value with its texts as numbers where they are some: 1 and 1.0 are one value."""
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    if isinstance(value, dict):
        return {key: _parsed(item) for key, item in value.items()}
    return typed(value) if isinstance(value, str) else value


def _spread(key: str, found: re.Match[str]) -> tuple[str, ...]:
    """The values of a range, from the first to the last."""
    text, is_log, low, high = found[0], bool(found[1]), float(found[2]), float(found[3])
    if not math.isfinite(high - low):
        raise RaygptError(f"{key}: {shown(text)} reaches beyond the largest number, 1.8e308; write ends nearer to 0")
    if low >= high or (is_log and low <= 0):
        above = "log: needs two numbers above 0, the lower first" if is_log else "the lower number comes first"
        raise RaygptError(f"{key}: {shown(text)} is no range; {above}, e.g. log:1e-3..1e-1 or 0..0.2:3")
    number = _count(key, found, low, high)
    is_whole = found[2].isdecimal() and found[3].isdecimal()
    values = _between(low, high, number, is_log)
    texts = _whole(values) if is_whole else _distinct(values)
    if len(texts) < number and not is_whole:
        raise RaygptError(f"{key}: {shown(text)} is too narrow for {number} different values; write a wider range")
    if len(texts) < number and found[4]:
        fewer = next(n for n in range(number - 1, 1, -1) if len(_whole(_between(low, high, n, is_log))) == n)
        fitting = f"{text.removesuffix(found[4])}{fewer}"
        raise RaygptError(f"{key}: {shown(text)} rounds to only {len(texts)} whole numbers; write {fitting}")
    return texts


def _between(low: float, high: float, number: int, is_log: bool) -> list[float]:
    """So many values from the first to the last, evenly spaced."""
    shares = [n / (number - 1) for n in range(number - 1)]
    return [*(low ** (1 - share) * high**share if is_log else low + (high - low) * share for share in shares), high]


def _count(key: str, found: re.Match[str], low: float, high: float) -> int:
    """How many values a range has."""
    text, count = found[0], found[4]
    plain = text.removesuffix(f":{count}") if count else text
    doublings = math.log2(high) - math.log2(low) if found[1] else 0.0
    if found[1] and not count and doublings < 0.5:  # so low that doubling has no second value
        raise RaygptError(f"{key}: {shown(text)} is less than a doubling; write how many values, e.g. {plain}:5")
    number = int(count[:9]) if count else round(doublings) + 1 if found[1] else EVENLY
    if not 2 <= number <= MOST_VALUES:
        values = "value" if number == 1 else "values"
        raise RaygptError(
            f"{key}: {shown(text)} has {number:,} {values}; write 2 to {MOST_VALUES}, e.g. {shown(plain + ':5')}"
        )
    return number


def _whole(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{value:.0f}" for value in values))


def _distinct(values: Sequence[float]) -> tuple[str, ...]:
    """With as many digits as tell them apart, and then one more, so that they stay evenly spaced."""
    for digits in range(DIGITS, MOST_DIGITS):
        if len({f"{value:.{digits}g}" for value in values}) == len(values):
            digits += digits > DIGITS
            break
    return tuple(dict.fromkeys(f"{value:.{digits}g}" for value in values))


def _plain(text: str) -> str:
    """Without characters that a run's name cannot have."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


def typed(text: str) -> Any:
    """A value as a number where it is one, for JSON."""
    number = number_of(text)
    return text if number is None else number
