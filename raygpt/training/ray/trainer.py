"""Ray's trainer as raygpt runs it: our policies in its controller, and events shown while it runs.

trainer = Trainer(function, config, workers, run_folder, mailbox, backend=backend_for("jax", "cpu"))
error = fit(trainer, watch)
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.train.backend import BackendConfig
from ray.train.v2.api.config import FailureConfig, RunConfig

from raygpt import storage
from raygpt.errors import RaygptError, TransientError, first_line
from raygpt.training.events import Event, GivenUp, Waiting
from raygpt.training.ray.datasets import BatchRows, RowsByRank
from raygpt.training.ray.mailbox import this_node_strategy
from raygpt.training.ray.private import (
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
    DataParallelTrainer,
    DatasetsCallback,
    PlacementGroupCleanerCallback,
    PreemptionCallback,
    TrainController,
    get_env_vars_to_propagate,
)
from raygpt.training.ray.recovery import Recovery, root_cause
from raygpt.training.ray.resizing import CheckpointBeforeResize, NoAutoscalerPolicy
from raygpt.training.ray.scaling import Workers, ensure_room, is_our_own
from raygpt.training.ray.waiting import StartWait

POLL_S = 0.2  # between two polls for events
HEALTH_CHECK_S = 0.5  # between two checks of the workers; Ray's 2 s are noticeable at a run's start and end
ELASTIC_START_S = "15"  # how long workers may take to get their room before fewer are tried; Ray's default is a minute
SHUTDOWN_S = 10.0  # how long workers may take to end cleanly
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray does not start if a checkpoint named there was pruned since
# Of use only on a cluster that outlives the run, or may lose nodes.
SHARED_CLUSTER_CALLBACKS = (PlacementGroupCleanerCallback, PreemptionCallback)


class Trainer(DataParallelTrainer):
    """Runs a function in every worker, with our policies for faults and for adding workers."""

    def __init__(
        self,
        function: Callable[..., None],
        config: dict[str, Any],
        workers: Workers,
        run_folder: str,
        mailbox: Any,
        *,
        backend: BackendConfig,
        hang_after: float | None = None,
        callbacks: Sequence[Any] = (),
        datasets: Mapping[str, Any] | None = None,
    ):
        """`datasets` are Ray Datasets by name, functions that make them, or `BatchRows`."""
        datasets = datasets or {}
        rows = {name: one for name, one in datasets.items() if isinstance(one, BatchRows)}
        home, _, name = run_folder.rpartition("/")
        filesystem, path = storage.filesystem(home) if storage.is_remote(home) else (None, home)
        run_config: Any = RunConfig(
            name=name,
            storage_path=path,
            storage_filesystem=filesystem,
            worker_runtime_env=workers.runtime_env,
            callbacks=[*callbacks] or None,
            failure_config=FailureConfig(max_failures=workers.cluster.max_faults),
        )
        super().__init__(
            function,
            train_loop_config=config,
            backend_config=backend,
            scaling_config=workers.scaling(),
            run_config=run_config,
            datasets={**datasets, **{name: one.all() for name, one in rows.items()}},
            dataset_config=RowsByRank(rows),
        )
        self.workers, self.run_folder, self.mailbox = workers, run_folder, mailbox
        self._hang_after = hang_after
        self._controller: Any = None

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        """Create the controller here, in place of Ray's `fit`: Ray has no other way to set a policy, or to end a run
        from another thread."""
        scaling, is_ours = cast("Any", self.scaling_config), is_our_own()
        parts["failure_policy"] = Recovery(self.run_config.failure_config, self.mailbox, self._hang_after)
        if self.workers.is_elastic:
            parts["scaling_policy"] = CheckpointBeforeResize(scaling, self.mailbox, self.workers.counts)
        elif is_ours:
            parts["scaling_policy"] = NoAutoscalerPolicy(scaling)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": this_node_strategy()}
        sooner = {WORKER_GROUP_START_TIMEOUT_S_ENV_VAR: ELASTIC_START_S} if self.workers.is_elastic else {}
        if environment := sooner | get_env_vars_to_propagate():  # if none, Ray can use a prestarted process
            options["runtime_env"] = {"env_vars": environment}
        unused = (*(() if self.datasets else (DatasetsCallback,)), *(SHARED_CLUSTER_CALLBACKS if is_ours else ()))
        self._controller = ray.remote(**options)(Controller).remote(unused, **parts)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def end(self) -> None:
        """End the workers now, and the controller that would restart them."""
        if self._controller:
            with contextlib.suppress(ray.exceptions.RayError):  # it ends itself, or is busy or gone
                ray.get(self._controller.abort.remote(), timeout=SHUTDOWN_S)
            ray.kill(self._controller)  # its workers go with it


class Controller(TrainController):
    """Ray's controller with more frequent health checks and without callbacks that we do not need: each starts a
    process that takes a second or two of a core while the workers start."""

    def __init__(self, unused: tuple[type, ...], **parts: Any):
        parts["callbacks"] = [one for one in parts["callbacks"] if not isinstance(one, unused)]
        super().__init__(**parts)
        used = [one for one in self._worker_group_callbacks_to_propagate if not isinstance(one, unused)]
        self._worker_group_callbacks_to_propagate = used
        if HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ:
            self._health_check_interval_s = HEALTH_CHECK_S


def fit(
    trainer: Trainer, watch: Callable[[Event], None], poll: Callable[[], None] = lambda: None
) -> BaseException | None:
    """Train to the end. `watch` gets the mailbox's events as they come; `poll` is called in between, and an exception
    from it ends the workers. Returns the error, if any."""
    ensure_room(trainer.workers, lambda text: watch(Waiting(text)))
    storage.delete(storage.join(trainer.run_folder, RAY_SNAPSHOT))
    reasons: list[str] = []  # why the run was given up
    wait = StartWait(trainer.workers, trainer.mailbox, watch)

    def pass_on() -> None:
        for event in ray.get(trainer.mailbox.take.remote()):
            wait.on_event(event)
            if isinstance(event, GivenUp):
                reasons.append(event.text)
            else:
                watch(event)
        poll()
        wait.poll()

    error = _fit_in_thread(trainer, pass_on)
    return RaygptError(reasons[0]) if reasons else error


def _fit_in_thread(trainer: Trainer, poll: Callable[[], None]) -> BaseException | None:
    """Run Ray's `fit` in another thread, where it cannot set its Ctrl-C handler, while this thread polls.

    If `poll` raises (a second Ctrl-C, a run taken over by another driver), the workers end; the cluster may live on.
    """
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_S)
            poll()
        poll()
    except ray.exceptions.RayError as error:  # from the actors that carry events
        trainer.end()
        return TransientError(
            f"Ray lost the actors that drive this run ({first_line(error)}); the same command resumes it"
        )
    except BaseException:
        trainer.end()
        raise
    return root_cause(failure[0]) if failure else None
