"""Modern models in both engines against plain NumPy: losses, prompts and caches; and that a mesh changes nothing."""

from importlib import import_module

import numpy as np
import pytest
import reference
from conftest import also

from raygpt.config import Model, Recipe
from raygpt.engines.base import PlainState
from raygpt.models import describe

pytestmark = pytest.mark.usefixtures("compiled_quickly")

VOCAB, CONTEXT = 100, 24
SMALL = {"layers": 4, "heads": 4, "width": 64, "context": CONTEXT, "precision": "fp32"}
MODELS = {
    "llama": Model(preset="llama", kv_heads=2, **SMALL),
    "qwen3": Model(preset="qwen3", kv_heads=1, head_size=32, tied_head=True, **SMALL),
    "nanochat": Model(preset="nanochat", **SMALL),
    "all": Model(
        preset="nanochat", value_embeddings=1, x0_mixing=True, head_gates=True, rope_share=0.5, norm_gain=True, **SMALL
    ),
    "mixed": Model(norm="layer", position="rope", mlp="relu2", qk_norm=True, softcap=3.0, **SMALL),
}
KINDS = ["all", "qwen3", *also("llama", "nanochat", "mixed")]


def random_parameters(model):
    """Large ones, so that a wrong place shows."""
    generator = np.random.default_rng(0)
    shapes = describe(model, VOCAB).shapes
    return {
        name: generator.normal(name.endswith("gain"), 0.2, shape).astype(np.float32) for name, shape in shapes.items()
    }


def tokens(rows, time):
    return np.random.default_rng(1).integers(0, VOCAB, (rows, time)).astype(np.int32)


def log_probabilities(parameters, model, windows):
    """Of every token of windows [rows, time + 1] but the first, by the reference."""
    logits = reference.logits(parameters, model, windows[:, :-1])
    totals = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0] - totals


@pytest.fixture(scope="module", params=["jax", "torch"])
def engine(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def opened(request, engine):
    model = MODELS[request.param]
    recipe = Recipe(engine=engine, model=model, training={"batch_tokens": 4 * CONTEXT})
    computes = import_module(f"raygpt.engines.{engine}.engine").Engine(recipe, VOCAB)
    return model, random_parameters(model), computes


def state_of(opened):
    _, parameters, computes = opened
    return computes.load(PlainState(parameters))


def test_losses_and_log_probabilities_are_those_of_plain_numpy(opened):
    model, parameters, computes = opened
    state, windows = state_of(opened), tokens(4, CONTEXT + 1)
    expected = log_probabilities(parameters, model, windows)
    np.testing.assert_allclose(computes.window_losses(state, windows), -expected.mean(1), rtol=1e-5)
    found, _ = computes.token_logprobs(state, windows[:, :18])
    np.testing.assert_allclose(found, expected[:, :17], atol=1e-4)
    _, metrics = computes.step(state, computes.put(windows))
    assert computes.read(metrics)["loss"] == pytest.approx(-expected.mean(), rel=1e-5)


@pytest.mark.parametrize("kind", ["engine", "reader"])
def test_a_prompt_and_what_follows_it_are_read_through_the_cache(opened, engine, kind):
    model, parameters, computes = opened
    if kind == "reader":
        computes = import_module(f"raygpt.engines.{engine}.reader").Reader(model, VOCAB)
        state = computes.load(parameters)
    else:
        state = state_of(opened)
    ids = tokens(2, 12)
    expected = reference.logits(parameters, model, ids)
    found, cache = computes.prefill(state, ids[:, :10])
    np.testing.assert_allclose(found, expected[:, 9], atol=1e-4)
    for start in (10, 11):
        found, cache = computes.decode(state, ids[:, start : start + 1], start, cache)
        np.testing.assert_allclose(found, expected[:, start], atol=1e-4)
    # A position of its own for each row: both tokens are read again.
    starts = np.array([10, 11], np.int32)
    found, _ = computes.decode(state, ids[[0, 1], starts][:, None], starts, cache)
    np.testing.assert_allclose(found, expected[[0, 1], starts], atol=1e-4)


def losses_of(name, engine, windows, precision, **settings):
    """Of steps from the initial weights on."""
    recipe = Recipe(
        engine=engine,
        model=MODELS[name],
        training={"batch_tokens": len(windows[0]) * CONTEXT, "steps": len(windows)},
        cluster={"mesh": settings.pop("mesh", {})},
    )
    computes = import_module(f"raygpt.engines.{engine}.engine").Engine(recipe, VOCAB, precision=precision, **settings)
    state, losses = computes.start(), []
    for batch in windows:
        state, metrics = computes.step(state, computes.put(batch[computes.rows]))
        losses.append(computes.read(metrics)["loss"])
    return losses


def batches(steps, rows):
    return np.random.default_rng(2).integers(0, VOCAB, (steps, rows, CONTEXT + 1)).astype(np.int32)


@pytest.mark.parametrize("name", KINDS)
def test_both_engines_take_the_same_steps(name):
    windows = batches(1, 4).repeat(8, axis=0)
    ours, theirs = (losses_of(name, engine, windows, "fp32") for engine in ("jax", "torch"))
    assert theirs[-1] < theirs[0] - 0.02
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("preset", ["llama", "nanochat"])
def test_with_a_tied_head_muon_begins_at_chance_and_learns(preset, engine):
    model = Model(preset=preset, tied_head=True, **SMALL)
    recipe = Recipe(engine=engine, model=model, optimizer={"kind": "muon"}, training={"batch_tokens": 4 * CONTEXT})
    computes = import_module(f"raygpt.engines.{engine}.engine").Engine(recipe, VOCAB, precision="fp32")
    state, losses = computes.start(), []
    for batch in batches(1, 4).repeat(20, axis=0):
        state, metrics = computes.step(state, computes.put(batch[computes.rows]))
        losses.append(computes.read(metrics)["loss"])
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert max(losses) < losses[0] + 0.2
    assert losses[-1] < 0.5


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "tensor": 2, "context": 2},
        *also({"data": 2, "context": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}),
    ],
)
def test_no_mesh_and_no_accumulation_changes_a_loss(mesh):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        windows = batches(3, 6)
        alone = losses_of("all", "jax", windows, "fp64", devices=jax.devices()[:1])
        meshed = losses_of("all", "jax", windows, "fp64", mesh=mesh, accumulation=2)
    np.testing.assert_allclose(meshed, alone, rtol=1e-9)
