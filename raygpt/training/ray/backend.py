"""Ray Train's workers as processes that compute together, on CPUs and GPUs, with either engine.

Ray's own backend for JAX leaves CPU workers unconnected, and gives every worker of a node the same GPU. On TPUs, where
it knows about slices, it is the one to use.
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
    """For `DataParallelTrainer(backend_config=…)`; the engine's `processes.py` says how they join."""

    engine: str = "jax"

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend


def backend_for(engine: str, accelerator: str) -> BackendConfig:
    """How the workers of an engine join: on TPUs by Ray's backend, else by ours."""
    return JaxConfig(use_tpu=True) if accelerator == "tpu" else Processes(engine)


class _Backend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        count, engine = len(worker_group), backend_config.engine
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, engine, f"{address}:{port}", count, rank)
                for rank in range(count)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.get(worker_group.execute_async(_leave, backend_config.engine), timeout=10)


def _join(engine: str, address: str, workers: int, rank: int) -> None:
    """In a worker: Ray says which GPUs of its node are its own; of the cores it takes its share."""
    beside = ray.train.get_context().get_local_world_size()
    _processes(engine).join(address, workers, rank, ray.get_gpu_ids(), max(1, cores() // beside))


def _leave(engine: str) -> None:
    _processes(engine).leave()


def _processes(engine: str) -> Any:
    return import_module(f"raygpt.engines.{engine}.processes")
