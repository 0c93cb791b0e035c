"""Spikes: the running mean and variance against NumPy, and steps that are left out on the device; both engines."""

import numpy as np
import pytest

from raygpt.engines.spikes import SPIKE_MEMORY, SPIKE_STEPS, Spikes
from raygpt.recipes import load_recipe

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SIGMAS = 6.0


def usual_numbers(steps, seed=0):
    chance = np.random.default_rng(seed)
    return chance.normal(3.0, 0.1, steps).astype(np.float32), chance.normal(1.0, 0.05, steps).astype(np.float32)


def expected(values):
    """Mean and variance with each value's weight: equal at first, then falling by 1 / SPIKE_MEMORY a step."""
    mean = variance = 0.0
    for step, value in enumerate(values.astype(np.float64)):
        share = max(1 / (step + 1), 1 / SPIKE_MEMORY)
        off = value - mean
        mean, variance = mean + share * off, (1 - share) * (variance + share * off**2)
    return mean, variance


class Looking:
    """Spikes on a library's arrays."""

    def __init__(self, library):
        self._xp = pytest.importorskip({"jax": "jax.numpy", "torch": "torch"}[library], reason="needs the extra torch")
        self._array = self._xp.asarray
        self.state = Spikes(*[self._array(0.0)] * len(Spikes._fields))

    def check(self, loss, norm):
        is_spike, self.state = self.state.check(self._array(loss), self._array(norm), SIGMAS, self._xp)
        return bool(is_spike)

    @property
    def usual(self):
        return [float(number) for number in self.state[:4]]


@pytest.fixture(params=["jax", "torch"])
def spikes(request):
    return Looking(request.param)


def test_what_is_usual_is_a_running_mean_and_variance(spikes):
    losses, norms = usual_numbers(180)
    assert not any(spikes.check(*pair) for pair in zip(losses, norms, strict=True))
    np.testing.assert_allclose(spikes.usual, [*expected(losses), *expected(norms)], rtol=1e-3)


@pytest.mark.parametrize("far", [(5.0, 1.0), (3.0, 2.0), (float("inf"), 1.0)])
def test_what_is_far_above_is_a_spike_and_hardly_changes_what_is_usual(spikes, far):
    for pair in zip(*usual_numbers(SPIKE_STEPS), strict=True):
        spikes.check(*pair)
    before = spikes.usual
    assert spikes.check(*far)
    assert not spikes.check(3.0, 1.0)
    np.testing.assert_allclose(spikes.usual[::2], before[::2], rtol=0.01)


def test_nothing_is_a_spike_before_enough_is_known(spikes):
    for pair in zip(*usual_numbers(SPIKE_STEPS - 1), strict=True):
        spikes.check(*pair)
    assert not spikes.check(100.0, 100.0)


def test_a_loss_that_stays_high_becomes_usual(spikes):
    for pair in zip(*usual_numbers(SPIKE_STEPS), strict=True):
        spikes.check(*pair)
    found = [spikes.check(5.0, 1.0) for _ in range(100)]
    assert found[0]
    assert not found[-1]


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_step_that_is_a_spike_is_left_out_on_the_device(engine, monkeypatch):
    monkeypatch.setattr("raygpt.engines.spikes.SPIKE_STEPS", 5)
    training = {"batch_tokens": 64, "steps": 10, "on_spike": "skip"}
    model = {"layers": 1, "heads": 2, "width": 16, "context": 16}
    slow = {"optimizer.learning_rate": 1e-5, "schedule.warmup_steps": 0}
    recipe = load_recipe("gpt2-tiny", {"model": model, "training": training, "engine": engine, **slow})
    computing = make(engine, recipe)
    state = computing.start()
    told = []
    for step in range(8):
        ids = np.full((4, 17), 7) if step != 6 else np.arange(4 * 17).reshape(4, 17) + 100  # all at once another text
        before = computing.gather(state).parameters if step == 6 else {}
        state, metrics = computing.step(state, computing.put(ids.astype(np.int32)))
        told.append(computing.read(metrics))
        if step == 6:
            after = computing.gather(state).parameters
            assert all(np.array_equal(before[name], after[name]) for name in before)
    assert [round(metrics["spikes"]) for metrics in told] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [round(metrics["skipped"]) for metrics in told] == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_loss_scale_that_has_grown_too_far_is_no_spike(engine, monkeypatch):
    monkeypatch.setattr("raygpt.engines.spikes.SPIKE_STEPS", 2)
    model = {"layers": 1, "heads": 2, "width": 16, "context": 16, "precision": "fp16"}
    training = {"batch_tokens": 64, "steps": 10, "on_spike": "stop"}
    recipe = load_recipe("gpt2-tiny", {"model": model, "training": training, "engine": engine})
    computing = make(engine, recipe)
    state = computing.start()
    windows = np.random.default_rng(0).integers(0, 257, (4, 17)).astype(np.int32)
    for step in range(4):
        if step == 3:
            factor = state.scale.factor * 0 + 2.0**30  # fp16 ends at 65504
            state = changed(state, scale=state.scale._replace(factor=factor))
        state, metrics = computing.step(state, computing.put(windows))
    read = computing.read(metrics)
    assert (read["skipped"], read["spikes"]) == (1, 0)
    assert not np.isfinite(read["grad_norm"])


def changed(state, scale):
    """The state with another loss scale."""
    if hasattr(state, "_replace"):
        return state._replace(scale=scale)
    state.scale = scale
    return state


def make(name, recipe):
    if name == "torch":
        pytest.importorskip("torch", reason="needs the extra torch")
        from raygpt.engines.torch.engine import TorchEngine

        return TorchEngine(recipe, vocab=257)
    import jax

    from raygpt.engines.jax.engine import JaxEngine

    return JaxEngine(recipe, vocab=257, devices=jax.devices()[:1])
