"""Fits L(N, D) = E + ((A / N^a)^p + (B / D^b)^p)^(1/p) to the losses of a ladder, with its uncertainty.

Residuals are relative, and large ones count by their size, not its square (Huber), so that one bad rung does not
decide. A ladder has few rungs, which leave p and the powers open: p is 4, and the powers are drawn towards 0.17 ± 0.06.
Both are what a table of 26 runs of `tiny`'s family has (benchmarks/LOG.md). The uncertainty is that of the losses and
of these assumptions: the fit is repeated with losses that vary by their noise, other powers, and a p of 3 to 5.5.

The same assumptions say beforehand how well a ladder would predict: `expected_error`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raygpt.planning.loss import TERMS, Law, Measured, law_loss

P, OTHER_P = 4.0, (3.0, 5.5)
POWER, SPREAD = 0.17, 0.06  # of a and b
SAMPLES = 200
USUAL_NOISE = 0.004  # between seeds of one small run, relative; residuals of a few rungs may be smaller by chance
MISFIT = 0.002  # by which a loss may be off the law, relative, for each doubling between a rung and the run
OUTLIER = 3.0  # times the noise: from here on a residual counts by its size
LEAST_FREEDOM = 1.0
# What is assumed of a run before any rung: its loss is 1, of which the floor and the two terms have these parts.
ASSUMED, ASSUMED_SPREAD = np.array([0.4, 0.5, POWER, 0.5, POWER]), np.array([0.3, 0.3, SPREAD, 0.3, SPREAD])
Array = NDArray[np.float64]


def fit_law(rungs: Sequence[Measured], name: str, count: int = SAMPLES) -> Law:
    """Fit the rungs of a ladder of this name, and again `count` times with other losses and assumptions."""
    sizes, tokens, losses = (
        np.array([float(getattr(rung, key)) for rung in rungs]) for key in ("parameters", "tokens", "loss")
    )
    middle = _Scale(float(np.exp(np.log(sizes).mean())), float(np.exp(np.log(tokens).mean())))
    fit = _Fit(sizes / middle.parameters, tokens / middle.tokens)
    whole = fit.run(losses)
    residuals = np.log(losses) - np.log(fit.losses(whole))
    freedom = max(LEAST_FREEDOM, len(rungs) - 4.0)  # of five terms, the two powers are half assumed
    noise = max(USUAL_NOISE, float(np.sqrt((residuals**2).sum() / freedom)))
    random, samples = np.random.default_rng(0), []
    for _ in range(count):
        varied = losses * (1 + noise * random.standard_normal(len(rungs)))
        powers, p = random.normal(POWER, SPREAD, 2), random.uniform(*OTHER_P)
        samples.append(middle.terms(fit.run(varied, powers, p, whole[:5])))
    return Law(dict(zip(TERMS, middle.terms(whole), strict=True)), np.array(samples), noise, tuple(rungs), name)


@dataclass(frozen=True)
class _Scale:
    """Sizes and tokens are measured from here: terms at the middle of the ladder depend less on each other."""

    parameters: float
    tokens: float

    def terms(self, found: Array) -> list[float]:
        """E, A, a, B, b, p in plain units."""
        floor, of_size, a, of_tokens, b, p = (float(value) for value in found)
        return [floor, of_size * self.parameters**a, a, of_tokens * self.tokens**b, b, p]


@dataclass(frozen=True)
class _Fit:
    """Rungs, measured from their middle."""

    sizes: Array
    tokens: Array

    def losses(self, found: Array) -> Array:
        return law_loss(found, self.sizes, self.tokens)

    def run(
        self, losses: Array, powers: Sequence[float] | Array = (POWER, POWER), p: float = P, start: Array | None = None
    ) -> Array:
        """The terms that fit these losses best."""
        from scipy.optimize import least_squares

        lowest = float(losses.min())

        def residuals(found: Array) -> Array:
            relative = (np.log(self.losses(np.append(found, p))) - np.log(losses)) / USUAL_NOISE
            return np.concatenate([relative, (found[[2, 4]] - powers) / SPREAD])

        first = [0.4 * lowest, 0.5 * lowest, POWER, 0.5 * lowest, POWER] if start is None else start
        bounds = ([0, 1e-6, 0.02, 1e-6, 0.02], [lowest, 10 * lowest, 1.5, 10 * lowest, 1.5])
        inside = np.clip(first, np.array(bounds[0]) + 1e-9, np.array(bounds[1]) - 1e-9)
        found = least_squares(residuals, inside, bounds=bounds, loss="huber", f_scale=OUTLIER).x
        return np.append(found, p)


def expected_error(information: Iterable[Array]) -> float:
    """The relative standard deviation of a run's prediction from rungs that say this much each."""
    known = sum(information, np.diag(ASSUMED_SPREAD**-2.0))
    slope = _slope(1.0, 1.0)
    return float(np.sqrt(slope @ np.linalg.solve(known, slope)))


def information_of(size: float, tokens: float) -> Array:
    """What a rung says of the law's terms: [5, 5]. Its size and tokens are measured from the run's; the farther it is,
    the less it says."""
    noise = np.hypot(USUAL_NOISE, MISFIT * np.hypot(np.log2(size), np.log2(tokens)))
    slope = _slope(size, tokens)
    return np.asarray(np.outer(slope, slope) / noise**2)


def _slope(size: float, tokens: float) -> Array:
    """How the logarithm of a loss depends on the law's terms."""
    step = 1e-4 * np.eye(5)
    ends = [np.log(law_loss([*(ASSUMED + sign * one), P], size, tokens)) for one in step for sign in (1, -1)]
    return np.diff(np.array(ends).reshape(5, 2)[:, ::-1], axis=1)[:, 0] / 2e-4
