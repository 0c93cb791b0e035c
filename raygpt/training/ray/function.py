"""Runs a user function on the same workers as recipes: CPUs, GPUs or TPUs."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.train import UserCallback
from ray.train.backend import BackendConfig

from raygpt import storage
from raygpt.cluster import connected
from raygpt.engines import require
from raygpt.errors import RaygptError
from raygpt.recipes import check_part
from raygpt.training.events import Event, FaultHandled, Reported, Waiting
from raygpt.training.ray import runtime_env
from raygpt.training.ray.backend import backend_for
from raygpt.training.ray.launch import Result
from raygpt.training.ray.mailbox import open_mailbox
from raygpt.training.ray.scaling import choose_workers, ensure_spare_cpus, local_cpus
from raygpt.training.ray.trainer import Trainer, fit

log = logging.getLogger("raygpt")


def run(
    function: Callable[..., None],
    config: dict[str, Any] | None = None,
    *,
    engine: str = "jax",
    datasets: Mapping[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    storage_path: str = "runs",
    name: str | None = None,
    watch: Callable[[dict[str, Any]], None] = lambda report: None,
) -> Result:
    """Run `function(config)` in every worker. With `engine="jax"` the workers are processes of one JAX program; with
    `engine="torch"` they are a PyTorch process group, as Ray's TorchTrainer makes it: `ray.train.torch.prepare_model`
    and the like work.

    `datasets` has a Ray Dataset for each name, or a function that makes one on the run's cluster: Ray splits it, and
    `ray.train.get_dataset_shard(name)` is a worker's part. `raygpt.training.ray.datasets.BatchRows` instead are
    rows of a token store's batches, each worker's own, in order.

    `cluster` has the keys of a recipe's `cluster` except `mesh`: `{"workers": 2, "accelerator": "gpu"}`. `watch` is
    called with what the function reports by `ray.train.report`; the result has the last value of each metric and the
    last checkpoint.

    A fault ends the run unless `max_faults` is given: only a function that starts from `ray.train.get_checkpoint()`
    can be resumed. Three faults without a report in between end the run anyway.
    """
    wanted = check_part("cluster", {"max_faults": 0} | (cluster or {}))
    if "mesh" in wanted.model_fields_set:
        raise RaygptError("cluster.mesh: is a recipe's; leave it out, and call jax.make_mesh in the function")
    if engine not in ("jax", "torch"):
        raise RaygptError(f"engine: {engine!r} is not known; write jax or torch")
    require(engine)
    runtime_env.checked(wanted.runtime_env)
    name = name or time.strftime("function-%Y%m%d-%H%M%S")
    check_part("run", {"name": name})
    folder = storage.join(storage.absolute(storage_path), name)
    reported: dict[str, Any] = {}

    def see(event: Event) -> None:
        match event:
            case Reported(metrics):
                reported.update(metrics)
                watch(dict(metrics))
            case Waiting(text) | FaultHandled(text):
                log.warning(text)

    with connected(cpus=local_cpus(wanted)):
        mailbox, workers = open_mailbox(), choose_workers(wanted, engine, log.warning)
        if datasets:
            ensure_spare_cpus(workers)
        trainer = Trainer(
            function,
            config or {},
            workers,
            folder,
            mailbox,
            backend=_torch_backend()
            if engine == "torch"
            else backend_for(engine, workers.accelerator, wanted.gpu_share),
            callbacks=[_Reports(mailbox)],
            datasets=datasets,
        )
        error = fit(trainer, see)
    return Result(folder, reported, reported.pop("checkpoint", None), error)


def _torch_backend() -> BackendConfig:
    """Ray's backend: it sets the environment variables that PyTorch's libraries read, also for one worker."""
    from ray.train.torch import TorchConfig  # imports torch

    return TorchConfig()


class _Reports(UserCallback):
    """Forwards what the workers report: Ray's result drops it unless there was a checkpoint."""

    def __init__(self, mailbox: Any):
        self._mailbox = mailbox
        self._reports = 0  # over all restarts: a fault after a new report is not a repeated one

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self._reports += 1
        self._mailbox.beat.remote(self._reports)
        saved = {"checkpoint": checkpoint.path} if checkpoint else {}
        self._mailbox.put.remote(Reported({**metrics[0], **saved}))
