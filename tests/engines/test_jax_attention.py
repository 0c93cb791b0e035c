"""Attention against the formula, written out with loops in NumPy."""

import re

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax.attention import Cache, choose_attention, cudnn, splash, triton, xla  # noqa: E402
from raygpt.engines.jax.kernels import launch  # noqa: E402
from raygpt.engines.jax.sharding import make_mesh  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SHAPES = [(1, 1, 1, 4), (2, 7, 3, 5), (3, 16, 2, 8)]  # rows, time, heads, head_dim


def draw(shape, dtype=jnp.float32, seed=0):
    """Query, key and value."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, *shape)), dtype)


def reference(query, key, value):
    """Token by token: softmax(q·k / √d) over the past and itself."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    rows, time, heads, size = query.shape
    mixed = np.zeros(query.shape)
    for row in range(rows):
        for head in range(heads):
            for now in range(time):
                scores = [query[row, now, head] @ key[row, past, head] / np.sqrt(size) for past in range(now + 1)]
                weights = np.exp(scores) / np.exp(scores).sum()
                mixed[row, now, head] = sum(weights[past] * value[row, past, head] for past in range(now + 1))
    return mixed


@pytest.mark.parametrize("shape", SHAPES)
def test_xla_computes_the_formula(shape):
    query, key, value = draw(shape)
    np.testing.assert_allclose(xla(query, key, value), reference(query, key, value), atol=1e-6)


def test_a_token_sees_itself_and_the_past_and_nothing_later():
    query, key, value = draw((1, 6, 2, 4))
    before = xla(query, key, value)
    for now in range(6):
        after = xla(query, key.at[:, now].add(1.0), value.at[:, now].add(1.0))
        np.testing.assert_array_equal(after[:, :now], before[:, :now])
        assert np.all(np.abs(after[:, now:] - before[:, now:]).max((0, 2, 3)) > 1e-3)


def test_bf16_goes_in_and_out_but_softmax_is_taken_in_fp32():
    query, key, value = draw((2, 16, 2, 8), jnp.bfloat16)
    mixed = xla(query, key, value)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(mixed.astype(np.float32), reference(query, key, value), atol=2e-2)
    exponentials = re.findall(r":(\w+)\[[\d,]+\] = exp ", str(jax.make_jaxpr(xla)(query, key, value)))
    assert exponentials == ["f32"]


def test_scores_far_beyond_bf16s_precision_are_told_apart():
    # 256 and 257 are one number in bf16: rounded scores would give equal weights
    query = jnp.full((1, 2, 1, 1), 1.0, jnp.bfloat16)
    key = jnp.array([256.0, 256.0], jnp.bfloat16).reshape(1, 2, 1, 1)
    two = jnp.concatenate([key, jnp.array([0.0, 1.0], jnp.bfloat16).reshape(1, 2, 1, 1)], -1)  # 256 + 0, 256 + 1
    query = jnp.concatenate([query, query], -1)
    value = jnp.array([0.0, 1.0], jnp.bfloat16).reshape(1, 2, 1, 1)
    mixed = xla(query, two, jnp.concatenate([value, value], -1))
    expected = 1 / (1 + np.exp(-1 / np.sqrt(2)))
    np.testing.assert_allclose(float(mixed[0, 1, 0, 0]), expected, atol=4e-3)


@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 2, 1], [7]])
def test_with_a_cache_every_position_is_as_without(pieces):
    query, key, value = draw((2, 7, 3, 4))
    whole = xla(query, key, value)
    cache = Cache(jnp.full((2, 3, 9, 4), 100.0), jnp.full((2, 3, 9, 4), 100.0))  # what is not written yet is not seen
    start = 0
    for length in pieces:
        now = slice(start, start + length)
        mixed = cache.attend(query[:, now], key[:, now], value[:, now], start)
        cache = cache.updated(key[:, now], value[:, now], start)
        np.testing.assert_allclose(mixed, whole[:, now], atol=1e-6)
        start += length


# On several devices, by JAX's kernels for TPUs and GPUs


MESH = {"data": 2, "fsdp": 2, "tensor": 2, "context": 1}


@pytest.mark.parametrize(
    ("kernel", "time", "size"), [(splash, 128, 64), (triton, 256, 64), *also((splash, 384, 64), (splash, 256, 80))]
)
def test_a_kernel_computes_the_formula_and_its_gradients(kernel, time, size):
    query, key, value = draw((4, time, 2, size))
    towards = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    mixed, back = jax.vjp(jax.jit(kernel(make_mesh(MESH), interpret=True)), query, key, value)
    expected, right = jax.vjp(xla, query, key, value)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    for gradient, theirs in zip(back(towards), right(towards), strict=True):
        np.testing.assert_allclose(gradient, theirs, atol=2e-5)


@pytest.mark.parametrize("kernel", [splash, triton])
def test_a_kernel_keeps_rows_and_heads_where_they_are(kernel):
    mesh = make_mesh(MESH)
    place = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor", None))
    placed = [jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.float32, sharding=place)] * 3
    compiled = jax.jit(kernel(mesh, interpret=True)).lower(*placed).compile()
    assert compiled.output_shardings.is_equivalent_to(place, 4)
    assert not re.search("all-(gather|reduce|to-all)", compiled.as_text())


@pytest.mark.parametrize("kv_heads", [4, *also(2)])
def test_splash_of_rows_that_devices_share_computes_the_formula_and_gathers_keys_and_values_alone(kv_heads):
    mesh = make_mesh({"data": 2, "fsdp": 1, "tensor": 2, "context": 2})
    query, key, value = draw((2, 256, 4, 64))
    key, value = key[:, :, :kv_heads], value[:, :, :kv_heads]
    towards = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    attention = jax.jit(splash(mesh, interpret=True))
    mixed, back = jax.vjp(attention, query, key, value)
    expected, right = jax.vjp(xla, query, key, value)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    for gradient, theirs in zip(back(towards), right(towards), strict=True):
        np.testing.assert_allclose(gradient, theirs, atol=2e-5)
    place = NamedSharding(mesh, P(("data", "fsdp"), "context", "tensor", None))
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in (query, key, value)]
    compiled = attention.lower(*placed).compile()
    assert compiled.output_shardings.is_equivalent_to(place, 4)
    exchanged = re.findall(r"(all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text())
    assert set(exchanged) == {"all-gather"}


# The choice


class Device:
    def __init__(self, platform, capability="9.0"):
        self.platform, self.compute_capability = platform, capability


def chosen(platform, dtype=jnp.bfloat16, capability="9.0", mesh=None, deterministic=False, **model):
    sizes = {"heads": 4, "width": 256, "context": 256, **model}
    mesh = make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "context": 1, **(mesh or {})})
    return choose_attention(Device(platform, capability), dtype, mesh, Model(**sizes), deterministic)[1]


def test_each_device_gets_the_kernel_it_has():
    assert chosen("gpu") == chosen("gpu", jnp.float16) == chosen("gpu", capability="8.0") == "cuDNN"
    assert chosen("tpu") == chosen("tpu", mesh={"tensor": 4}) == "Splash"
    assert chosen("cpu") == "XLA"


def test_cudnns_backward_pass_adds_up_in_any_order_so_another_kernel_is_the_deterministic_one():
    assert chosen("gpu", deterministic=True) == "Triton"
    assert chosen("gpu", context=192, deterministic=True) == "XLA"  # blocks are multiples of 128
    assert chosen("gpu", jnp.float32, deterministic=True) == chosen("cpu", deterministic=True) == "XLA"
    assert chosen("tpu", deterministic=True) == "Splash"


def test_a_jax_without_triton_computes_without_it(monkeypatch):
    monkeypatch.setattr(launch, "triton", None)
    assert chosen("gpu") == "cuDNN"
    assert chosen("gpu", deterministic=True) == "XLA"


def test_what_a_kernel_cannot_do_is_left_to_xla():
    assert chosen("gpu", jnp.float32) == "XLA"
    assert chosen("gpu", jnp.float16, "7.5") == "XLA"  # a T4
    assert chosen("gpu", mesh={"context": 2}) == "XLA"  # a row on two devices
    assert chosen("tpu", mesh={"context": 2}) == "Splash"
    assert chosen("tpu", mesh={"context": 4}) == "XLA"  # 64 of its tokens on each
    assert chosen("gpu", heads=4, width=80) == "XLA"  # heads of 20
    assert chosen("gpu", heads=1, width=256) == "cuDNN"
    assert chosen("gpu", heads=1, width=264) == "XLA"
    assert chosen("gpu", capability="8.9", heads=1, width=128) == "cuDNN"
    assert chosen("gpu", capability="8.9", heads=1, width=136) == "XLA"
    assert chosen("tpu", context=192) == "XLA"  # blocks are multiples of 128
    assert chosen("tpu", heads=2, mesh={"tensor": 4}) == "XLA"


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_cudnn_computes_the_formula():
    query, key, value = draw((2, 64, 2, 64), jnp.bfloat16)
    np.testing.assert_allclose(
        cudnn(query, key, value).astype(np.float32), reference(query, key, value), atol=2e-2, rtol=2e-2
    )
