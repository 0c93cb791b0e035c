"""Connects this process with the others that train together."""

import os
from collections.abc import Sequence


def join(
    address: str, workers: int, rank: int, gpus: Sequence[int | str], threads: int, gpu_share: float = 1.0
) -> None:
    """Join the process group, with a share of one GPU's memory, or `threads` threads. Call it before anything uses
    CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        str(gpus[0]) if gpus else ""
    )  # Ray hides no GPU from workers that asked for none
    import torch
    import torch.distributed as dist

    from raygpt.engines.torch.devices import limit_memory

    limit_memory(gpu_share)
    torch.set_num_threads(threads)
    if workers > 1:
        backend = "nccl" if gpus else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", world_size=workers, rank=rank)


def leave() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
