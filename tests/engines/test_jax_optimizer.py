"""AdamW against PyTorch's and a plain NumPy one; the learning rate in numbers worked out by hand."""

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax.optimizer import learning_rate, make_optimizer  # noqa: E402
from raygpt.engines.jax.sharding import make_mesh  # noqa: E402
from raygpt.models import describe  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS = 50
DESCRIPTION = describe(Model(layers=2, heads=2, width=4, context=3), vocab=6)
SHAPES = DESCRIPTION.shapes
MATRICES = {name for name in SHAPES if name.endswith("kernel")} | {"tokens", "positions"}  # no stacked bias or gain


def recipe(**changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {"training.steps": STEPS, "schedule.warmup_steps": 0, "schedule.kind": "constant", **dotted}
    return load_recipe("gpt2-tiny", settings)


def one_device():
    return make_mesh({}, jax.devices()[:1])


def draw(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) * scale for name, shape in SHAPES.items()}


def gradients(step):
    """Some steps are clipped, some are not."""
    return draw(1000 + step, 10.0 ** (step % 4 - 2))


def trained(settings):
    """Parameters after 50 steps of ours, in fp64."""
    with jax.enable_x64(True):
        optimizer, rate = make_optimizer(settings, DESCRIPTION, one_device(), "fp64"), learning_rate(settings)
        parameters = jax.tree.map(jnp.asarray, draw(0))
        slots, update = optimizer.init(parameters), jax.jit(optimizer.update)
        for step in range(STEPS):
            direction, slots = update(gradients(step), parameters, slots, jnp.int32(step))
            parameters = jax.tree.map(lambda value, by: value - rate(step) * by, parameters, direction)  # noqa: B023
        return jax.device_get(parameters)


def by_hand(settings, rates):
    """The same in NumPy, from the paper's formulas."""
    adam = settings.optimizer
    (b1, b2), decayed = adam.betas, MATRICES if adam.decay == "matrices" else set(SHAPES)
    parameters = draw(0)
    mean, square = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(STEPS):
        gradient = gradients(step)
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        shrink = 1.0 if adam.clip is None else min(1.0, adam.clip / norm)
        for name, value in parameters.items():
            g = gradient[name] * shrink
            mean[name] = b1 * mean[name] + (1 - b1) * g
            square[name] = b2 * square[name] + (1 - b2) * g**2
            change = (mean[name] / (1 - b1 ** (step + 1))) / (
                np.sqrt(square[name] / (1 - b2 ** (step + 1))) + adam.epsilon
            )
            change += adam.weight_decay * value if name in decayed else 0
            parameters[name] = value - rates[step] * change
    return parameters


@pytest.mark.parametrize("decay", ["matrices", "all"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_fifty_steps_are_those_of_the_formulas(clip, decay):
    settings = recipe(optimizer__clip=clip, optimizer__decay=decay, optimizer__learning_rate=0.01)
    expected = by_hand(settings, [0.01] * STEPS)
    for name, value in trained(settings).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-7, err_msg=name)


def test_the_rate_of_a_step_is_the_schedules_of_that_step():
    settings = recipe(schedule__kind="linear", schedule__warmup_steps=4, schedule__end=0.0, optimizer__epsilon=1e-3)
    rates = [1e-3 * (step + 1) / 5 if step < 4 else 1e-3 * (1 - (step - 4) / 46) for step in range(STEPS)]
    expected = by_hand(settings, rates)
    for name, value in trained(settings).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_fifty_steps_are_pytorchs(decay):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    settings = recipe(optimizer__decay=decay, optimizer__betas=[0.9, 0.999], optimizer__weight_decay=0.3)
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in draw(0).items()}
    decayed = set(SHAPES) if decay == "all" else MATRICES
    groups = [
        {"params": [parameters[name] for name in SHAPES if name in decayed], "weight_decay": 0.3},
        {"params": [parameters[name] for name in SHAPES if name not in decayed], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            parameters[name].grad = torch.from_numpy(gradient)
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        adamw.step()
    for name, value in trained(settings).items():
        # 1e-6: PyTorch adds 1e-6 to the norm before it clips
        np.testing.assert_allclose(value, parameters[name].detach().numpy(), rtol=1e-6, atol=1e-6, err_msg=name)


def rates(kind, steps, chosen, **changes):
    schedule = learning_rate(
        recipe(
            schedule__kind=kind,
            training__steps=steps,
            optimizer__learning_rate=0.01,
            **{f"schedule__{key}": value for key, value in changes.items()},
        )
    )
    return [float(schedule(step)) for step in chosen]


WARM_UP = [0.002, 0.004, 0.006, 0.008]  # fifths of 0.01, in steps 0 to 3
COSINE = 0.001 + 0.009 * (1 + math.cos(math.pi / 4)) / 2  # a quarter of the way


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("constant", {}, {0: 0.01, 50: 0.01, 103: 0.01}),
        ("linear", {}, {0: 0.01, 26: 0.00775, 52: 0.0055, 104: 0.001}),
        ("linear", {"end": 0}, {0: 0.01, 26: 0.0075, 103: 0.01 / 104, 104: 0.0}),
        ("cosine", {}, {0: 0.01, 26: COSINE, 52: 0.0055, 104: 0.001, 200: 0.001}),
        ("cosine", {"end": 0}, {0: 0.01, 52: 0.005, 104: 0.0}),
        ("cosine", {"end": 1}, {0: 0.01, 52: 0.01, 104: 0.01}),
        ("wsd", {"decay_share": 0.25}, {0: 0.01, 78: 0.01, 91: 0.0055, 104: 0.001}),
        ("wsd", {"decay_share": 0.25, "end": 0}, {78: 0.01, 103: 0.01 / 26, 104: 0.0}),
        ("wsd", {"decay_share": 0.75, "end": 0}, {26: 0.01, 65: 0.005, 103: 0.01 / 78, 104: 0.0}),
        ("constant", {"warmup_steps": 4}, {**dict(enumerate(WARM_UP)), 4: 0.01, 104: 0.01}),
        ("linear", {"warmup_steps": 4}, {**dict(enumerate(WARM_UP)), 4: 0.01, 54: 0.0055, 104: 0.001}),
        ("cosine", {"warmup_steps": 4}, {**dict(enumerate(WARM_UP)), 4: 0.01, 29: COSINE, 54: 0.0055, 104: 0.001}),
        ("wsd", {"warmup_steps": 4, "decay_share": 0.25}, {**dict(enumerate(WARM_UP)), 4: 0.01, 78: 0.01, 91: 0.0055}),
    ],
)
def test_the_learning_rate_over_104_steps_is(kind, settings, expected):
    assert rates(kind, 104, expected, **settings) == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 16])
def test_no_step_has_a_rate_of_zero_and_the_end_is_reached_after_the_last(kind, warmup):
    end = {} if kind == "constant" else {"end": 0.0}
    *steps, after = rates(kind, 20, range(21), warmup_steps=warmup, **end)
    assert min(steps) > 0
    assert max(steps) == pytest.approx(0.01)
    assert after == pytest.approx(0.01 if kind == "constant" else 0.0, abs=1e-9)


def test_a_run_that_only_warms_up_never_falls():
    assert rates("cosine", 4, range(4), warmup_steps=4) == pytest.approx(WARM_UP)


def test_a_state_has_one_structure_whatever_the_settings():
    tree = {"norm.gain": jnp.ones(2)}
    choices = [
        recipe(optimizer__clip=clip, optimizer__decay=decay) for clip in (1.0, None) for decay in ("matrices", "all")
    ]
    optimizers = [make_optimizer(choice, DESCRIPTION, one_device(), "fp32") for choice in choices]
    assert len({jax.tree.structure(optimizer.init(tree)) for optimizer in optimizers}) == 1
