"""The training step by fused kernels: the numbers of the plain step, whatever the recipe, and chosen where it pays."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.engines.jax.fused import choose_kernels  # noqa: E402
from raygpt.engines.jax.model import LayerCompilation  # noqa: E402
from raygpt.engines.jax.sharding import make_mesh  # noqa: E402
from raygpt.engines.jax.step import make_sums  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 3, 6, 16, 100
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, CONTEXT + 1)).astype(np.int32)
UNROLLED = LayerCompilation(scanned=False)
RECIPES = {
    "GPT-2's": {},
    "no biases, a head of its own": {"bias": False, "tied_head": False, "norm_epsilon": 1e-6, "remat": "products"},
    "dropout on two devices": {"dropout": 0.2, "devices": 2},
    "blocks computed again": {"remat": "blocks"},
    "nanochat's": {
        "preset": "nanochat",
        "value_embeddings": 1,
        "x0_mixing": True,
        "head_gates": True,
        "devices": 2,
        "remat": "products",
    },
    "qwen3's": {"preset": "qwen3", "kv_heads": 2, "dropout": 0.2},
}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def recipe(mesh=None, remat="none", **model):
    sizes = {"layers": 2, "heads": 4, "width": 256, "context": CONTEXT, "dropout": 0.0, **model}
    training = {"steps": STEPS, "batch_tokens": ROWS * CONTEXT, "compile": "unrolled", "remat": remat}
    changes = {"model": sizes, "training": training, "schedule.warmup_steps": 0, "cluster.mesh": mesh or {}}
    return load_recipe("gpt2-tiny", changes)


def make_engine(kernels, *, precision="fp32", accumulation=1, devices=1, **settings):
    return JaxEngine(
        recipe(**settings),
        VOCAB,
        accumulation=accumulation,
        precision=precision,
        devices=jax.devices()[:devices],
        kernels=kernels,
    )


def spread(parameters):
    """Parameters of which none is zero or one throughout, as biases and scales are at first."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda p: (p + 0.02 * random.normal(size=p.shape)).astype(p.dtype), parameters)


@cache
def gradients(kernels, **settings):
    """Loss and gradients of the first batch."""
    engine = make_engine(kernels, **settings)
    state = engine.start()
    state = state._replace(parameters=spread(jax.device_get(state.parameters)))
    batch = engine.put(WINDOWS[0])
    return jax.device_get(jax.jit(make_sums(engine.recipe, engine._training_losses))(state, batch))


def assert_near(tree, expected, tolerance):
    """Each array, relative to its norm. A key's bias has no gradient but rounding: it is left out."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, right), leaf in zip(paths, jax.tree.leaves(tree), strict=True):
        if "key.bias" in jax.tree_util.keystr(path):
            continue
        assert np.linalg.norm(leaf - right) < tolerance * np.linalg.norm(right), path


@pytest.mark.parametrize(
    "name", ["GPT-2's", "nanochat's", *also(*[name for name in RECIPES if name not in ("GPT-2's", "nanochat's")])]
)
def test_loss_and_every_gradient_are_the_plain_ones(name):
    (loss, ours), (right, theirs) = (gradients(kernels, **RECIPES[name]) for kernels in ("fused", "plain"))
    np.testing.assert_allclose(loss, right, rtol=1e-6)
    assert_near(ours, theirs, 1e-5)


@pytest.mark.extended
def test_in_bf16_they_are_within_its_noise():
    exact = gradients("plain")
    ours, theirs = (gradients(kernels, precision="bf16") for kernels in ("fused", "plain"))
    np.testing.assert_allclose(ours[0], exact[0], rtol=1e-3)
    assert_near(ours[1], theirs[1], 0.03)
    assert_near(ours[1], exact[1], 0.03)


@cache
def trained(kernels, **settings):
    """Loss and gradient norm of each step, and the parameters after them."""
    engine = make_engine(kernels, **settings)
    state, numbers = engine.start(), []
    for windows in WINDOWS:
        state, metrics = engine.step(state, engine.put(windows[engine.rows]))
        numbers.append([float(metrics.loss), float(metrics.grad_norm)])
    return np.array(numbers), jax.device_get(state.parameters)


# 4 micro-batches of 2 rows, and 2 of 4 rows on 4 devices, have two rows of weight zero
@pytest.mark.parametrize("split", [{"accumulation": 4}, *also({}, {"accumulation": 2, "devices": 4})], ids=str)
def test_steps_through_the_engine_are_the_plain_ones(split):
    numbers, parameters = trained("fused", **split)
    expected, right = trained("plain")
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    assert_near(parameters, right, 1e-3)


# Which is chosen


def gpu(capability="9.0"):
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.mark.parametrize(
    ("device", "dtype", "mesh", "model", "layers", "chosen"),
    [
        (gpu(), jnp.bfloat16, {}, {}, UNROLLED, "fused"),
        (gpu("8.0"), jnp.bfloat16, {}, {}, UNROLLED, "fused"),
        (gpu(), jnp.bfloat16, {"data": 4}, {}, UNROLLED, "fused"),
        (gpu(), jnp.bfloat16, {}, {"bias": False, "dropout": 0.1}, UNROLLED, "fused"),
        (gpu(), jnp.bfloat16, {}, {}, LayerCompilation(scanned=False, remat="blocks"), "fused"),
        (gpu("7.5"), jnp.bfloat16, {}, {}, UNROLLED, "plain"),  # Triton has no bf16 there
        (gpu(), jnp.float16, {}, {}, UNROLLED, "plain"),
        (gpu(), jnp.float32, {}, {}, UNROLLED, "plain"),
        (gpu(), jnp.bfloat16, {"data": 1, "fsdp": 4}, {}, UNROLLED, "plain"),
        (gpu(), jnp.bfloat16, {"data": 2, "tensor": 2}, {}, UNROLLED, "plain"),
        (gpu(), jnp.bfloat16, {"data": 2, "context": 2}, {}, UNROLLED, "plain"),
        (gpu(), jnp.bfloat16, {}, {"width": 320}, UNROLLED, "plain"),  # GPT-2 XL's 1600 too
        (gpu(), jnp.bfloat16, {}, {"context": 24}, UNROLLED, "plain"),
        (gpu(), jnp.bfloat16, {}, {}, LayerCompilation(scanned=True), "plain"),
        (SimpleNamespace(platform="tpu"), jnp.bfloat16, {}, {}, UNROLLED, "plain"),
        (SimpleNamespace(platform="cpu"), jnp.bfloat16, {}, {}, UNROLLED, "plain"),
    ],
)
def test_kernels_are_fused_where_hardware_numbers_mesh_and_shapes_fit(device, dtype, mesh, model, layers, chosen):
    devices = jax.devices()[:4] if mesh else jax.devices()[:1]
    assert choose_kernels(device, dtype, make_mesh({**mesh}, devices), recipe(**model).model, layers) == chosen


def test_a_jax_without_triton_computes_without_kernels(monkeypatch):
    monkeypatch.setattr("raygpt.engines.jax.kernels.launch.triton", None)
    mesh = make_mesh({}, jax.devices()[:1])
    assert choose_kernels(gpu(), jnp.bfloat16, mesh, recipe().model, UNROLLED) == "plain"


def test_an_engine_says_which_it_uses():
    assert make_engine(None).describe()["kernels"] == "plain"
    assert make_engine("fused").describe()["kernels"] == "fused"


# Accumulation


@pytest.mark.parametrize(("accumulation", "loops"), [(1, 0), (2, 1)])
def test_only_several_micro_batches_need_a_loop(accumulation, loops):
    engine = make_engine("plain", accumulation=accumulation)
    batch = engine.put(WINDOWS[0])
    sums = jax.make_jaxpr(make_sums(engine.recipe, lambda parameters, *_: (parameters["norm.gain"].sum(), 0)))
    assert str(sums(engine.start(), batch)).count("scan[") == loops
