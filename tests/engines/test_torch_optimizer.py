"""AdamW against a plain NumPy one; the learning rate against the JAX engine's, step by step."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from raygpt.engines.torch.optimizer import Optimizer, learning_rate  # noqa: E402
from raygpt.engines.torch.sharding import Mesh  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS = 50
SHAPES = {"tokens": (6, 4), "up": (8, 4), "up.bias": (8,), "norm": (4,)}
ROLES = {"tokens": "embedding", "up": "matrix", "up.bias": "bias", "norm": "gain"}
MATRICES = {"tokens", "up"}


def recipe(**changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("gpt2-tiny", {"engine": "torch", "training.steps": STEPS, "schedule.warmup_steps": 0, **dotted})


def draw(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def divisor(step):
    """As clipping and loss scale give it: some steps are shrunk, some are not."""
    return 1.0 if step % 2 else 2.0 ** (step % 5)


def trained(settings, left_out=()):
    """Parameters after 50 steps of ours, in fp64."""
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in draw(0).items()}
    optimizer = Optimizer(settings, parameters, ROLES.get, Mesh(1, 1, 1, 0, torch.device("cpu")), "fp64")
    for step in range(STEPS):
        for name, gradient in draw(1 + step).items():
            parameters[name].grad = torch.from_numpy(gradient * (np.nan if step in left_out else 1))
        optimizer.step(0.01, torch.tensor(divisor(step)), torch.tensor(float(step in left_out)))
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def by_hand(settings, steps=range(STEPS)):
    """The same in NumPy, from the paper's formulas."""
    adam = settings.optimizer
    (b1, b2), decayed = adam.betas, MATRICES if adam.decay == "matrices" else set(SHAPES)
    parameters = draw(0)
    mean, square = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for count, step in enumerate(steps, start=1):
        for name, gradient in draw(1 + step).items():
            g = gradient / divisor(step)
            mean[name] = b1 * mean[name] + (1 - b1) * g
            square[name] = b2 * square[name] + (1 - b2) * g**2
            change = (mean[name] / (1 - b1**count)) / (np.sqrt(square[name] / (1 - b2**count)) + adam.epsilon)
            change += adam.weight_decay * parameters[name] if name in decayed else 0
            parameters[name] = parameters[name] - 0.01 * change
    return parameters


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_fifty_steps_are_those_of_the_formulas(decay):
    settings = recipe(optimizer__decay=decay)
    expected = by_hand(settings)
    for name, value in trained(settings).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-7, err_msg=name)


def test_a_step_that_is_left_out_might_never_have_been():
    left_out = {0, 7, 8, 49}
    expected = by_hand(recipe(), [step for step in range(STEPS) if step not in left_out])
    for name, value in trained(recipe(), left_out).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule__kind": "constant"},
        {"schedule__kind": "linear", "schedule__end": 0.0},
        {"schedule__kind": "cosine"},
        {"schedule__kind": "wsd", "schedule__decay_share": 0.25, "schedule__end": 0.05},
        {"schedule__kind": "wsd", "schedule__decay_share": 0.75},
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_every_steps_rate_is_the_jax_engines(settings, warmup):
    jax_rate = pytest.importorskip("raygpt.engines.jax.optimizer").learning_rate
    both = recipe(schedule__warmup_steps=warmup, training__steps=40, **settings)
    ours, theirs = learning_rate(both), jax_rate(both)
    steps = range(45)  # past the end, too
    np.testing.assert_allclose([ours(n) for n in steps], [float(theirs(n)) for n in steps], rtol=1e-5, atol=1e-10)


def test_a_cosine_in_numbers():
    rate = learning_rate(recipe(schedule__kind="cosine", schedule__warmup_steps=4, training__steps=104))
    assert [rate(n) for n in range(5)] == pytest.approx([0.0002, 0.0004, 0.0006, 0.0008, 0.001])
    assert rate(29) == pytest.approx(0.0001 + 0.0009 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(104) == pytest.approx(0.0001)
