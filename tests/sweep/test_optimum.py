"""The fitted optimum, against losses of a known law."""

import math

import numpy as np
import pytest

from raygpt.sweep.optimum import Compared, fit
from raygpt.sweep.values import Axis

RATES = Axis("optimizer.learning_rate", tuple(f"{0.0025 * 2**n:g}" for n in range(8)))
KINDS = Axis("schedule.kind", ("wsd", "cosine"))
STAGES = ((0.15, 8), (0.4, 4), (1.0, 2))


def sweep(random, optimum, noise=0.0, drift=0.3, kinds=()):
    """Losses of three rounds; the optimum of a short run is higher by a power of its length."""
    compared, left = [], [(rate, kind) for rate in RATES.values for kind in kinds or ("wsd",)]
    for number, (fraction, _) in enumerate(STAGES):
        at = math.log10(optimum) - drift * math.log10(fraction)
        losses = {}
        for rate, kind in left:
            bowl = 0.8 * (math.log10(float(rate)) - at) ** 2
            losses[rate, kind] = 4 / fraction**0.2 + bowl + 0.2 * (kind == "cosine") + noise * random.standard_normal()
        for (rate, kind), loss in losses.items():
            compared.append(Compared(rate, {RATES.key: rate, KINDS.key: kind}, number, fraction, loss))
        kept = STAGES[number + 1][1] if number < 2 else 0
        left = sorted(losses, key=losses.get)[: kept * max(1, len(kinds))]
    return compared


def test_the_optimum_at_the_full_length_is_found_although_it_moves_with_the_length():
    (found,) = fit(sweep(np.random.default_rng(0), 0.021), [RATES]).optima
    assert found.value == pytest.approx(0.021, rel=1e-6)
    assert found.curve[1] == pytest.approx(0.8, rel=1e-6)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random, hits, widths = np.random.default_rng(1), [], []
    for _ in range(200):
        optimum = 0.02 * 2 ** random.uniform(-1, 1)
        for found in fit(sweep(random, optimum, noise=0.01), [RATES]).optima:
            hits.append(found.low <= optimum <= found.high)
            widths.append(math.log2(found.high / found.low))
    assert len(hits) > 180
    assert np.mean(hits) >= 0.9
    assert np.median(widths) < 3  # doublings: it says something


def test_a_key_that_matters_is_told_from_one_that_does_not():
    random = np.random.default_rng(2)
    compared = sweep(random, 0.02, noise=0.01, kinds=("wsd", "cosine"))
    rate, kind = fit(compared, [RATES, KINDS]).effects
    assert rate.is_clear
    assert kind.is_clear
    assert kind.best == "wsd"
    assert kind.loss == pytest.approx(0.2, abs=0.02)
    noise_alone = [Compared(one.trial, one.values, one.round, one.fraction, random.normal(4, 0.01)) for one in compared]
    assert not any(effect.is_clear for effect in fit(noise_alone, [RATES, KINDS]).effects)


def test_whether_a_key_matters_is_unknown_where_the_noise_is():
    two = [Compared(value, {RATES.key: value}, 0, 1.0, loss) for value, loss in (("0.01", 3.0), ("0.02", 5.0))]
    assert [effect.is_clear for effect in fit(two, [RATES]).effects] == [None]


def test_losses_that_only_fall_have_no_optimum_and_a_diverged_trial_is_left_out():
    falling = [Compared(rate, {RATES.key: rate}, 0, 1.0, 5 - n**0.9) for n, rate in enumerate(RATES.values)]
    assert fit(falling, [RATES]).optima == ()
    bowl = [Compared(rate, {RATES.key: rate}, 0, 1.0, 4 + (n - 3) ** 2) for n, rate in enumerate(RATES.values)]
    bowl[-1] = Compared(RATES.values[-1], {RATES.key: RATES.values[-1]}, 0, 1.0, math.inf)
    (found,) = fit(bowl, [RATES]).optima
    assert found.value == pytest.approx(0.02, rel=1e-6)
