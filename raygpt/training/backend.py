"""Ray Train's workers as processes of one JAX program, on CPUs and GPUs alike.

Ray's own backend leaves CPU workers unconnected, and gives every worker of a node the same GPU.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig

CACHE = "~/.cache/raygpt/compiled"


@dataclass
class JaxProcesses(BackendConfig):
    """How the processes are set up."""

    devices_per_worker: int = 1  # of a CPU: XLA computes small products on one core, so each core is a device

    @property
    def backend_cls(self) -> type[Backend]:
        return _JaxBackend


class _JaxBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        count = len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, join, f"{address}:{port}", count, rank, backend_config.devices_per_worker
                )
                for rank in range(count)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.get(worker_group.execute_async(leave), timeout=10)


def join(address: str, workers: int, rank: int, cpu_devices: int) -> None:
    """Make this worker one of the processes. Everything is set before JAX looks for devices."""
    gpus = ray.get_gpu_ids()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path(CACHE).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # small models compile in less than 1 s
    if workers > 1:
        jax.distributed.initialize(address, workers, rank)


def leave() -> None:
    """Part from the other processes."""
    import jax

    jax.distributed.shutdown()
