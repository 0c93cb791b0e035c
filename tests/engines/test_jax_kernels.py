"""Each fused kernel gives its plain twin's values and gradients, interpreted on a CPU."""

import importlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax import layers, rope  # noqa: E402
from raygpt.engines.jax.kernels import norm_rotate, resident_loss  # noqa: E402
from raygpt.engines.jax.kernels.add_norm import add_norm, add_norm_plain  # noqa: E402
from raygpt.engines.jax.kernels.bias_gelu import bias_gelu, bias_gelu_plain  # noqa: E402
from raygpt.engines.jax.kernels.cross_entropy import (  # noqa: E402
    cross_entropy,
    loss_and_gradient,
    loss_and_gradient_plain,
)
from raygpt.engines.jax.kernels.launch import Grid  # noqa: E402
from raygpt.engines.jax.loss import cross_entropy as chunked_cross_entropy  # noqa: E402

BF16, F32 = jnp.bfloat16, jnp.float32
NOISE = {F32: 2e-6, BF16: 5e-3}  # relative to an array's norm; bf16 rounds to 1 in 256
ROWS, WIDTH = 48, 512
UNEVEN = Grid(programs=10, warps=2, unroll=2)  # 12 steps for 5 or 10 programs
kernel_modules = {
    name: importlib.import_module(f"raygpt.engines.jax.kernels.{name}")
    for name in ("add_norm", "bias_gelu", "cross_entropy")
}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def draw(seed, *shape, dtype=F32, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def distance(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_twins(fused, plain, inputs, cotangents, tolerance):
    """Values and gradients have the same shapes and kinds, and agree."""

    def both(function, inputs, cotangents):
        value, pull = jax.vjp(function, *inputs)
        return jax.tree.leaves((value, pull(cotangents)))

    pairs = zip(*(jax.jit(partial(both, f))(inputs, cotangents) for f in (fused, plain)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert distance(ours, theirs) < tolerance, number


@pytest.fixture(params=["as it is", "uneven"])
def dealing(request, monkeypatch):
    """How rows are dealt out to programs: as they always are, or to some programs more than to others."""
    if request.param == "uneven":
        for name in ("add_norm", "bias_gelu"):
            for direction in ("FORWARD", "BACKWARD"):
                monkeypatch.setattr(kernel_modules[name], direction, UNEVEN)
        jax.clear_caches()


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_add_norm_equals_its_twin(dtype):
    arrays = [draw(seed, ROWS, WIDTH, dtype=dtype) for seed in range(4)]
    inputs = *arrays[:2], *(draw(seed, WIDTH) for seed in (4, 5, 6))
    ours, theirs = (lambda *a, f=f: f(*a, 1e-5) for f in (add_norm, add_norm_plain))
    assert_twins(ours, theirs, inputs, tuple(arrays[2:]), NOISE[dtype])


@pytest.mark.usefixtures("dealing")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bias_gelu_equals_its_twin(dtype):
    inputs = draw(0, ROWS, WIDTH, dtype=dtype, scale=2), draw(1, WIDTH)
    assert_twins(bias_gelu, bias_gelu_plain, inputs, draw(2, ROWS, WIDTH, dtype=dtype), NOISE[dtype])


def test_the_norms_epsilon_is_the_models():
    small = draw(0, 16, 256, scale=1e-3)
    zeros, ones = jnp.zeros(256), jnp.ones(256)
    for epsilon in (1e-6, 1e-5):
        normed = add_norm(small, jnp.zeros_like(small), zeros, ones, zeros, epsilon)[1]
        right = (small - small.mean(1, keepdims=True)) / np.sqrt(small.var(1, keepdims=True) + epsilon)
        np.testing.assert_allclose(normed, right, atol=1e-5)


def test_gelu_keeps_to_its_limits_far_from_zero():
    x = jnp.asarray([[-1e4, -100.0, -10.0, 0.0, 10.0, 100.0, 1e4, 3e38] * 32] * 16, BF16)
    value, pull = jax.vjp(lambda x: bias_gelu(x, jnp.zeros(256)), x)
    np.testing.assert_allclose(np.asarray(value, np.float32), np.maximum(np.asarray(x, np.float32), 0), atol=1e-30)
    slope = np.asarray(pull(jnp.ones_like(x))[0], np.float32)[0, :7]
    np.testing.assert_allclose(slope, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-30)


@pytest.mark.parametrize(("vocab", "padded"), [(2100, 2176), *also((50, 128), (256, 256), (1500, 1536))])
@pytest.mark.parametrize(("warps", "unroll", "dtype"), [(16, 4, BF16), (1, 2, F32)])
def test_loss_and_gradient_equal_their_twins(vocab, padded, warps, unroll, dtype, monkeypatch):
    monkeypatch.setattr(kernel_modules["cross_entropy"], "WARPS", warps)
    monkeypatch.setattr(kernel_modules["cross_entropy"], "UNROLL", unroll)
    logits = draw(0, 5, padded, dtype=dtype, scale=3).at[:, vocab:].set(100)  # the likeliest ids by far, were they real
    targets = jnp.asarray([0, vocab - 1, vocab // 2, 7, 8], jnp.int32)
    inputs = logits, targets, jnp.asarray([1.0, 0.5, 2.0, 0.0, 1.0])
    for softcap in (None, 5.0):
        losses, gradient = jax.jit(partial(loss_and_gradient, vocab=vocab, softcap=softcap))(*inputs)
        want_losses, want_gradient = loss_and_gradient_plain(*inputs, vocab, softcap)
        np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
        assert distance(gradient, want_gradient) < NOISE[dtype] * 2
        assert not np.any(np.asarray(gradient[:, vocab:]))
        assert not np.any(np.asarray(gradient[3]))  # a row of weight zero


@pytest.mark.parametrize(
    ("vocab", "padded", "softcap"), [(2100, 2176, 5.0), *also((200, 256, None), (2100, 2176, None))]
)
def test_the_loss_that_stays_in_shared_memory_is_the_same(vocab, padded, softcap, monkeypatch):
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="JAX's own way to interpret it")
    monkeypatch.setattr(resident_loss, "UNROLL", 2)
    logits = draw(0, 3, padded, dtype=BF16, scale=3).at[:, vocab:].set(100)
    inputs = logits, jnp.asarray([vocab // 2, vocab - 1, 7], jnp.int32), jnp.asarray([1.0, 0.5, 0.0])
    losses, gradient = resident_loss.resident_loss(*inputs, vocab, softcap, interpret=params.InterpretGPUParams())
    want_losses, want_gradient = loss_and_gradient_plain(*inputs, vocab, softcap)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    assert distance(gradient, want_gradient) < NOISE[BF16]
    assert not np.any(np.asarray(gradient[:, vocab:]))


def test_it_is_for_hopper_in_16_bits_and_rows_that_fit_and_this_jax_compiles_it():
    hopper, ampere = (SimpleNamespace(platform="gpu", compute_capability=version) for version in ("9.0", "8.0"))
    assert resident_loss.can_run(hopper, BF16, 50304)
    assert not resident_loss.can_run(ampere, BF16, 50304)
    assert not resident_loss.can_run(hopper, F32, 50304)
    assert not resident_loss.can_run(hopper, BF16, 50257)
    assert not resident_loss.can_run(hopper, BF16, 65536)


def test_a_jax_that_does_not_compile_it_gets_the_other(monkeypatch):
    monkeypatch.delattr(resident_loss.mosaic, "kernel")
    jax.clear_caches()  # of what was traced with it
    assert not resident_loss.compiles.__wrapped__()


def qk_normed(head=64, **settings):
    settings = {"norm": "rms", "position": "rope", "qk_norm": True, "bias": False, "context": 64, **settings}
    return Model(heads=2, width=2 * head, **settings)


@pytest.mark.parametrize(("head", "with_gain"), [(64, True), *also((128, False), (128, True))])
def test_queries_normed_and_rotated_at_once_are_the_same(head, with_gain, monkeypatch):
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="JAX's own way to interpret it")
    monkeypatch.setattr(norm_rotate, "FEWEST_PROGRAMS", 2)  # so that a program has several tiles
    model = qk_normed(head)
    rotation = rope.rotation(model, jnp.arange(64), BF16)
    cos, sin = (angles[:, 0] for angles in rotation)
    x, d_rotated = draw(0, 2, 64, 2, head, dtype=BF16), draw(1, 2, 64, 2, head, dtype=BF16)
    gain = 1 + 0.3 * draw(2, head) if with_gain else None

    def fused(x, gain):
        return norm_rotate.norm_rotate(x, cos, sin, gain, model.norm_epsilon, params.InterpretGPUParams())

    def plain(x, gain):
        return layers.norm_and_rotate({} if gain is None else {"q.gain": gain}, "q", x, model, rotation)

    assert_twins(fused, plain, (x, gain), d_rotated, NOISE[BF16])


def test_they_are_for_hopper_in_16_bits_and_models_that_do_both():
    hopper, ampere = (SimpleNamespace(platform="gpu", compute_capability=version) for version in ("9.0", "8.0"))
    assert norm_rotate.can_run(hopper, BF16, 64, qk_normed())
    assert not norm_rotate.can_run(ampere, BF16, 64, qk_normed())
    assert not norm_rotate.can_run(hopper, F32, 64, qk_normed())
    assert not norm_rotate.can_run(hopper, BF16, 48, qk_normed())
    for other in ({"norm": "layer"}, {"qk_norm": False}, {"head": 32}):
        assert not norm_rotate.can_run(hopper, BF16, 64, qk_normed(**other))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunks", [6, *also(1)])
def test_cross_entropy_is_the_chunked_one(chunks, dtype):
    rows, time, width, vocab, padded = 3, 4, 32, 500, 512
    hidden, table = draw(0, rows * time, width, dtype=dtype), draw(1, padded, width, scale=0.3)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, vocab, (rows, time)), jnp.int32)
    weights = jnp.asarray(np.random.default_rng(3).uniform(0, 2, (rows, time)), jnp.float32).at[1].set(0.0)

    def ours(hidden, table):
        total, losses = cross_entropy(hidden, table, targets.reshape(-1), weights.reshape(-1), vocab, chunks)
        return total, losses.reshape(rows, time).sum(1)

    def theirs(hidden, table):
        return chunked_cross_entropy(hidden.reshape(rows, time, width), table, targets, weights, vocab, 1)

    cotangents = jnp.float32(2.0), jnp.zeros(rows)
    assert_twins(ours, theirs, (hidden, table), cotangents, 2 * NOISE[dtype])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: bias_gelu(draw(0, 16, 300), jnp.zeros(300)), "width 300 is not a multiple of 256"),
        (lambda: bias_gelu(draw(0, 15, 256), jnp.zeros(256)), "15 rows are not a multiple of the 8"),
        (lambda: add_norm(*[draw(0, 3, 300)] * 2, *[jnp.zeros(300)] * 3, 1e-5), "width 300 is not a multiple"),
    ],
)
def test_shapes_that_do_not_tile_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
