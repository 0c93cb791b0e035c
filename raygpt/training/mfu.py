"""Model FLOPs utilisation (MFU): the achieved fraction of the hardware's peak."""

import re

# Dense bf16 (fp16 where there is no bf16) FLOP/s by the device's reported name. Our measurements use the H200's; the
# others have not been checked against the makers' data sheets yet. A longer name comes before its prefix.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,  # v6e
    "TPU v6e": 918e12,
}


def peak_flops(device: str) -> float | None:
    """The peak of a device, or None if it is not in the table (a CPU has no useful peak)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if re.match(rf"{name}\b", device)), None)


def mfu(tokens_per_s: float, flops_per_token: int, device: str, devices: int) -> float | None:
    """FLOPs per second that the model needs, divided by the devices' peak."""
    peak = peak_flops(device)
    return None if peak is None else tokens_per_s * flops_per_token / (peak * devices)
