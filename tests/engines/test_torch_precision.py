"""The PyTorch engine in every precision, and steps that are left out because a number is none."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from test_torch_engine import CONTEXT, MODERN, ROWS, VOCAB, WINDOWS, alone, gradients, make_engine, relative, train  # noqa: E402, F401

from raygpt.engines import loss_scale as loss_scale_module  # noqa: E402
from raygpt.engines.base import PlainState  # noqa: E402
from raygpt.engines.torch import engine as engine_module  # noqa: E402
from raygpt.engines.torch.devices import choose_precision  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_but_parameters_averages_and_losses_are_fp32(precision, alone):
    engine = make_engine(2, precision=precision)
    numbers, state = train(engine, engine.start())
    np.testing.assert_allclose(numbers, alone[0], rtol=2e-2)
    assert {tensor.dtype for _, _, tensor in state.tensors()} == {torch.float32}
    scores = engine.window_losses(state, WINDOWS[0])
    np.testing.assert_allclose(scores, alone[2], rtol=5e-3)
    assert scores.dtype == np.float32
    assert len(set(scores.tolist())) == ROWS  # bf16 would tell numbers around 4.6 apart in steps of 0.03


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_modern_model_in_half_precision_has_the_same_losses_but_for_rounding(precision):
    right, found = (make_engine(2, precision=each, **MODERN) for each in ("fp32", precision))
    numbers, state = train(found, found.start())
    np.testing.assert_allclose(numbers, train(right, right.start())[0], rtol=2e-2)
    assert {tensor.dtype for _, _, tensor in state.tensors()} == {torch.float32}
    at_once, _ = found.prefill(state, WINDOWS[0, :3, :6])
    _, cache = found.prefill(state, WINDOWS[0, :3, :5])
    np.testing.assert_allclose(found.decode(state, WINDOWS[0, :3, 5:6], 5, cache)[0], at_once, atol=0.05)


def poisoned(engine, state):
    """The state with one parameter that is not a number."""
    weights = engine.gather(state)
    bias = weights.parameters["norm.bias"].copy()
    bias[3] = np.nan
    return engine.load(PlainState({**weights.parameters, "norm.bias": bias}, weights.slots, 1))


def test_a_step_that_is_not_a_number_is_left_out_and_counted_if_the_recipe_says_so():
    engine = make_engine(on_nan="skip")
    state = poisoned(engine, train(engine, engine.start(), WINDOWS[:1])[1])
    before = engine.gather(state)
    state, metrics = engine.step(state, engine.put(WINDOWS[1]))
    said, after = engine.read(metrics), engine.gather(state)
    assert np.isnan(said["loss"])
    assert said["skipped"] == 1
    assert before.slots.keys() == after.slots.keys() == {"means", "squares"}
    for left, right in [
        (before.parameters, after.parameters),
        *((before.slots[k], after.slots[k]) for k in before.slots),
    ]:
        for name, value in left.items():
            np.testing.assert_array_equal(right[name], value, err_msg=name)
    assert after.step == 2, "the next batch is the next one all the same"
    assert float(state.numbers()["updates"]) == 1


def test_after_a_step_that_was_left_out_training_goes_on():
    engine = make_engine(on_nan="skip", precision="fp64", dropout=0.0)
    state = train(engine, engine.start(), WINDOWS[:1])[1]
    bias = state.parameters["norm.bias"]
    kept = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(torch.inf)
    state, left_out = engine.step(state, engine.put(WINDOWS[1]))
    with torch.no_grad():
        bias.copy_(kept)
    state, metrics = engine.step(state, engine.put(WINDOWS[2]))
    assert [engine.read(m)["skipped"] for m in (left_out, metrics)] == [1, 1]
    assert engine.read(metrics)["loss"] == pytest.approx(np.log(VOCAB), rel=0.05)


def test_otherwise_it_is_taken_and_its_loss_tells():
    engine = make_engine(on_nan="stop")
    state = poisoned(engine, engine.start())
    state, metrics = engine.step(state, engine.put(WINDOWS[0]))
    assert np.isnan(engine.read(metrics)["loss"])
    assert engine.read(metrics)["skipped"] == 0
    assert np.isnan(engine.gather(state).parameters["tokens"]).all()


def test_fp16_gradients_of_many_tokens_do_not_vanish():
    """A mean over half a million tokens gives each a gradient below fp16's smallest number; here it is 8192."""
    rows = 512
    windows = np.random.default_rng(1).integers(0, VOCAB, (rows, CONTEXT + 1)).astype(np.int32)
    settings = {"rows": rows, "dropout": 0.0, "optimizer": {"clip": None}}
    exact, half = make_engine(**settings), make_engine(precision="fp16", **settings)
    weights = exact.gather(exact.start()).parameters
    expected, right = gradients(exact, weights, windows)
    metrics, ours = gradients(half, weights, windows)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
    everything = lambda arrays: np.concatenate([arrays[name].ravel() for name in right])  # noqa: E731
    assert relative(everything(ours), everything(right)) < 0.01


def test_fp16s_loss_scale_halves_with_every_overflow_until_steps_are_taken(monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_SCALE", 2.0**26)  # overflows: fp16 ends at 65504
    # So slow that gradients stay what they are: one that just fits fits again.
    engine = make_engine(precision="fp16", dropout=0.0, optimizer={"learning_rate": 1e-6})
    begun = engine.start()
    before = engine.gather(begun).parameters
    skipped, scales = [], []
    for _ in range(12):
        begun, metrics = engine.step(begun, engine.put(WINDOWS[0]))
        skipped.append(engine.read(metrics)["skipped"])
        scales.append(float(begun.scale.factor))
        assert np.isfinite(engine.read(metrics)["loss"])
    taken = int(skipped[-1])  # the first that was not left out
    assert 1 <= taken <= 10
    assert skipped == [*range(1, taken + 1), *[taken] * (12 - taken)]
    assert scales == [2.0 ** (26 - min(n, taken)) for n in range(1, 13)]
    after = engine.gather(begun)
    assert all(np.isfinite(value).all() for value in after.parameters.values())
    assert np.abs(after.parameters["tokens"] - before["tokens"]).max() > 0


def test_fp16s_loss_scale_doubles_after_many_steps_without_an_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale_module, "GROWTH_STEPS", 3)
    scale, values = loss_scale_module.LossScale(torch.tensor(8.0), torch.tensor(0)), []
    for finite in [True, True, True, True, False, True, True, True]:
        scale = scale.after(torch.tensor(finite), torch)
        values.append(float(scale.factor))
    assert values == [8, 8, 16, 16, 8, 8, 8, 16]


@pytest.mark.parametrize(
    ("wanted", "device", "capability", "chosen"),
    [
        ("auto", "cpu", None, "fp32"),
        ("auto", "cuda", (9, 0), "bf16"),
        ("auto", "cuda", (7, 5), "fp16"),  # a T4
        ("bf16", "cpu", None, "bf16"),
        ("fp32", "cuda", (9, 0), "fp32"),
    ],
)
def test_precision_is_the_recipes_or_the_devices_best(wanted, device, capability, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision(wanted, torch.device(device)) == chosen
