"""The devices that PyTorch finds here, for those who ask before there is an engine."""

import torch


def use_all_cores() -> None:
    """PyTorch does by itself."""


def names() -> list[str]:
    """What each GPU calls itself, or the CPU."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] or ["CPU"]


def is_accelerated() -> bool:
    """Whether there is more than a CPU."""
    return torch.cuda.is_available()


def peak_bytes() -> int:
    """The most that was in use on the GPU; 0 without one."""
    return torch.cuda.max_memory_allocated()
