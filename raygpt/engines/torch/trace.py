"""A trace of what PyTorch does, for Perfetto."""

from pathlib import Path
from typing import Any

import torch

_running: list[Any] = []  # PyTorch has one profiler per process


def start(folder: Path) -> None:
    """Start to record what the host and the GPU do."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    _running.append(profiler)


def stop(folder: Path) -> Path:
    """Stop recording. Returns the file that Perfetto opens."""
    profiler = _running.pop()
    profiler.stop()
    file = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    return file
