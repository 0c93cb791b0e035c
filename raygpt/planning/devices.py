"""Accelerators: what each can compute, hold and send, and where these numbers come from.

`peak` is dense bf16 FLOP/s (fp16 where there is no bf16), `fp32` that of fp32 matrix products as the engines compute
them: TF32 on NVIDIA from Ampere on. `link` is what a device sends in a second to the others of its node or slice, in
one direction, all links together; `network` what it sends beyond: a GPU if its node has a port of 400 Gbit/s for each.
Memory is what the maker states, or a driver reports; engines can use a part of it (`USABLE`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raygpt.errors import RaygptError

GB, GIB, TERA = 10**9, 2**30, 10**12
Platform = Literal["cpu", "gpu", "tpu"]
# Of the memory that a maker states, what programs can have: an H200 of 141 GB reports 139.8 GiB, of which JAX takes
# 92 % (engines/jax/processes.py); CUDA's context is about half a GiB.
USABLE = {("gpu", "jax"): 0.92, ("gpu", "torch"): 0.99, ("tpu", "jax"): 0.98}
# TFLOP/s of fp64 products, with tensor cores where there are any for them, by NVIDIA's data sheets.
FP64 = {"v100": 7.8, "a100-40": 19.5, "a100-80": 19.5, "h100": 67.0, "h200": 67.0}

_SHEET = "NVIDIA's data sheet"
_TPU_PAGE = "cloud.google.com/tpu/docs, system architecture; network: jax-ml.github.io/scaling-book"


@dataclass(frozen=True)
class Device:
    """One kind of accelerator."""

    name: str
    platform: Platform
    peak: float  # FLOP/s
    fp32: float
    memory: int  # bytes
    bandwidth: float  # bytes/s, of its memory
    link: float  # bytes/s
    network: float
    source: str
    reported: tuple[str, ...] = ()  # the names that drivers give it, longest first where one begins another
    capability: float = 9.0  # NVIDIA's compute capability
    per_node: int = 8  # devices that share `link`; of a TPU, all of a slice do

    def flops(self, precision: str) -> float:
        if precision != "fp64":
            return self.fp32 if precision == "fp32" else self.peak
        if self.platform == "cpu":
            return self.fp32 / 2
        if self.name not in FP64:
            raise RaygptError(
                f"model.precision: how fast {self.name} computes in fp64 is not known; write fp32, or plan for one of "
                f"{', '.join(FP64)}"
            )
        return FP64[self.name] * TERA

    def usable_memory(self, engine: str) -> int:
        """Bytes that an engine can have."""
        return int(self.memory * USABLE.get((self.platform, engine), 1.0))


def _gpu(
    name: str, peak: float, fp32: float, memory: float, bandwidth: float, link: float, capability: float,
    *reported: str, source: str, network: float = 50, per_node: int = 8,
) -> Device:  # fmt: skip
    """TFLOP/s, GiB, GB/s."""
    return Device(
        name,
        "gpu",
        peak * TERA,
        fp32 * TERA,
        int(memory * GIB),
        bandwidth * GB,
        link * GB,
        network * GB,
        source,
        reported,
        capability,
        per_node,
    )


def _tpu(
    name: str, peak: float, memory: float, bandwidth: float, link: float, network: float, *reported: str
) -> Device:
    """TFLOP/s, GiB, GB/s. fp32 products take six passes of bf16."""
    return Device(
        name,
        "tpu",
        peak * TERA,
        peak / 6 * TERA,
        int(memory * GIB),
        bandwidth * GB,
        link * GB,
        network * GB,
        _TPU_PAGE,
        reported,
        0.0,
        10**6,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("b200", 2250, 1125, 178, 8000, 900, 10.0, "NVIDIA B200", source=_SHEET),
        _gpu("h200-nvl", 835, 418, 139.8, 4800, 450, 9.0, "NVIDIA H200 NVL", source=_SHEET),
        _gpu("h200", 989, 494, 139.8, 4800, 450, 9.0, "NVIDIA H200", source=f"{_SHEET}; memory as the driver reports"),
        _gpu("h100-pcie", 756, 378, 79.6, 2000, 64, 9.0, "NVIDIA H100 PCIe", source=_SHEET),
        _gpu("h100-nvl", 835, 418, 93.6, 3900, 300, 9.0, "NVIDIA H100 NVL", source=_SHEET),
        _gpu("h100", 989, 494, 79.6, 3350, 450, 9.0, "NVIDIA H100", source=_SHEET),
        _gpu("a100-40", 312, 156, 39.4, 1555, 300, 8.0, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE", source=_SHEET),
        _gpu("a100-80", 312, 156, 79.3, 2039, 300, 8.0, "NVIDIA A100", source=_SHEET),
        _gpu("l40s", 362, 183, 44.5, 864, 32, 8.9, "NVIDIA L40S", source=_SHEET),
        _gpu("l40", 181, 90.5, 44.5, 864, 32, 8.9, "NVIDIA L40", source=_SHEET),
        _gpu("l4", 121, 60, 22.0, 300, 32, 8.9, "NVIDIA L4", source=f"{_SHEET}, without sparsity"),
        _gpu("a10g", 70, 35, 22.1, 600, 32, 8.6, "NVIDIA A10G", source="NVIDIA's data sheet as AWS sells it"),
        _gpu("rtx4090", 165, 82.6, 23.6, 1008, 32, 8.9, "NVIDIA GeForce RTX 4090", source="NVIDIA's Ada whitepaper"),
        _gpu("rtx3090", 71, 35.6, 23.6, 936, 32, 8.6, "NVIDIA GeForce RTX 3090", source="NVIDIA's Ampere whitepaper"),
        _gpu("v100", 125, 15.7, 31.7, 900, 150, 7.0, "Tesla V100", source=_SHEET),
        _gpu("t4", 65, 8.1, 14.7, 300, 16, 7.5, "Tesla T4", source=_SHEET, network=6),
        _tpu("v4", 275, 32, 1228, 300, 6.25, "TPU v4"),
        _tpu("v5e", 197, 16, 819, 200, 3.125, "TPU v5 lite", "TPU v5e"),
        _tpu("v5p", 459, 95, 2765, 600, 6.25, "TPU v5p", "TPU v5"),
        _tpu("v6e", 918, 32, 1638, 448, 12.5, "TPU v6 lite", "TPU v6e"),
    )
}
ALIASES: Mapping[str, str] = {"a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090", "v6": "v6e", "v5lite": "v5e"}


def device_of(reported: str) -> Device | None:
    """The device that a driver calls so, or None if it is not in the table."""
    for device in DEVICES.values():
        if any(re.match(rf"{name}\b", reported) for name in device.reported):
            return device
    return None


def ray_device(name: str) -> Device | None:
    """The device that Ray calls so: H100, A100-40G, TPU-V6E, TPU-V5LITEPOD."""
    plain = _without_affixes(name)
    return DEVICES.get(ALIASES.get(plain, plain))


def may_be(device: Device, name: str) -> bool:
    """Whether Ray may call a device so: A100 is one of any memory. A name that is not in the table may be any GPU's."""
    known = ray_device(name)
    if known is None:
        return name.upper().startswith("TPU-") == (device.platform == "tpu")
    return known.name == device.name or device.name.startswith(f"{_without_affixes(name)}-")


def _without_affixes(name: str) -> str:
    plain = name.lower().removeprefix("tpu-").removesuffix("pod")
    return re.sub(r"-([0-9]+)g$", r"-\1", plain)
