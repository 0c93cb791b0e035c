"""The best value of each key with its interval, and which keys matter: parabolas through the losses of a sweep.

In every round the loss is a level of that round plus a parabola in each key, over its logarithm where the values span
more than a factor of three. The vertex may move with the length of the runs that are compared. All of this is linear in
its coefficients, so it is fitted at once, to trials near the best ones: far away a loss is no parabola.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raygpt.sweep.values import Axis, number_of

NEAR = 2  # places on a key's list of values between a trial and the best one of its round
LOG_FROM = 3.0  # the factor between lowest and highest value from which a key is fitted over its logarithm
CONFIDENCE = 0.95
CLEARLY = 3.0  # standard deviations between values of a key that matters
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """A loss of a trial: in which round, and after which fraction of the trial's steps."""

    trial: str
    values: Mapping[str, str]
    round: int
    fraction: float
    loss: float


@dataclass(frozen=True)
class Optimum:
    """The vertex of a key's parabola at the full length. The interval is None where there are too few trials."""

    key: str
    value: float
    low: float | None
    high: float | None
    is_log: bool
    curve: tuple[float, float]  # vertex on the fitted scale, and curvature: loss rises by curvature · (x - vertex)²


@dataclass(frozen=True)
class Effect:
    """How much a key matters: the mean loss of its worst value above that of its best, in the first round."""

    key: str
    best: str
    loss: float
    is_clear: bool | None  # None where the noise is unknown


@dataclass(frozen=True)
class Fit:
    """What the losses say."""

    optima: tuple[Optimum, ...]
    effects: tuple[Effect, ...]
    noise: float | None  # standard deviation of losses around the parabolas


def fit(compared: Sequence[Compared], axes: Sequence[Axis]) -> Fit:
    """Fit the losses of all rounds."""
    sound = [one for one in compared if math.isfinite(one.loss)]
    near = [one for one in sound if _is_near(one, sound, axes)]
    numeric = [axis for axis in axes if _numbers(axis) and len({one.values[axis.key] for one in near}) >= 3]
    solved = _solve(near, numeric)
    noise = solved.noise if solved else None
    optima = [_optimum(axis, n, solved) for n, axis in enumerate(numeric)] if solved else []
    return Fit(tuple(one for one in optima if one), tuple(_effect(axis, sound, noise) for axis in axes), noise)


def place(axis: Axis, value: float) -> float:
    """Where a value is on the scale on which its key is fitted and drawn."""
    return math.log10(value) if is_log(axis) else value


def is_log(axis: Axis) -> bool:
    numbers = _numbers(axis)
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) > LOG_FROM


def _numbers(axis: Axis) -> list[float]:
    """The values as numbers; none if one of them is no number."""
    numbers = [number_of(value) for value in axis.values]
    return [number for number in numbers if number is not None] if None not in numbers else []


def _is_near(one: Compared, compared: Sequence[Compared], axes: Sequence[Axis]) -> bool:
    """Whether a trial is near the best of its round in every key that has an order."""
    best = min((other for other in compared if other.round == one.round), key=lambda other: other.loss)
    for axis in axes:
        if numbers := _numbers(axis):
            order = sorted(range(len(numbers)), key=numbers.__getitem__)
            ranks = [order.index(axis.values.index(trial.values[axis.key])) for trial in (one, best)]
            if abs(ranks[0] - ranks[1]) > NEAR:
                return False
    return True


@dataclass(frozen=True)
class _Solved:
    """Coefficients of the keys, two for each, as far as they can be told apart. A third, of x · log of the fraction, is
    fitted beside them and not kept."""

    coefficients: Array  # [keys, 2]: of x and x²
    covariance: Array | None  # [keys, 2, 2]; None without a degree of freedom
    freedom: int
    noise: float | None
    centres: Array  # [keys]: x is measured from here


def _solve(near: Sequence[Compared], axes: Sequence[Axis]) -> _Solved | None:
    """Least squares; None if the trials do not determine the parabolas."""
    if not axes or not near:
        return None
    rounds = sorted({one.round for one in near})
    levels = np.array([[float(one.round == number) for number in rounds] for one in near])
    x = np.array([[place(axis, float(one.values[axis.key])) for axis in axes] for one in near])
    centres = x.mean(0)
    x -= centres
    length = np.log([one.fraction for one in near])[:, None]
    columns = np.concatenate([levels, x, x**2], axis=1)
    drift = np.concatenate([columns, x * length], axis=1)
    if len(rounds) > 1 and np.linalg.matrix_rank(drift) == drift.shape[1] < len(near):
        columns = drift
    if np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    losses = np.array([one.loss for one in near])
    found = np.linalg.lstsq(columns, losses, rcond=None)[0]
    freedom, first, count = len(near) - columns.shape[1], len(rounds), len(axes)
    places = np.array([[first + n, first + count + n] for n in range(count)])
    if not freedom:
        return _Solved(found[places], None, 0, None, centres)
    noise = math.sqrt(float(((losses - columns @ found) ** 2).sum()) / freedom)
    covariance = noise**2 * np.linalg.inv(columns.T @ columns)
    return _Solved(found[places], np.array([covariance[np.ix_(p, p)] for p in places]), freedom, noise, centres)


def _optimum(axis: Axis, n: int, solved: _Solved) -> Optimum | None:
    """The vertex of a key's parabola; None if it has no clear minimum between the lowest and the highest value."""
    slope, curvature = (float(value) for value in solved.coefficients[n])
    if curvature <= 0:
        return None
    vertex = float(solved.centres[n]) - slope / (2 * curvature)
    ends = [place(axis, number) for number in (min(_numbers(axis)), max(_numbers(axis)))]
    if not ends[0] <= vertex <= ends[1]:
        return None
    back = (lambda at: 10.0 ** min(at, 300.0)) if is_log(axis) else float
    low, high = None, None
    if solved.covariance is not None:
        covariance = solved.covariance[n]
        if curvature < math.sqrt(covariance[1, 1]):
            return None
        gradient = np.array([-1 / (2 * curvature), slope / (2 * curvature**2)])
        error = math.sqrt(float(gradient @ covariance @ gradient)) * _quantile(solved.freedom)
        low, high = back(vertex - error), back(vertex + error)
    return Optimum(axis.key, back(vertex), low, high, is_log(axis), (vertex, curvature))


def _quantile(freedom: int) -> float:
    """How many standard errors the interval reaches on either side: Student's t."""
    from scipy.stats import t  # 0.3 s to import

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))


def _effect(axis: Axis, compared: Sequence[Compared], noise: float | None) -> Effect:
    """From the first round, in which every value was tried with every value of the other keys."""
    losses: dict[str, list[float]] = {}
    for one in compared:
        if one.round == min(other.round for other in compared):
            losses.setdefault(one.values[axis.key], []).append(one.loss)
    means = {value: float(np.mean(found)) for value, found in losses.items()}
    best = min(means, key=means.__getitem__)
    difference = max(means.values()) - means[best]
    each = min(len(found) for found in losses.values())
    is_clear = None if noise is None else difference > CLEARLY * noise * math.sqrt(2 / each)
    return Effect(axis.key, best, difference, is_clear)
