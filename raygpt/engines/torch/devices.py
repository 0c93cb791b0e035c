"""The devices that PyTorch finds here, and the dtypes that they compute in. No model is imported."""

import torch

from raygpt.engines import precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def use_all_cores() -> None:
    """Nothing to do: PyTorch uses all cores by default."""


def names() -> list[str]:
    """The name of each GPU, or of the CPU."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] or ["CPU"]


def is_accelerated() -> bool:
    """Whether there is more than a CPU."""
    return torch.cuda.is_available()


def peak_bytes() -> int:
    """The most memory in use on the GPU so far; 0 without one."""
    return torch.cuda.max_memory_allocated()


def limit_memory(share: float) -> None:
    """Use no more than this share of the GPU's memory: others use it too."""
    if share < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def free_bytes(share: float = 1.0) -> int | None:
    """Memory of the GPU that this process may still take, if it may use this share of it; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return min(free, int(share * total) - torch.cuda.memory_reserved())


def choose_device() -> torch.device:
    """The GPU that this process was given, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def choose_precision(wanted: str, device: torch.device) -> str:
    """The recipe's precision, or the best of this device."""
    if device.type == "cpu":
        return precision.choose_precision(wanted, "cpu")
    major, minor = torch.cuda.get_device_capability(device)
    return precision.choose_precision(wanted, "gpu", major + minor / 10)


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters, norms and losses: fp32, or the arithmetic's if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Computes matrix products of fp32 parameters in 16 bits; does nothing if everything is computed in their dtype."""
    is_mixed = dtype != accurate(dtype)
    return torch.autocast(device.type, dtype if is_mixed else None, enabled=is_mixed)
