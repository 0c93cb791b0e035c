"""The Triton kernel of the loss against its plain twin: interpreted on a CPU where Triton is installed, or on a GPU."""

import inspect
import os
import runpy
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="needs Triton, which PyTorch for GPUs brings along")

from raygpt.engines.torch import kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("vocab", "padded"), [(50, 128), (256, 256), (2100, 2176)])
@pytest.mark.parametrize(
    ("dtype", "losses_near", "gradient_near"), [(torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-5, 1e-2)]
)
@pytest.mark.parametrize("cap", [None, 15.0, 2.0])
def test_loss_and_gradient_are_the_plain_ones(vocab, padded, dtype, losses_near, gradient_near, cap, monkeypatch):
    monkeypatch.setattr(kernels, "can_run", lambda logits: True)
    monkeypatch.setattr(kernels, "TILE", 256)
    monkeypatch.setattr(kernels, "WARPS", 1)
    random = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, padded, generator=random)).to(dtype)
    logits[:, vocab:] = 100  # the likeliest ids by far, were they real
    targets = torch.tensor([0, vocab - 1, vocab // 2, 7, 8], dtype=torch.int32)
    scales = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0])
    inputs = [x.to(DEVICE) for x in (logits, targets, scales)]
    plain = [x.clone() for x in inputs]
    want_losses, want = kernels.loss_and_gradient_plain(*plain, vocab, cap)
    losses, gradient = kernels.loss_and_gradient(*inputs, vocab, cap)
    assert gradient is inputs[0]  # in the logits' own memory
    torch.testing.assert_close(losses, want_losses, rtol=losses_near, atol=1e-6)
    distance = (gradient - want).float().norm() / want.float().norm()
    assert distance < gradient_near
    assert not gradient[:, vocab:].any()
    assert not gradient[3].any()  # a row of weight zero


def test_pytorchs_compiler_can_define_the_kernel_from_its_text_alone(tmp_path):
    text = textwrap.dedent(inspect.getsource(kernels._kernel.fn))
    file = tmp_path / "kernel.py"  # as that compiler does it
    file.write_text(f"import triton\nimport triton.language as tl\n{text}")
    assert callable(runpy.run_path(str(file))["_kernel"].fn)
