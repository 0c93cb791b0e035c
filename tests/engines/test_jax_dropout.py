"""Dropout in JAX: a mask for each row, site and step, the same however layers are compiled."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from test_jax_engine import WINDOWS, compiled_quickly, make_engine  # noqa: E402, F401
from test_jax_initial_values import first  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax import layers as layers_module  # noqa: E402
from raygpt.engines.jax import model as model_module  # noqa: E402
from raygpt.engines.jax.attention import xla  # noqa: E402
from raygpt.engines.jax.layers import dropout  # noqa: E402
from raygpt.engines.jax.model import GPT, LayerCompilation  # noqa: E402


def keys_of(rows, seed=0):
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(rows))


def test_dropout_zeroes_its_share_and_scales_the_rest():
    x = jnp.ones((64, 50, 40))
    dropped = np.asarray(dropout(x, keys_of(range(64)), 0, 0.1))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.9)}
    share = (dropped == 0).mean()  # of 128,000: the standard deviation is 0.0008
    assert share == pytest.approx(0.1, abs=0.004)
    assert dropped.mean() == pytest.approx(1.0, abs=0.005)


def test_a_rows_mask_depends_on_its_own_key_and_the_site_alone():
    x = jnp.ones((4, 8, 16))
    masks = dropout(x, keys_of([3, 4, 5, 6]), 2, 0.5)
    np.testing.assert_array_equal(dropout(x[:2], keys_of([5, 9]), 2, 0.5)[0], masks[2])
    np.testing.assert_array_equal(dropout(x[:1] * 7, keys_of([4]), 2, 0.5)[0], masks[1] * 7)
    others = [masks[0], masks[1], dropout(x, keys_of([3]), 3, 0.5)[0], dropout(x, keys_of([3], seed=1), 2, 0.5)[0]]
    for number, mask in enumerate(others):
        for other in others[:number]:
            assert 0.3 < (np.asarray(mask) == np.asarray(other)).mean() < 0.7


def test_without_a_rate_or_keys_nothing_is_dropped():
    x = jnp.ones((2, 3, 4))
    assert dropout(x, keys_of([0, 1]), 0, 0.0) is x
    assert dropout(x, None, 0, 0.5) is x


def test_the_embedding_and_both_branches_of_each_layer_drop_each_by_a_mask_of_its_own(monkeypatch):
    sites = []
    for module in (model_module, layers_module):
        monkeypatch.setattr(module, "dropout", lambda x, keys, site, rate: sites.append((int(site), rate)) or x)
    model = Model(layers=3, heads=2, width=8, context=4, dropout=0.25)
    gpt = GPT(model, jnp.float32, xla, LayerCompilation(scanned=False))
    gpt(first(model), jnp.zeros((1, 4), jnp.int32), keys_of([0]))
    assert sites == [(site, 0.25) for site in range(7)]


def test_scanned_and_unrolled_layers_drop_the_same():
    model = Model(layers=3, heads=2, width=8, context=4, dropout=0.5)
    parameters, ids, keys = first(model), jnp.arange(8).reshape(2, 4), keys_of([0, 1])
    scanned, unrolled = (GPT(model, jnp.float32, xla, LayerCompilation(scanned)) for scanned in (True, False))
    np.testing.assert_allclose(scanned(parameters, ids, keys), unrolled(parameters, ids, keys), atol=1e-6)
    assert not np.allclose(scanned(parameters, ids, keys), scanned(parameters, ids), atol=1e-2)


def test_masks_change_with_step_and_row():
    engine = make_engine(dropout=0.3)
    initial = jax.device_get(engine.start())

    def loss(windows, step=0):
        state = initial._replace(step=np.asarray(step, np.int32))
        return float(engine.step(state, engine.put(windows))[1].loss)

    first = loss(WINDOWS[0])
    assert loss(WINDOWS[0]) == first
    assert loss(WINDOWS[0], step=1) != pytest.approx(first, rel=1e-5)
    assert loss(WINDOWS[0][::-1].copy()) != pytest.approx(first, rel=1e-5), "a row's mask goes by its number"
