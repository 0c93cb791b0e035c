"""Fits L(N, D) = E + ((A / N^a)^p + (B / (D - S)^b)^p)^(1/p) to the losses of a ladder, with its uncertainty.

Residuals are relative; those of rungs far from the run count less, and large ones by their size, not its square
(Huber), so that one bad rung does not decide. A ladder has few rungs, so the powers, the floor E for each byte of text
and S have priors: what 29 runs of `tiny`'s family and 8 of modern-124m's agree on (benchmarks/LOG.md). The uncertainty
is that of the losses and of the priors: the fit is repeated with losses that vary by their noise, and other priors.

The same priors say beforehand how well a ladder would predict: `expected_error`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raygpt.planning.loss import MISFIT, TERMS, Law, Measured, doublings, law_loss

P, OTHER_P = 2.5, (2.0, 3.5)
POWERS, POWERS_SPREAD = np.array([0.11, 0.16]), np.array([0.04, 0.05])  # a and b
FLOOR, FLOOR_SPREAD = 0.35, 0.3  # nats of a byte of text, and the spread of its logarithm
OFFSET = 120.0  # steps: the standard deviation of S, whose prior is half of a normal distribution
MOST_OFFSET = 0.85  # of the shortest rung: the most that S can be
SAMPLES = 200
USUAL_NOISE = 0.004  # between seeds of one small run, relative; residuals of a few rungs may be smaller by chance
OUTLIER = 3.0  # times the noise: from here on a residual counts by its size
LEAST_FREEDOM = 1.0
# The prior of a run whose loss is 1: its floor, what size and text add to it, and their powers.
RUN = np.array([0.35, 0.5, POWERS[0], 0.5, POWERS[1]])
RUN_SPREAD = np.array([FLOOR_SPREAD * 0.35, 0.3, POWERS_SPREAD[0], 0.3, POWERS_SPREAD[1]])
Array = NDArray[np.float64]


class Goal(NamedTuple):
    """The run whose loss is to be known."""

    parameters: int
    tokens: int
    step_tokens: int  # of one of its steps, and of its rungs'
    bytes_per_token: float


def fit_law(rungs: Sequence[Measured], name: str, goal: Goal, count: int = SAMPLES) -> Law:
    """Fit the rungs of a ladder of this name, and again `count` times with other losses and priors."""
    sizes, tokens, losses = (
        np.array([float(getattr(rung, key)) for rung in rungs]) for key in ("parameters", "tokens", "loss")
    )
    middle = _Scale(float(np.exp(np.log(sizes).mean())), float(np.exp(np.log(tokens).mean())))
    floor = min(FLOOR * goal.bytes_per_token, 0.9 * float(losses.min()))
    usual = _Prior(floor, POWERS, 0.0, P)
    noises = _noise(sizes / goal.parameters, tokens / goal.tokens)
    fit = _Fit(sizes / middle.parameters, tokens / middle.tokens, goal.step_tokens / middle.tokens, noises)
    whole = fit.run(losses, usual)
    residuals = np.log(losses) - np.log(fit.losses(whole))
    freedom = max(LEAST_FREEDOM, len(rungs) - 3.0)  # of six terms, three have narrow priors
    times = max(1.0, float(np.sqrt(((residuals / noises) ** 2).sum() / freedom)))  # the expected noise
    random, samples = np.random.default_rng(0), []
    for _ in range(count):
        varied = losses * (1 + times * noises * random.standard_normal(len(rungs)))
        samples.append(middle.terms(fit.run(varied, usual.varied(random), whole)))
    terms = dict(zip(TERMS, middle.terms(whole), strict=True))
    return Law(terms, np.array(samples), times * USUAL_NOISE, tuple(rungs), name)


@dataclass(frozen=True)
class _Prior:
    """What is known of a law before any rung."""

    floor: float
    powers: Array
    offset: float  # steps
    p: float

    def varied(self, random: np.random.Generator) -> "_Prior":
        """Another one that is as good."""
        floor = self.floor * float(np.exp(FLOOR_SPREAD * random.standard_normal()))
        powers = np.maximum(random.normal(self.powers, POWERS_SPREAD), 0.02)
        return _Prior(floor, powers, OFFSET * float(random.standard_normal()), random.uniform(*OTHER_P))


@dataclass(frozen=True)
class _Scale:
    """Sizes and tokens are measured from here: terms at the middle of the ladder depend less on each other."""

    parameters: float
    tokens: float

    def terms(self, found: Array) -> list[float]:
        """E, A, a, B, b, S, p in plain units."""
        floor, of_size, a, of_tokens, b, offset, p = (float(value) for value in found)
        return [floor, of_size * self.parameters**a, a, of_tokens * self.tokens**b, b, offset * self.tokens, p]


@dataclass(frozen=True)
class _Fit:
    """Rungs, measured from their middle, the tokens of a step, and what is expected of the rungs' residuals."""

    sizes: Array
    tokens: Array
    step: float
    noises: Array

    def losses(self, found: Array) -> Array:
        return law_loss(found, self.sizes, self.tokens)

    def run(self, losses: Array, prior: _Prior, start: Array | None = None) -> Array:
        """The terms that fit these losses best."""
        from scipy.optimize import least_squares

        lowest, spread = float(losses.min()), OFFSET * self.step

        def residuals(found: Array) -> Array:
            relative = (np.log(self.losses(np.append(found, prior.p))) - np.log(losses)) / self.noises
            floor = np.log(found[0] / prior.floor) / FLOOR_SPREAD
            offset = found[5] / spread - prior.offset / OFFSET
            return np.concatenate([relative, (found[[2, 4]] - prior.powers) / POWERS_SPREAD, [floor, offset]])

        a, b = POWERS
        first = [0.4 * lowest, 0.5 * lowest, a, 0.5 * lowest, b, 0.1 * spread] if start is None else start[:6]
        most = [0.999 * lowest, 10 * lowest, 1.0, 10 * lowest, 1.0, MOST_OFFSET * self.tokens.min()]
        bounds = [1e-3 * lowest, 1e-6, 0.01, 1e-6, 0.01, 0.0], most
        inside = np.clip(first, np.array(bounds[0]) + 1e-9, np.array(bounds[1]) - 1e-9)
        units = [1, 1, 0.1, 1, 0.1, spread]
        found = least_squares(residuals, inside, bounds=bounds, loss="huber", f_scale=OUTLIER, x_scale=units).x
        return np.append(found, prior.p)


def expected_error(information: Sequence[Array], step: float) -> float:
    """The relative standard deviation of a run's prediction from rungs that say this much each. `step` is a
    step's share of the run's tokens."""
    known = sum(information, np.diag(np.append(RUN_SPREAD, OFFSET * step) ** -2.0))
    slope = _slope(1.0, 1.0, step)
    return float(np.sqrt(slope @ np.linalg.solve(known, slope)))


def information_of(size: float, tokens: float, step: float) -> Array:
    """What a rung says of the law's terms: [6, 6]. Its size and tokens are measured from the run's; the farther it is,
    the less it says."""
    slope = _slope(size, tokens, step)
    return np.asarray(np.outer(slope, slope) / _noise(size, tokens) ** 2)


def _noise(size: float | Array, tokens: float | Array) -> Array:
    """The relative noise of a rung's loss around the run's law. Its size and tokens are measured from the run's."""
    noise: Array = np.hypot(USUAL_NOISE, MISFIT * doublings(size, tokens))
    return noise


def _slope(size: float, tokens: float, step: float) -> Array:
    """How the logarithm of a loss depends on the law's terms."""
    middle = np.append(RUN, 0.5 * OFFSET * step)
    change = 1e-4 * np.diag([1, 1, 1, 1, 1, OFFSET * step])
    ends = [np.log(law_loss([*(middle + sign * one), P], size, tokens)) for one in change for sign in (1, -1)]
    return np.asarray(np.diff(np.array(ends).reshape(6, 2)[:, ::-1], axis=1)[:, 0] / (2 * change.sum(1)))
