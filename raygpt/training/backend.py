"""Ray Train's workers as processes of one JAX program, on CPUs and GPUs alike.

Ray's own backend leaves CPU workers unconnected, and gives every worker of a node the same GPU. On TPUs, where it
knows about slices, it is the one to use.
"""

from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig

from raygpt.cluster import cores
from raygpt.engines.jax.processes import join, leave


@dataclass
class JaxProcesses(BackendConfig):
    """For `DataParallelTrainer(backend_config=…)`."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _JaxBackend


class _JaxBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        count = len(worker_group)
        ray.get(
            [worker_group.execute_single_async(rank, _join, f"{address}:{port}", count, rank) for rank in range(count)]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.get(worker_group.execute_async(leave), timeout=10)


def _join(address: str, workers: int, rank: int) -> None:
    """In a worker: Ray says which GPUs of its node are its own; of a CPU's cores it takes its share."""
    beside = ray.train.get_context().get_local_world_size()
    join(address, workers, rank, ray.get_gpu_ids(), cpu_devices=max(1, cores() // beside))
