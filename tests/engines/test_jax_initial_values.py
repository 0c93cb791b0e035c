"""Initial values in JAX: those of the description, by GPT-2's rule and by Xavier's."""

from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from test_jax_engine import CONTEXT, VOCAB, compiled_quickly, make_engine, recipe  # noqa: E402, F401

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax.parameters import initial_keys, initial_values  # noqa: E402
from raygpt.models import describe, random_numbers  # noqa: E402

SIZES = {"layers": 8, "heads": 4, "width": 64, "context": 32, "tied_head": False}


def first(model, vocab=VOCAB, seed=0):
    """Parameters before the first step."""
    description = describe(model, vocab)
    return jax.jit(lambda keys: initial_values(description, keys, jnp.float32))(initial_keys(description, seed))


@cache
def initial(init):
    """The same as NumPy arrays."""
    return jax.device_get(first(Model(init=init, **SIZES), 512))


def test_they_are_what_the_description_draws_for_each_index():
    model = Model(layers=3, heads=2, width=64, context=16, tied_head=False, init="xavier")
    found, description = first(model, 300, seed=7), describe(model, 300)
    for name in ("tokens", "blocks.out.kernel", "head"):
        parameter = description.by_name[name]
        for layer, key in enumerate(random_numbers.keys(parameter, 7, 3)):
            shape = description.own_shape(parameter)
            index = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
            right = random_numbers.draw(parameter.initial, index, tuple(key), np)
            ours = found[name][layer] if parameter.is_stacked else found[name][:300]
            exact = {"rtol": 0} if parameter.initial.kind == "uniform" else {"atol": 1e-7, "rtol": 1e-6}
            np.testing.assert_allclose(ours, right, **exact, err_msg=name)
    assert not found["tokens"][300:].any(), "padding is zero"


def test_gpt2s_initialisation_is_normal_with_smaller_residual_projections():
    tree = initial("gpt2")
    kernels = [f"blocks.{name}.kernel" for name in ("query", "key", "value", "up")]
    for values in [tree[name] for name in ("tokens", "positions", "head", *kernels)]:
        assert values.std() == pytest.approx(0.02, rel=4 / np.sqrt(2 * values.size))
        assert abs(values.mean()) < 6 * 0.02 / np.sqrt(values.size)
        assert np.abs(values).max() > 3 * 0.02  # a normal has tails
    for name in ("out", "down"):
        assert tree[f"blocks.{name}.kernel"].std() == pytest.approx(0.02 / 4, rel=0.03)  # sqrt(2 · 8)
    layers = tree["blocks.up.kernel"]
    assert all(np.abs(layers[0] - layers[layer]).max() > 0.01 for layer in range(1, 8)), "each layer has its own"


def test_xaviers_limits_are_those_of_the_matrices_that_the_tutorial_has():
    tree, width, hidden = initial("xavier"), 64, 256
    square = np.sqrt(6 / (width + width))  # Q, K and V are each a matrix from width to width, and so is the way back
    for name, limit in [
        *((f"blocks.{name}.kernel", square) for name in ("query", "key", "value", "out")),
        ("blocks.up.kernel", np.sqrt(6 / (width + hidden))),
        ("blocks.down.kernel", np.sqrt(6 / (width + hidden))),
        ("head", np.sqrt(6 / (512 + width))),
    ]:
        values = tree[name]
        assert 0.99 * limit < np.abs(values).max() <= limit
        assert values.std() == pytest.approx(limit / np.sqrt(3), rel=0.03)  # uniform


@pytest.mark.parametrize("name", ["tokens", "positions"])
def test_beside_xaviers_kernels_embeddings_are_normal_with_a_variance_of_one_over_the_width(name):
    values = initial("xavier")[name]
    assert values.std() == pytest.approx(64**-0.5, rel=4 / np.sqrt(2 * values.size))
    assert np.abs(values).max() > 3 * 64**-0.5  # normal: a uniform one ends at 1.7


@pytest.mark.parametrize("init", ["gpt2", "xavier"])
def test_biases_begin_at_zero_and_norms_at_one(init):
    vectors = initial(init)
    biases = {name: leaf for name, leaf in vectors.items() if name.endswith("bias")}
    gains = {name: leaf for name, leaf in vectors.items() if name.endswith("gain")}
    assert len(biases) == 9  # query, key, value, out, up, down, two norms, the last norm
    assert len(gains) == 3
    assert not any(leaf.any() for leaf in biases.values())
    assert all((leaf == 1).all() for leaf in gains.values())


def test_without_biases_there_are_none():
    tree = jax.eval_shape(make_engine(bias=False).start).parameters
    assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(tree) if "bias" in str(path)]
