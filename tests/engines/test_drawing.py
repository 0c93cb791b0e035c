"""Tokens drawn from logits: they follow the softmax, each row by its own seed and limits, alike in every library."""

import numpy as np
import pytest

from raygpt.engines import drawing
from raygpt.engines.base import Rows

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -2.0, 0.5], dtype=np.float32)


def rows(count, temperature=1.0, top_k=0, top_p=1.0, seeds=None):
    whole, floats = np.zeros(count, np.int32), np.ones(count, np.float32)
    seeds = np.arange(count, dtype=np.int32) if seeds is None else seeds
    return Rows(whole, whole > 0, seeds, whole + 3, floats * temperature, whole + top_k, floats * np.float32(top_p))


def drawn(logits, of, xp=np):
    put = (lambda array: xp.from_numpy(array)) if xp.__name__ == "torch" else xp.asarray
    on = Rows(*map(put, of))
    scaled = drawing.scale(put(logits), 0, on.temperatures, xp)
    least = drawing.smallest_of_top_k(scaled, on.top_ks, xp)
    least = drawing.smallest_of_top_p(scaled, least, on.top_ps, xp)
    return np.asarray(drawing.pick(scaled, least, on, xp))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "probabilities"),
    [
        (1.0, 0, 1.0, softmax(LOGITS)),
        (1.0, 100, 1.0, softmax(LOGITS)),
        (0.5, 0, 1.0, softmax(2 * LOGITS)),
        (1.0, 3, 1.0, softmax(np.where(LOGITS >= 0.5, LOGITS, -np.inf))),
        (1.0, 0, 0.7, softmax(np.where(LOGITS >= 1.0, LOGITS, -np.inf))),  # 0.54 + 0.20 reach it
        (1.0, 3, 0.8, softmax(np.where(LOGITS >= 1.0, LOGITS, -np.inf))),  # 0.63 + 0.23 of those three
        (2.0, 2, 1.0, softmax(np.where(LOGITS >= 1.0, LOGITS / 2, -np.inf))),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(temperature, top_k, top_p, probabilities):
    found = drawn(np.tile(LOGITS, (20000, 1)), rows(20000, temperature, top_k, top_p))
    counts, possible = np.bincount(found, minlength=6), probabilities > 0
    assert not counts[~possible].any()
    expected = 20000 * probabilities[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: once in 1000


def test_draws_of_a_seed_differ_from_token_to_token():
    of = rows(20000, seeds=np.zeros(20000, np.int32))._replace(counts=np.arange(20000, dtype=np.int32))
    counts = np.bincount(drawn(np.tile(LOGITS, (20000, 1)), of), minlength=6)
    expected = 20000 * softmax(LOGITS)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.parametrize("top_k", [1, 2, 7, 100])
def test_the_smallest_that_top_k_keeps_is_the_kth_of_the_sorted(top_k):
    scaled = np.random.default_rng(1).normal(size=(5, 100)).astype(np.float32) * 1e3
    scaled[0, :3] = [-np.inf, np.inf, 0.0]
    least = drawing.smallest_of_top_k(scaled, np.full(5, top_k, np.int32), np)
    np.testing.assert_array_equal(least, drawing.rank(np.sort(scaled)[:, -top_k], np))


def test_a_temperature_of_zero_takes_the_likeliest_that_the_bias_leaves():
    scaled = drawing.scale(LOGITS[None], np.array([[-100.0, 0, 0, 0, 0, 0]], np.float32), np.zeros(1), np)
    least = np.full(1, drawing.LOWEST, np.int32)
    assert drawing.pick(scaled.astype(np.float32), least, rows(1, temperature=0), np).tolist() == [1]


@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_every_library_draws_the_same(library):
    xp = pytest.importorskip(library)
    logits = np.random.default_rng(0).normal(size=(40, 300)).astype(np.float32)
    of = rows(40, 0.8, 50, 0.9)
    np.testing.assert_array_equal(drawn(logits, of, xp), drawn(logits, of))
