"""The precision in which a device computes if the recipe says auto."""

NUMBER_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def choose_precision(wanted: str, platform: str, compute_capability: float | None = None) -> str:
    """bf16 where the device computes it fast: TPUs, and NVIDIA from Ampere on; fp16 on older GPUs; fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    if platform == "gpu":
        return "bf16" if compute_capability is None or compute_capability >= 8 else "fp16"
    return "bf16" if platform == "tpu" else "fp32"
