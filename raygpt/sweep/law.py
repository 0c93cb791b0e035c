"""Fits L(N, D) = E + A / N^a + B / D^b to the losses of a ladder, with its uncertainty.

Residuals are relative, and large ones count by their size, not its square (Huber), so that one bad rung does not
decide. A ladder is short and has few rungs, which leave the powers open: they are drawn towards 0.35 ± 0.07, where
published laws have them. The uncertainty is that of the rungs and of this assumption: the fit is repeated with
rungs drawn at random from those that there are, and with the powers drawn towards random values of that spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raygpt.planning.loss import TERMS, Law, Measured

POWER, SPREAD = 0.35, 0.07  # of a and b in published laws: 0.34 and 0.28 (Hoffmann), 0.35 and 0.37 (Besiroglu)
SAMPLES = 200
USUAL_NOISE = 0.004  # between seeds of one small run, relative; residuals of a few rungs may be smaller by chance
OUTLIER = 3.0  # times the noise: from here on a residual counts by its size
LEAST_FREEDOM = 1.0
Array = NDArray[np.float64]


def fit_law(rungs: Sequence[Measured], name: str, count: int = SAMPLES) -> Law:
    """Fit the rungs of a ladder of this name, and again `count` times rungs that are drawn from them."""
    sizes, tokens, losses = (
        np.array([float(getattr(rung, name)) for rung in rungs]) for name in ("parameters", "tokens", "loss")
    )
    middle = _Scale(float(np.exp(np.log(sizes).mean())), float(np.exp(np.log(tokens).mean())))
    whole = _fit(sizes, tokens, losses, middle, (POWER, POWER))
    residuals = np.log(losses) - np.log(_losses(whole, sizes, tokens, middle))
    freedom = max(LEAST_FREEDOM, len(rungs) - 4.0)  # of five terms, the two powers are half assumed
    scatter = float(np.sqrt((residuals**2).sum() / freedom))
    noise = max(USUAL_NOISE, scatter, _misses(sizes, tokens, losses, middle, whole))
    random = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        drawn = random.integers(0, len(rungs), len(rungs))
        powers = random.normal(POWER, SPREAD, 2)
        found = _fit(sizes[drawn], tokens[drawn], losses[drawn], middle, (powers[0], powers[1]), whole)
        samples.append(_terms(found, middle))
    terms = dict(zip(TERMS, _terms(whole, middle), strict=True))
    return Law(terms, np.array(samples), noise, tuple(rungs), name)


def _misses(sizes: Array, tokens: Array, losses: Array, middle: "_Scale", whole: Array) -> float:
    """How far the law is off, relatively, where it has to predict a rung: the largest, and the longest, from the
    others. Residuals are smaller where there are hardly more rungs than terms."""
    errors = []
    for out in {int(np.argmax(sizes * tokens**0.01)), int(np.argmax(tokens * sizes**0.01))}:
        rest = np.arange(len(sizes)) != out
        found = _fit(sizes[rest], tokens[rest], losses[rest], middle, (POWER, POWER), whole)
        errors.append(float(_losses(found, sizes[[out]], tokens[[out]], middle)[0] / losses[out]) - 1)
    return float(np.sqrt(np.mean(np.square(errors))))


@dataclass(frozen=True)
class _Scale:
    """Sizes and tokens are measured from here: terms at the middle of the ladder depend less on each other."""

    parameters: float
    tokens: float


def _losses(found: Array, sizes: Array, tokens: Array, middle: _Scale) -> Array:
    floor, of_size, a, of_tokens, b = found
    terms = of_size * (sizes / middle.parameters) ** -a + of_tokens * (tokens / middle.tokens) ** -b
    return np.asarray(floor + terms)


def _terms(found: Array, middle: _Scale) -> list[float]:
    """E, A, a, B, b in plain units."""
    floor, of_size, a, of_tokens, b = (float(value) for value in found)
    return [floor, of_size * middle.parameters**a, a, of_tokens * middle.tokens**b, b]


def _fit(
    sizes: Array, tokens: Array, losses: Array, middle: _Scale, powers: tuple[float, float], start: Array | None = None
) -> Array:
    """The terms, measured from the middle, that fit the losses best."""
    from scipy.optimize import least_squares

    lowest = float(losses.min())

    def residuals(found: Array) -> Array:
        relative = (np.log(_losses(found, sizes, tokens, middle)) - np.log(losses)) / USUAL_NOISE
        assumed = (np.array([found[2], found[4]]) - powers) / SPREAD
        return np.concatenate([relative, assumed])

    first = [0.4 * lowest, 0.3 * lowest, POWER, 0.3 * lowest, POWER] if start is None else start
    bounds = ([0, 1e-6, 0.02, 1e-6, 0.02], [lowest, 10 * lowest, 1.5, 10 * lowest, 1.5])
    inside = np.clip(first, np.array(bounds[0]) + 1e-9, np.array(bounds[1]) - 1e-9)
    return np.asarray(least_squares(residuals, inside, bounds=bounds, loss="huber", f_scale=OUTLIER).x)
