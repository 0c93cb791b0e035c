"""Initial values: a function of (seed, name, index), random enough, and bit for bit the same in three libraries."""

import numpy as np
import pytest

from raygpt.config import Model
from raygpt.models import InitialValues, describe, random_numbers

UNIFORM, NORMAL = InitialValues("uniform", 0.25), InitialValues("normal", 0.02)
INDEX = np.arange(200_000, dtype=np.int32)
KEY = (np.int32(-1405937519), np.int32(77))


def with_numpy(first, index=INDEX, key=KEY):
    return random_numbers.draw(first, index, key, np)


def with_jax(first):
    jnp = pytest.importorskip("jax.numpy")
    return np.asarray(random_numbers.draw(first, jnp.asarray(INDEX), [jnp.asarray(word) for word in KEY], jnp))


def with_torch(first):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    return random_numbers.draw(first, torch.from_numpy(INDEX), [torch.tensor(word) for word in KEY], torch).numpy()


@pytest.mark.parametrize("library", [with_jax, with_torch], ids=["jax", "torch"])
def test_uniform_draws_are_the_same_bit_for_bit_and_normal_ones_to_a_millionth(library):
    np.testing.assert_array_equal(library(UNIFORM), with_numpy(UNIFORM))
    np.testing.assert_allclose(library(NORMAL), with_numpy(NORMAL), atol=1e-6 * NORMAL.size, rtol=1e-6)


def test_they_have_the_distribution_that_was_asked_for():
    uniform, normal = with_numpy(UNIFORM).astype(float), with_numpy(NORMAL)
    assert np.abs(uniform).max() < 0.25
    deciles = np.histogram(uniform, bins=10, range=(-0.25, 0.25))[0]
    assert ((deciles - 20_000) ** 2 / 20_000).sum() < 27.9  # chi-square, 9 degrees of freedom, 1 in 1,000
    assert abs(normal.mean()) < 4 * 0.02 / len(INDEX) ** 0.5
    assert normal.std() == pytest.approx(0.02, rel=4 / (2 * len(INDEX)) ** 0.5)
    within = [(np.abs(normal) < sigmas * 0.02).mean() for sigmas in (1, 2, 3)]
    assert within == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.004)
    assert 4 < np.abs(normal).max() / 0.02 < 6  # of 200,000


def test_neighbours_layers_names_and_seeds_have_nothing_to_do_with_each_other():
    parameters = describe(Model(), 100).by_name
    one = random_numbers.keys(parameters["blocks.up.kernel"], 1, 2)
    keys = [
        *one,
        *random_numbers.keys(parameters["blocks.down.kernel"], 1, 1),
        *random_numbers.keys(parameters["blocks.up.kernel"], 2, 1),
    ]
    drawn = [with_numpy(UNIFORM, key=tuple(key)) for key in keys]
    drawn += [np.roll(drawn[0], shift) for shift in (1, 2, 64, 768)]
    correlations = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlations).max() < 5 / len(INDEX) ** 0.5


def test_a_parameter_outside_the_layers_has_one_key_and_one_inside_has_one_for_each():
    parameters = describe(Model(), 100).by_name
    assert random_numbers.keys(parameters["tokens"], 1, 4).shape == (1, 2)
    keys = random_numbers.keys(parameters["blocks.up.kernel"], 1, 4)
    assert keys.shape == (4, 2)
    assert len({tuple(key) for key in keys}) == 4
    np.testing.assert_array_equal(keys, random_numbers.keys(parameters["blocks.up.kernel"], 1, 8)[:4])
