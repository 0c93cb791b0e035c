"""The Triton kernels against their plain twins: interpreted on a CPU where Triton is installed, or on a GPU."""

import inspect
import os
import runpy
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="needs Triton, which PyTorch for GPUs brings along")

from raygpt.config import Model  # noqa: E402
from raygpt.engines.torch import layers, rope  # noqa: E402
from raygpt.engines.torch.kernels import loss, norm_rotate  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("vocab", "padded"), [(50, 128), (256, 256), (2100, 2176)])
@pytest.mark.parametrize(
    ("dtype", "losses_near", "gradient_near"), [(torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-5, 1e-2)]
)
@pytest.mark.parametrize("cap", [None, 15.0, 2.0])
def test_loss_and_gradient_are_the_plain_ones(vocab, padded, dtype, losses_near, gradient_near, cap, monkeypatch):
    monkeypatch.setattr(loss, "can_run", lambda logits: True)
    monkeypatch.setattr(loss, "TILE", 256)
    monkeypatch.setattr(loss, "WARPS", 1)
    random = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, padded, generator=random)).to(dtype)
    logits[:, vocab:] = 100  # the likeliest ids by far, were they real
    targets = torch.tensor([0, vocab - 1, vocab // 2, 7, 8], dtype=torch.int32)
    scales = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0])
    inputs = [x.to(DEVICE) for x in (logits, targets, scales)]
    plain = [x.clone() for x in inputs]
    want_losses, want = loss.loss_and_gradient_plain(*plain, vocab, cap)
    losses, gradient = loss.loss_and_gradient(*inputs, vocab, cap)
    assert gradient is inputs[0]  # in the logits' own memory
    torch.testing.assert_close(losses, want_losses, rtol=losses_near, atol=1e-6)
    distance = (gradient - want).float().norm() / want.float().norm()
    assert distance < gradient_near
    assert not gradient[:, vocab:].any()
    assert not gradient[3].any()  # a row of weight zero


@pytest.mark.parametrize(("heads", "kv_heads", "head"), [(2, 2, 128), (4, 2, 64)])
@pytest.mark.parametrize("norm_gain", [False, True])
def test_queries_and_keys_are_normed_and_rotated_as_by_the_plain_layers(heads, kv_heads, head, norm_gain, monkeypatch):
    model = Model(heads=heads, width=heads * head, norm="rms", norm_gain=norm_gain, bias=False)
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random).to(DEVICE)  # noqa: E731
    widths = [heads * head, kv_heads * head, kv_heads * head]
    linear = [torch.nn.Linear(model.width, width, bias=False).to(DEVICE) for width in widths]
    norms = layers.Norm(head, model).to(DEVICE), layers.Norm(head, model).to(DEVICE)
    for norm in norms:
        if norm.weight is not None:
            norm.weight.data = 1 + 0.3 * draw(head)
    x, rotation = (
        draw(3, 32, model.width),
        rope.rotations(torch.arange(32, device=DEVICE), head, 1e4, 1.0, torch.float32),
    )
    weights = [draw(3, 32, width // head, head) for width in widths]

    def both(can_run):
        monkeypatch.setattr(norm_rotate, "can_run", lambda *_: can_run)
        own = x.clone().requires_grad_()
        made = layers.attention_inputs(own, linear, head, norms, rotation)
        sum((y * weight).sum() for y, weight in zip(made, weights, strict=True)).backward()
        parameters = [parameter for module in (*linear, *norms) for parameter in module.parameters()]
        gradients = [own.grad, *(parameter.grad.clone() for parameter in parameters)]
        for parameter in parameters:
            parameter.grad = None
        return [*made, *gradients]

    for got, want in zip(both(can_run=True), both(can_run=False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "name"), [(loss, "_kernel"), (norm_rotate, "_forward_kernel"), (norm_rotate, "_backward_kernel")]
)
def test_pytorchs_compiler_can_define_the_kernel_from_its_text_alone(module, name, tmp_path):
    text = textwrap.dedent(inspect.getsource(getattr(module, name).fn))
    file = tmp_path / "kernel.py"  # as that compiler does it
    file.write_text(f"import triton\nimport triton.language as tl\n{text}")
    assert callable(runpy.run_path(str(file))[name].fn)
