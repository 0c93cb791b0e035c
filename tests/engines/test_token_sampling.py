"""Tokens drawn from logits: they follow the softmax, each row by its own seed and limits, alike in every library."""

import numpy as np
import pytest

from raygpt.engines import token_sampling
from raygpt.engines.base import SlotInputs

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -2.0, 0.5], dtype=np.float32)


def rows(count, temperature=1.0, top_k=0, top_p=1.0, seeds=None):
    whole, floats = np.zeros(count, np.int32), np.ones(count, np.float32)
    seeds = np.arange(count, dtype=np.int32) if seeds is None else seeds
    return SlotInputs(
        whole, whole > 0, seeds, whole + 3, floats * temperature, whole + top_k, floats * np.float32(top_p)
    )


def drawn(logits, of, xp=np):
    put = (lambda array: xp.from_numpy(array)) if xp.__name__ == "torch" else xp.asarray
    on = SlotInputs(*map(put, of))
    return np.asarray(token_sampling.draw_limited(put(logits), 0, on, xp))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "probabilities"),
    [
        (1.0, 0, 1.0, softmax(LOGITS)),
        (1.0, 100, 1.0, softmax(LOGITS)),
        (0.5, 0, 1.0, softmax(2 * LOGITS)),
        (1.0, 3, 1.0, softmax(np.where(LOGITS >= 0.5, LOGITS, -np.inf))),
        (1.0, 0, 0.7, softmax(np.where(LOGITS >= 1.0, LOGITS, -np.inf))),  # 0.54 + 0.20 reach it
        (1.0, 3, 0.8, softmax(np.where(LOGITS >= 1.0, LOGITS, -np.inf))),  # 0.63 + 0.23 of those three
        (2.0, 2, 1.0, softmax(np.where(LOGITS >= 1.0, LOGITS / 2, -np.inf))),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(temperature, top_k, top_p, probabilities):
    found = drawn(np.tile(LOGITS, (20000, 1)), rows(20000, temperature, top_k, top_p))
    counts, possible = np.bincount(found, minlength=6), probabilities > 0
    assert not counts[~possible].any()
    expected = 20000 * probabilities[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: once in 1000


def test_draws_of_a_seed_differ_from_token_to_token():
    of = rows(20000, seeds=np.zeros(20000, np.int32))._replace(counts=np.arange(20000, dtype=np.int32))
    counts = np.bincount(drawn(np.tile(LOGITS, (20000, 1)), of), minlength=6)
    expected = 20000 * softmax(LOGITS)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.parametrize("top_k", [1, 2, 7, 100])
def test_the_smallest_that_top_k_keeps_is_the_kth_of_the_sorted(top_k):
    scaled = np.random.default_rng(1).normal(size=(5, 100)).astype(np.float32) * 1e3
    scaled[0, :3] = [-np.inf, np.inf, 0.0]
    least = token_sampling.smallest_of_top_k(scaled, np.full(5, top_k, np.int32), np)
    np.testing.assert_array_equal(least, token_sampling.rank(np.sort(scaled)[:, -top_k], np))


def test_a_temperature_of_zero_takes_the_likeliest_that_the_bias_leaves():
    scaled = token_sampling.scale(LOGITS[None], np.array([[-100.0, 0, 0, 0, 0, 0]], np.float32), np.zeros(1), np)
    least = np.full(1, token_sampling.LOWEST, np.int32)
    assert token_sampling.pick(scaled.astype(np.float32), least, rows(1, temperature=0), np).tolist() == [1]


@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_every_library_draws_the_same(library):
    xp = pytest.importorskip(library)
    logits = np.random.default_rng(0).normal(size=(40, 300)).astype(np.float32)
    of = rows(40, 0.8, 50, 0.9)
    np.testing.assert_array_equal(drawn(logits, of, xp), drawn(logits, of))


@pytest.mark.parametrize("draw", [token_sampling.draw, token_sampling.draw_limited])
def test_pytorch_draws_without_a_number_from_the_host_as_a_cuda_graph_must(draw):
    """On the device meta, which has shapes and no numbers: a number that were read would raise an error."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    places = set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            tensors = [leaf for leaf in tree_leaves((arguments, result)) if isinstance(leaf, torch.Tensor)]
            places.update(tensor.device.type for tensor in tensors)
            return result

    logits = torch.empty(3, 50, device="meta")
    numbers = torch.empty(len(SlotInputs._fields), 3, dtype=torch.int32, device="meta")
    with Devices():
        drawn = draw(logits, logits, SlotInputs.unpacked(numbers, torch.float32), torch)
    assert (drawn.shape, places) == ((3,), {"meta"})


def test_rows_are_the_same_after_they_were_packed_into_one_array():
    some = rows(3, temperature=0.7)._replace(top_ps=np.array([1, 0.9, 0.3], np.float32), live=np.array([1, 0, 1], bool))
    for before, after in zip(some, SlotInputs.unpacked(some.packed(), np.float32), strict=True):
        np.testing.assert_array_equal(after, before)
        assert after.dtype == before.dtype
    assert some.limited.tolist() == [False, True, True]
