"""Connects Ray Train's workers as processes of one computation, on CPUs and GPUs, with either engine.

Ray's own backend for JAX does not connect CPU workers, and gives every worker of a node the same GPU. On TPUs, where it
knows about slices, we use it.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.jax.config import JaxConfig

from raygpt.host import cores
from raygpt.training.ray.private import get_address_and_port


@dataclass
class Processes(BackendConfig):
    """For `DataParallelTrainer(backend_config=…)`; the engine's `processes.py` connects them."""

    engine: str = "jax"
    gpu_share: float = 1.0  # the part of a GPU that a worker has

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend


def backend_for(engine: str, accelerator: str, gpu_share: float = 1.0) -> BackendConfig:
    """The backend that connects an engine's workers: Ray's on TPUs, else ours."""
    return JaxConfig(use_tpu=True) if accelerator == "tpu" else Processes(engine, gpu_share)


class _Backend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        count, engine, share = len(worker_group), backend_config.engine, backend_config.gpu_share
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, engine, f"{address}:{port}", count, rank, share)
                for rank in range(count)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.get(worker_group.execute_async(_leave, backend_config.engine), timeout=10)


def _join(engine: str, address: str, workers: int, rank: int, gpu_share: float) -> None:
    """Runs in a worker. Ray says which GPUs of the node it may use; the cores are divided evenly."""
    beside = ray.train.get_context().get_local_world_size()
    _processes(engine).join(address, workers, rank, ray.get_gpu_ids(), max(1, cores() // beside), gpu_share)


def _leave(engine: str) -> None:
    _processes(engine).leave()


def _processes(engine: str) -> Any:
    return import_module(f"raygpt.engines.{engine}.processes")
