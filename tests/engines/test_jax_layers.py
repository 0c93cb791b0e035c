"""However the layers are compiled and whatever is computed again: the same numbers, in less memory."""

from functools import cache

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

LAYERS, ROWS, CONTEXT, VOCAB = 3, 4, 32, 50
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, CONTEXT + 1)).astype(np.int32)
WAYS = [(how, remat) for how in ("scanned", "unrolled") for remat in ("none", "products", "blocks")]


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def lowered(how, remat):
    settings = {
        "model": {"layers": LAYERS, "heads": 2, "width": 16, "context": CONTEXT, "dropout": 0.2},
        "training": {"batch_tokens": ROWS * CONTEXT, "compile": how, "remat": remat},
    }
    engine = JaxEngine(load_recipe("gpt2-tiny", settings), VOCAB, devices=jax.devices()[:1], precision="fp64")
    return engine, engine._step.lower(engine._shapes, engine.put(WINDOWS[0]))


@cache
def trained(how, remat):
    """Loss and gradient norm of two steps, and the parameters after them."""
    numbers = []
    with jax.enable_x64(True):
        engine, _ = lowered(how, remat)
        state = engine.start()
        for windows in WINDOWS:
            state, metrics = engine.step(state, engine.put(windows))
            numbers.append([metrics.loss, metrics.grad_norm])
        return np.array(numbers), jax.device_get(state.parameters)


@pytest.mark.parametrize(("how", "remat"), [WAYS[-1], *also(*WAYS[1:-1])])
def test_losses_gradients_and_parameters_are_the_same(how, remat):
    numbers, parameters = trained(how, remat)
    expected, right = trained(*WAYS[0])
    np.testing.assert_allclose(numbers, expected, rtol=1e-12)
    for ours, theirs in zip(jax.tree.leaves(parameters), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.extended
def test_what_is_computed_again_is_not_kept():
    none, products, blocks = (temporary(remat) for remat in ("none", "products", "blocks"))
    stream = ROWS * CONTEXT * 16 * 8  # bytes of one array of the model's width
    scores = 2 * ROWS * CONTEXT**2 * 8
    assert none - products > LAYERS * (scores + 4 * stream)  # attention's weights and GELU's output, of all layers
    assert products - blocks > LAYERS * 5 * stream  # Q, K, V, the projection and, but for one layer's, MLP before GELU


def temporary(remat):
    """Bytes beside state and batch."""
    with jax.enable_x64(True):
        return lowered("scanned", remat)[1].compile().memory_analysis().temp_size_in_bytes


def test_scanned_layers_are_written_once_and_unrolled_ones_each():
    with jax.enable_x64(True):
        programs = {how: lowered(how, "none")[1].as_text() for how in ("scanned", "unrolled")}
    forward = f"tensor<16x64xf64>) -> tensor<{ROWS}x{CONTEXT}x64xf64>"  # the MLP's first product
    assert {how: text.count(forward) for how, text in programs.items()} == {"scanned": 1, "unrolled": LAYERS}
