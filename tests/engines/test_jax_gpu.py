"""The JAX engine on a GPU: its kernels over many steps. Runs only where there is one."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 200, 16, 256, 50257


def windows(count=50):
    """Text that can be learnt: a token often follows from the one before it."""
    chance = np.random.default_rng(0)
    likelihood = 1 / np.arange(1, VOCAB + 1)
    ids = chance.choice(VOCAB, (count, ROWS, CONTEXT + 1), p=likelihood / likelihood.sum())
    follows, is_next = chance.permutation(VOCAB), chance.random(ids.shape) < 0.6
    for now in range(1, CONTEXT + 1):
        ids[..., now] = np.where(is_next[..., now], follows[ids[..., now - 1]], ids[..., now])
    return ids.astype(np.int32)


def make_engine(kernels, precision):
    training = {"steps": STEPS, "batch_tokens": ROWS * CONTEXT}
    changes = {"model.preset": "gpt2", "model.context": CONTEXT, "training": training, "schedule.warmup_steps": 50}
    return JaxEngine(load_recipe("gpt2-tiny", changes), VOCAB, kernels=kernels, precision=precision)


def losses(kernels, precision="bf16"):
    engine = make_engine(kernels, precision)
    state, found, batches = engine.start(), [], windows()
    for step in range(STEPS):
        state, metrics = engine.step(state, engine.put(batches[step % len(batches)]))
        found.append(metrics.loss)
    return np.array(jax.device_get(found))


def test_over_two_hundred_steps_the_kernels_are_as_near_to_fp32_as_the_plain_path_is():
    exact, plain, fused = losses("plain", "fp32"), losses("plain"), losses("fused")
    assert exact[-1] < 0.6 * exact[0]  # it has learnt: there is something to get wrong
    np.testing.assert_allclose(fused[:5], exact[:5], rtol=5e-4)
    rounding, ours = (np.abs(found - exact) / exact for found in (plain, fused))
    assert ours.mean() < 1.5 * rounding.mean() + 1e-4
    assert ours.max() < 2 * rounding.max() + 1e-3
