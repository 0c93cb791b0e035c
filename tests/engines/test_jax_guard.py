"""Steps that are left out: numbers that are not finite, and fp16's search for a loss scale."""

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from raygpt.engines import loss_scale  # noqa: E402
from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.engines.loss_scale import LossScale  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

ROWS, CONTEXT, VOCAB = 4, 8, 50
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (6, ROWS, CONTEXT + 1)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_engine(on_nan="stop", precision="fp32"):
    settings = {
        "model": {"layers": 1, "heads": 2, "width": 16, "context": CONTEXT},
        "training": {"batch_tokens": ROWS * CONTEXT, "steps": 20, "on_nan": on_nan},
        "schedule.warmup_steps": 10,
    }
    return JaxEngine(load_recipe("gpt2-tiny", settings), VOCAB, devices=jax.devices()[:1], precision=precision)


def take(engine, state, number, weight=1.0):
    """Step on a batch whose rows weigh so much: the state and the metrics after it, read."""
    batch = engine.put(WINDOWS[number])
    state, metrics = engine.step(state, batch._replace(weights=batch.weights * weight))
    return state, engine.read(metrics)


def assert_equal(tree, expected):
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bad", [np.nan, *also(np.inf)])
def test_skip_leaves_everything_as_it_was_but_the_number_of_the_step(bad):
    engine = make_engine("skip")
    state, good = take(engine, engine.start(), 0)
    before = jax.device_get(state)
    state, metrics = take(engine, state, 1, bad)
    assert not np.isfinite(metrics["loss"])
    assert (good["skipped"], metrics["skipped"]) == (0.0, 1.0)
    assert_equal(state, before._replace(step=np.int32(2)))


def test_skip_leaves_out_gradients_that_overflow_under_a_finite_loss():
    engine = make_engine("skip")
    state = engine.start()
    before = jax.device_get(state)
    state, metrics = take(engine, state, 0, 1e30)  # whose squares have a sum beyond fp32
    assert np.isfinite(metrics["loss"])
    assert metrics["skipped"] == 1.0
    assert_equal(state.parameters, before.parameters)


def test_after_a_step_that_was_left_out_the_rate_is_that_of_the_steps_number():
    engine = make_engine("skip")
    state, _ = take(engine, engine.start(), 0, np.nan)
    before = jax.device_get(state.parameters)
    state, metrics = take(engine, state, 1)
    assert metrics["lr"] == pytest.approx(0.001 * 2 / 11, rel=1e-6)
    # AdamW's first step is the rate times the gradient's sign, wherever nothing decays
    moved = np.abs(before["norm.bias"] - np.asarray(state.parameters["norm.bias"]))
    np.testing.assert_allclose(moved, 0.001 * 2 / 11, rtol=1e-3)


def test_stop_reports_and_leaves_out_nothing():
    engine = make_engine("stop")
    state, metrics = take(engine, engine.start(), 0, np.nan)
    assert np.isnan(metrics["loss"])
    assert np.isnan(metrics["grad_norm"])
    assert metrics["skipped"] == 0.0
    assert np.isnan(state.parameters["norm.gain"]).all()


# fp16


@pytest.mark.extended
def test_fp16_halves_its_scale_until_gradients_are_finite_and_then_learns():
    engine = make_engine(precision="fp16")
    state = engine.start()
    initial = jax.device_get(state.parameters)
    state = state._replace(scale=state.scale._replace(factor=jnp.float32(2.0**18)))  # 65504 is the end of fp16
    for number in range(10):
        state, metrics = take(engine, state, 0)
        assert np.isfinite(metrics["loss"])  # the forward pass is not scaled
        if metrics["skipped"] == number:  # all those before, and not this one
            break
        assert_equal(state.parameters, initial)
        assert float(state.scale.factor) == 2.0 ** (17 - number)
    assert 3 <= number < 8  # 2^15 of a token alone is still finite
    assert (float(state.scale.factor), int(state.scale.good_steps)) == (2.0 ** (18 - number), 1)

    expected, right = take(make_engine(), engine.start()._replace(step=jnp.int32(number)), 0)
    assert metrics["loss"] == pytest.approx(right["loss"], rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-2)
    moved, should = (jax.tree.map(np.subtract, jax.device_get(s.parameters), initial) for s in (state, expected))
    assert np.corrcoef(moved["tokens"].ravel(), should["tokens"].ravel())[0, 1] > 0.99


@pytest.mark.extended
def test_gradients_too_small_for_fp16_are_saved_by_the_scale():
    engine, exact = make_engine(precision="fp16"), make_engine()
    norms = {}
    for name, made, factor in (("scaled", engine, 2.0**20), ("not scaled", engine, 1.0), ("fp32", exact, 1.0)):
        state = made.start()
        state = state._replace(scale=state.scale._replace(factor=jnp.float32(factor)))
        norms[name] = take(made, state, 0, 1e-7)[1]["grad_norm"]  # of rows that weigh next to nothing
    assert norms["scaled"] == pytest.approx(norms["fp32"], rel=1e-2)
    assert norms["not scaled"] < 0.7 * norms["fp32"]


def test_a_scale_doubles_after_enough_good_steps_and_begins_to_count_again(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    scale = LossScale(jnp.float32(1.0), jnp.int32(0))
    seen = []
    for finite in (True, True, False, True, True, True, True, True, True, False):
        scale = scale.after(jnp.asarray(finite), jnp)
        seen.append((float(scale.factor), int(scale.good_steps)))
    assert seen == [(1, 1), (1, 2), (0.5, 0), (0.5, 1), (0.5, 2), (1, 0), (1, 1), (1, 2), (2, 0), (1, 0)]


@pytest.mark.extended
def test_other_precisions_know_no_scale():
    engine = make_engine()
    plain, metrics = take(engine, engine.start(), 0)
    state = engine.start()
    odd = state.scale._replace(factor=jnp.float32(3e38))
    scaled, same = take(engine, state._replace(scale=odd), 0)
    assert metrics == same
    assert_equal(scaled.parameters, plain.parameters)
    assert scaled.scale.factor == np.float32(3e38)


def test_a_checkpoint_holds_the_scale(tmp_path):
    engine = make_engine(precision="fp16")
    state = engine.start()._replace(scale=LossScale(jnp.float32(2.0**-3), jnp.int32(17)))
    engine.save(state, str(tmp_path / "state"))
    engine.wait_for_save()
    assert_equal(engine.restore(str(tmp_path / "state")).scale, (2.0**-3, 17))
