"""The chunked cross-entropy against PyTorch's on full logits: values, gradients, and what never exists."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from raygpt.engines import chunks as chunks_module  # noqa: E402
from raygpt.engines.torch.loss import chunk_tokens, cross_entropy  # noqa: E402

ROWS, TIME, WIDTH, VOCAB, PADDED = 3, 12, 16, 50, 64


def inputs(dtype=torch.float32):
    """hidden [rows, time, width], table [padded, width], targets and weights [rows, time]: a row and some tokens 0."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, TIME, WIDTH, generator=random).to(dtype).requires_grad_()
    table = torch.randn(PADDED, WIDTH, generator=random).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS, TIME), generator=random, dtype=torch.int32)
    weights = torch.tensor([0.5, 0.0, 2.0])[:, None].repeat(1, TIME)
    weights[2, 3:7] = torch.tensor([0.0, 1.0, 0.0, 0.25])
    return hidden, table, targets, weights


def reference(hidden, table, targets, weights, cap=None):
    """The same on full logits of the real vocabulary alone, in fp32 at least."""
    logits = hidden.to(torch.promote_types(hidden.dtype, torch.float32)) @ table[:VOCAB].T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
    return (losses * weights).sum(), losses.sum(1)


def in_chunks_of(tokens, monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", tokens * PADDED * 4)


@pytest.mark.parametrize("tokens", [1, 5, 12, 13, 36])  # of 5 and 13 there would be a smaller one at the end
def test_values_and_gradients_are_pytorchs_in_chunks_of_any_size(tokens, monkeypatch):
    in_chunks_of(tokens, monkeypatch)
    ours, theirs = inputs(), inputs()
    total, losses = cross_entropy(*ours, VOCAB)
    expected, expected_losses = reference(*theirs)
    torch.testing.assert_close((total, losses), (expected, expected_losses))
    (3 * total).backward()
    (3 * expected).backward()
    for mine, right in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    assert not ours[0].grad[1].any(), "a row of weight 0 has no gradient"
    assert not ours[0].grad[2, [3, 5]].any(), "nor has a token"
    assert not ours[1].grad[VOCAB:].any(), "ids that only pad the table are never predicted"
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(*ours, VOCAB), (expected, expected_losses))


@pytest.mark.parametrize("cap", [0.5, 3.0, 15.0])
def test_capped_values_and_gradients_are_pytorchs(cap, monkeypatch):
    in_chunks_of(12, monkeypatch)
    ours, theirs = ([x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
                     for x in inputs()] for _ in range(2))  # fmt: skip
    total, losses = cross_entropy(*ours, VOCAB, cap)
    expected, expected_losses = reference(*theirs, cap)
    torch.testing.assert_close((total, losses), (expected, expected_losses), rtol=1e-12, atol=0)
    total.backward()
    expected.backward()
    for mine, right in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(*ours, VOCAB, cap), (expected, expected_losses))


@pytest.mark.parametrize("cap", [None, 15.0])
def test_bf16_logits_make_fp32_losses(cap):
    ours, theirs = inputs(torch.bfloat16), inputs(torch.bfloat16)
    total, losses = cross_entropy(*ours, VOCAB, cap)
    expected, expected_losses = reference(*theirs, cap)
    assert (total.dtype, losses.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=0)
    total.backward()
    expected.backward()
    assert (ours[0].grad.dtype, ours[1].grad.dtype) == (torch.bfloat16, torch.float32)
    for mine, right in zip(ours[:2], theirs[:2], strict=True):
        assert float((mine.grad - right.grad).norm() / right.grad.norm()) < 0.02


class Largest(TorchDispatchMode):
    """Watches for the largest tensor that comes into being."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("training", [True, False])
def test_the_logits_of_all_tokens_never_exist(training, monkeypatch):
    in_chunks_of(4, monkeypatch)
    with Largest() as seen, torch.set_grad_enabled(training):
        total, _ = cross_entropy(*inputs(), VOCAB)
        if training:
            total.backward()
    assert seen.size == PADDED * WIDTH  # the table, or its gradient; a chunk's logits are a quarter of that
    assert seen.size < ROWS * TIME * VOCAB


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk"),
    [
        (12 * 64, 128, 12 * 64),  # 0.4 MB: at once
        (8 * 1024, 50304, 4 * 1024),  # 1.6 GB of logits
        (32 * 1024, 50304, 4096),  # 6.6 GB: eight equal chunks
        (2**28, 1, 2**28),  # just 2^30 bytes
    ],
)
def test_on_a_gpu_a_chunks_logits_stay_below_a_gibibyte(tokens, vocab, chunk):
    assert chunk_tokens(tokens, vocab, on_gpu=True) == chunk


def test_training_on_a_gpu_fewer_and_larger_chunks_add_to_the_tables_gradient():
    assert chunk_tokens(64 * 1024, 50304, on_gpu=True, training=True) == 16 * 1024  # 1.6 GB in 16 bits; else 13 chunks


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk"),
    [(12 * 64, 128, 12 * 64), (4096, 4096, 512), (2048, 50304, 512), (2**20, 128, 2**14)],
)
def test_on_a_cpu_a_chunk_stays_in_its_caches_or_has_512_tokens(tokens, vocab, chunk):
    assert chunk_tokens(tokens, vocab, on_gpu=False, training=True) == chunk
