"""Connects this process with the others that train together."""

import os
from collections.abc import Sequence


def join(address: str, workers: int, rank: int, gpus: Sequence[int | str], threads: int) -> None:
    """Join the process group, with one GPU or `threads` threads. Call it before anything uses CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        str(gpus[0]) if gpus else ""
    )  # Ray hides no GPU from workers that asked for none
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if workers > 1:
        backend = "nccl" if gpus else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", world_size=workers, rank=rank)


def leave() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
