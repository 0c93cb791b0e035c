"""Both engines are one run: the same initial weights, losses, gradients and rates; and from one to the other."""

from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch", reason="needs the extra torch")

from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.engines.torch.checkpoint import read_plain_state  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 50, 6, 16, 100
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (3, ROWS, CONTEXT + 1)).astype(np.int32)
MODELS = {
    "as GPT-2 is": {},
    "untied, without biases": {"tied_head": False, "bias": False},
}

pytestmark = pytest.mark.usefixtures("compiled_quickly", "one_thread")


def recipe(engine, **model):
    """A batch learnt by heart, more or less: clipped at first, with a high rate that rises and falls."""
    return load_recipe(
        "gpt2-tiny",
        {
            "engine": engine,
            "model": {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, **model},
            "training": {"steps": STEPS, "batch_tokens": ROWS * CONTEXT},
            "optimizer": {"learning_rate": 0.01, "clip": 0.5},
            "schedule": {"kind": "cosine", "warmup_steps": 10},
        },
    )


@cache
def both(name):
    model = MODELS[name]
    jax_engine = JaxEngine(recipe("jax", **model), VOCAB, precision="fp32", devices=jax.devices()[:1])
    return jax_engine, TorchEngine(recipe("torch", **model), VOCAB, accumulation=2, precision="fp32", device="cpu")


def train(engine, state, steps=range(STEPS)):
    """Loss, gradient norm and rate of each step, and the last state."""
    numbers = []
    for step in steps:
        state, metrics = engine.step(state, engine.put(WINDOWS[step % 3][engine.rows]))
        numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm", "lr")])
    return np.array(numbers), state


@pytest.fixture(scope="module", params=MODELS)
def run(request):
    """Each engine from its own initial weights: those, numbers of every step, and AdamW's averages after the first."""
    first, numbers, averages = [], [], []
    for engine in both(request.param):
        state = engine.start()
        first.append(engine.gather(state).parameters)
        one, state = train(engine, state, range(1))
        averages.append(dict(engine.gather(state).slots["means"]))
        rest, _ = train(engine, state, range(1, STEPS))
        numbers.append(np.concatenate([one, rest]))
    return numbers, averages, first


def test_the_first_weights_are_the_same(run):
    by_jax, by_torch = run[2]
    assert by_jax.keys() == by_torch.keys()
    for name, right in by_jax.items():
        np.testing.assert_allclose(by_torch[name], right, rtol=1e-6, atol=1e-9, err_msg=name)


def test_fifty_losses_gradient_norms_and_rates_are_the_same(run):
    by_jax, by_torch = run[0]
    for steps, tolerance in ((1, 1e-6), (5, 1e-5), (STEPS, 1e-4)):
        np.testing.assert_allclose(by_torch[:steps, 0], by_jax[:steps, 0], rtol=tolerance)
    np.testing.assert_allclose(by_torch[:, 1], by_jax[:, 1], rtol=1e-4)
    np.testing.assert_allclose(by_torch[:, 2], by_jax[:, 2], rtol=1e-5)
    assert by_jax[0, 0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert by_jax[-1, 0] < 0.5 * by_jax[0, 0], "so much was learnt on the way"
    assert (by_jax[:, 1] > 0.5).any(), "and some of it was clipped"


def test_the_first_gradients_are_the_same_tensor_by_tensor(run):
    by_jax, by_torch = run[1]  # a step from zero leaves a tenth of its gradient there
    assert by_jax.keys() == by_torch.keys()
    for name, right in by_jax.items():
        if name == "blocks.key.bias":  # what is added to every key changes no softmax: its gradient is rounding alone
            continue
        distance = np.linalg.norm(by_torch[name] - right) / np.linalg.norm(right)
        assert distance < 1e-5, f"{name}: {distance}"


def test_jaxs_state_goes_on_in_pytorch_and_pytorchs_checkpoint_in_jax(tmp_path):
    jax_engine, torch_engine = both("as GPT-2 is")
    alone, _ = train(jax_engine, jax_engine.start())
    begun, state = train(jax_engine, jax_engine.start(), range(20))
    middle, state = train(torch_engine, torch_engine.load(jax_engine.gather(state)), range(20, 35))
    torch_engine.save(state, str(tmp_path))
    torch_engine.wait_for_save()
    end, state = train(
        jax_engine, jax_engine.load(read_plain_state(str(tmp_path), torch_engine.recipe.model, VOCAB)), range(35, STEPS)
    )
    assert int(state.step) == STEPS
    np.testing.assert_allclose(np.concatenate([begun, middle, end])[:, 0], alone[:, 0], atol=1e-5)
