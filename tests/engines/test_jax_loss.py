"""The chunked cross-entropy against Optax's on full logits: values, gradients, and what never exists."""

import re

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from raygpt.engines.chunks import chunk_count, chunk_logits  # noqa: E402
from raygpt.engines.jax.loss import cross_entropy  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROWS, TIME, WIDTH, VOCAB, PADDED = 3, 12, 16, 50, 64


def inputs(dtype=jnp.float32, seed=0):
    """hidden [rows, time, width], table [padded, width], targets and weights [rows, time], those of one row 0."""
    random = np.random.default_rng(seed)
    hidden = jnp.asarray(random.normal(size=(ROWS, TIME, WIDTH)), dtype)
    table = jnp.asarray(random.normal(size=(PADDED, WIDTH)), jnp.float32)
    targets = jnp.asarray(random.integers(0, VOCAB, (ROWS, TIME)), jnp.int32)
    weights = jnp.asarray(random.uniform(0, 2, (ROWS, TIME)), jnp.float32).at[1].set(0.0)
    return hidden, table, targets, weights


def reference(hidden, table, targets, weights):
    """The same on full logits of the real vocabulary alone, in fp32."""
    logits = hidden.astype(jnp.float32) @ table[:VOCAB].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum(), losses.sum(1)


@pytest.mark.parametrize("chunks", [1, 3, *also(2, 4, 6, 12)])
def test_values_and_gradients_are_optaxs_in_any_number_of_chunks(chunks):
    hidden, table, targets, weights = inputs()
    ours = lambda h, t: cross_entropy(h, t, targets, weights, VOCAB, chunks)  # noqa: E731
    theirs = lambda h, t: reference(h, t, targets, weights)  # noqa: E731
    (total, losses), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, table)
    (expected, expected_losses), expected_gradients = jax.value_and_grad(theirs, (0, 1), has_aux=True)(hidden, table)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, right, atol=1e-5)
    np.testing.assert_allclose(ours(hidden, table)[1], expected_losses, rtol=1e-6)  # and without a gradient


def test_a_gradient_from_outside_scales_both_gradients():
    hidden, table, targets, weights = inputs()
    once = jax.grad(lambda h, t: cross_entropy(h, t, targets, weights, VOCAB, 2)[0], (0, 1))(hidden, table)
    thrice = jax.grad(lambda h, t: 3 * cross_entropy(h, t, targets, weights, VOCAB, 2)[0], (0, 1))(hidden, table)
    for single, triple in zip(once, thrice, strict=True):
        np.testing.assert_allclose(triple, 3 * single, rtol=1e-6)


def test_ids_that_only_pad_the_table_never_count():
    hidden, table, targets, weights = inputs()
    loud = table.at[VOCAB:].set(100.0)  # the likeliest ids by far, were they real
    total = lambda t: cross_entropy(hidden, t, targets, weights, VOCAB, 3)[0]  # noqa: E731
    assert total(loud) == total(table)
    gradient = jax.grad(total)(loud)
    assert not np.any(gradient[VOCAB:])
    assert np.all(np.any(gradient[:VOCAB], axis=1))


def test_a_row_of_weight_zero_has_a_loss_but_no_gradient():
    hidden, table, targets, weights = inputs()
    (_, losses), gradient = jax.value_and_grad(cross_entropy, has_aux=True)(hidden, table, targets, weights, VOCAB, 2)
    assert losses[1] > 0
    assert not np.any(gradient[1])
    assert np.any(gradient[0])
    other = cross_entropy(hidden.at[1].set(7.0), table, targets, weights, VOCAB, 2)
    assert other[0] == cross_entropy(hidden, table, targets, weights, VOCAB, 2)[0]


def test_bf16_hidden_states_give_fp32_losses_and_table_gradients():
    hidden, table, targets, weights = inputs(jnp.bfloat16)
    table = table.astype(jnp.bfloat16).astype(jnp.float32)  # so that rounding it changes nothing
    (total, losses), (dhidden, dtable) = jax.value_and_grad(cross_entropy, (0, 1), has_aux=True)(
        hidden, table, targets, weights, VOCAB, 4
    )
    assert (total.dtype, losses.dtype, dtable.dtype) == (jnp.float32,) * 3
    assert dhidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(losses, reference(hidden, table, targets, weights)[1], rtol=1e-6)  # not bf16's 4e-3


@pytest.mark.parametrize("gradient", [False, True])
def test_the_logits_of_all_tokens_never_exist(gradient):
    hidden, table, targets, weights = inputs()
    total = lambda h, t: cross_entropy(h, t, targets, weights, VOCAB, 4)[0]  # noqa: E731
    function = jax.grad(total, (0, 1)) if gradient else total
    chunk, whole = ROWS * TIME // 4 * PADDED, ROWS * TIME * PADDED
    for text in (str(jax.make_jaxpr(function)(hidden, table)), jax.jit(function).lower(hidden, table).as_text()):
        sizes = [np.prod([int(n) for n in re.split("[,x]", shape)]) for shape in shapes(text)]
        assert max(sizes) == max(chunk, PADDED * WIDTH) < whole
    compiled = jax.jit(function).lower(hidden, table).compile().as_text()
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes(compiled)) < whole


def shapes(text):
    """Of every floating-point array in a jaxpr ("f32[3,4]"), StableHLO ("tensor<3x4xf32>") or HLO ("f32[3,4]{1,0}")."""
    return re.findall(r"f32\[([\d,]+)\]", text) + re.findall(r"tensor<([\dx]+)xf32>", text)


@pytest.mark.parametrize(
    ("tokens", "vocab", "count"),
    [
        (12 * 64, 128, 1),  # 0.4 MB: at once
        (8 * 1024, 50304, 2),  # 1.6 GB of logits
        (32 * 1024, 50304, 8),  # 6.6 GB would be 7 chunks, but 8 divides 32768
        (30 * 1000, 50304, 6),
        (7, 2**30, 7),  # no finer than a token
        (2**28, 1, 1),  # just 2^30 bytes
        (2**28 + 1024, 1, 2),
    ],
)
def test_tokens_are_cut_into_the_fewest_equal_chunks_that_stay_below_a_gibibyte(tokens, vocab, count):
    assert chunk_count(tokens, vocab, chunk_logits(vocab, on_cpu=False)) == count


@pytest.mark.parametrize(
    ("tokens", "vocab", "count"), [(12 * 64, 128, 1), (2048, 4096, 4), (2048, 50304, 4), (2**20, 128, 64)]
)
def test_on_a_cpu_a_chunk_stays_in_its_caches_or_has_512_tokens(tokens, vocab, count):
    assert chunk_count(tokens, vocab, chunk_logits(vocab, on_cpu=True)) == count


@pytest.mark.parametrize("shards", [(3, 1), (1, 2), (3, 4)])
def test_tokens_shared_out_over_devices_give_the_same(shards):
    hidden, table, targets, weights = inputs()
    total = lambda h, t, shards: cross_entropy(h, t, targets, weights, VOCAB, 3, shards)  # noqa: E731
    ours, whole = (jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, table, s) for s in (shards, (1, 1)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), ours, whole)
