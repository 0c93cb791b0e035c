"""MFU by what a device calls itself."""

import pytest

from raygpt.config import Model
from raygpt.models import describe
from raygpt.planning.devices import DEVICES, device_of
from raygpt.training.mfu import mfu, peak_flops


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),  # begins like an L4
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),  # begins like a v5
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_a_device_is_known_by_its_name(device, teraflops):
    assert peak_flops(device) == teraflops * 1e12


@pytest.mark.parametrize("device", ["cpu", "", "NVIDIA H20", "NVIDIA A10", "NVIDIA L400", "TPU v7", "Radeon"])
def test_an_unknown_device_has_no_peak_and_no_mfu(device):
    assert peak_flops(device) is None
    assert mfu(1000.0, 10**9, device, 1) is None


def test_every_name_of_the_table_finds_its_own_device():
    for device in DEVICES.values():
        assert {device_of(name) for name in device.reported} == {device}


def test_mfu_on_an_h200_is_the_references_formula():
    # REFERENCE.md: tok/s × (6·124.4e6 + 12·12·768·T) / 989e12; nanoGPT's 538 K tok/s are 0.468
    gpt2 = Model(preset="gpt2")
    share = mfu(538_000.0, describe(gpt2, 50257).flops_per_token, "NVIDIA H200", 1)
    assert share == pytest.approx(538e3 * (6 * 124_439_808 + 12 * 12 * 768 * 1024) / 989e12)
    assert share == pytest.approx(0.468, abs=5e-4)
    assert mfu(8 * 538_000.0, describe(gpt2, 50257).flops_per_token, "NVIDIA H200", 8) == pytest.approx(share)
