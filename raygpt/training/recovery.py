"""What happens when workers are lost: they start again, a bounded number of times, unless that is of no use.

Ray Train asks a policy in its controller. An error that the user has to mend ends the run at once; so does a fault that
comes back at the same step.
"""

import contextlib
import errno
import os
import time
from typing import Any, cast

import ray
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.constants import HEALTH_CHECK_INTERVAL_S_ENV_VAR, get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from raygpt.cluster import is_our_own
from raygpt.errors import RaygptError, StorageError, first_line
from raygpt.training.mailbox import on_this_node

DEATHS = (ray.exceptions.RayActorError, WorkerHealthCheckFailedError)
REPEATED = 3  # faults at one step end the run
LOOKED_S = 0.5  # between two looks at the workers; Ray's 2 s are felt at a run's start and end
ON_OTHERS_CLUSTERS = (PlacementGroupCleanerCallback, PreemptionCallback)  # which outlive a run, and lose nodes
DISK_TROUBLE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
STORAGE_S = 10.0  # that a storage which failed is given before workers ask it again
ENDED_S = 10.0  # that workers are given to end in good order
SAVED_WITHIN_S = 120.0  # or the workers are resized without


class Trainer(DataParallelTrainer):
    """Ray's trainer with our answer to faults, and with a checkpoint before workers are added."""

    def __init__(self, *arguments: Any, mailbox: Any, hang_after: float | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self._mailbox, self._hang_after = mailbox, hang_after
        self._controller: Any = None

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        """Ray has no way to name a policy of one's own, nor to end a run from another thread: so its controller is
        made here, where `fit` makes it."""
        config, scaling, is_ours = self.run_config.failure_config, cast("Any", self.scaling_config), is_our_own()
        parts["failure_policy"] = Recovery(config, self._mailbox, self._hang_after)
        if isinstance(scaling.num_workers, tuple):
            parts["scaling_policy"] = SavesFirst(scaling, self._mailbox)
        elif is_ours:
            parts["scaling_policy"] = AsksNobody(scaling)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": on_this_node()}
        if environment := get_env_vars_to_propagate():  # with one of its own no process that Ray has ready will do
            options["runtime_env"] = {"env_vars": environment}
        unused = (DatasetsCallback, *(ON_OTHERS_CLUSTERS if is_ours else ()))
        self._controller = ray.remote(**options)(Controller).remote(unused, **parts)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def end(self) -> None:
        """End the workers now, and whoever would start them again."""
        if self._controller:
            with contextlib.suppress(ray.exceptions.RayError):  # it ends itself, or is busy or gone
                ray.get(self._controller.abort.remote(), timeout=ENDED_S)
            ray.kill(self._controller)  # its workers go with it


class Controller(TrainController):
    """Ray's, which looks at its workers more often, and without callbacks that are of no use here: each starts a
    process that takes a second or two of a core just when the workers start."""

    def __init__(self, unused: tuple[type, ...], **parts: Any):
        parts["callbacks"] = [one for one in parts["callbacks"] if not isinstance(one, unused)]
        super().__init__(**parts)
        used = [one for one in self._worker_group_callbacks_to_propagate if not isinstance(one, unused)]
        self._worker_group_callbacks_to_propagate = used
        if HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ:
            self._health_check_interval_s = LOOKED_S


class Recovery(DefaultFailurePolicy):
    """Counts faults, says what they were, and gives up on one that repeats itself."""

    def __init__(self, config: Any, mailbox: Any, hang_after: float | None):
        super().__init__(config)
        self._mailbox, self._hang_after = mailbox, hang_after
        self._steps: list[int | None] = []  # at which a fault struck; none where the step had nothing to do with it
        self._nodes = _nodes()

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        cause = root_cause(training_failed_error)
        if isinstance(cause, RaygptError) and not isinstance(cause, StorageError):
            return FailureDecision.RAISE  # the user has to mend it
        decision = super().make_decision(training_failed_error)
        failure = getattr(training_failed_error, "controller_failure", None)
        if isinstance(failure, WorkerGroupStartupTimeoutError):
            return decision  # nodes that are gone are still counted on for a while, and new ones take theirs to come
        if isinstance(failure, OSError):  # Ray could not write down which checkpoints there are, which we do not ask it
            decision = FailureDecision.RETRY
        if _is_preemption_failure(training_failed_error):
            self._say("a node was taken away", "")
            return decision
        step, silent_s = ray.get(self._mailbox.last_beat.remote())
        what = self._describe(cause, training_failed_error, silent_s)
        is_storage = isinstance(cause, StorageError) or getattr(cause, "errno", None) in DISK_TROUBLE
        if is_storage:
            time.sleep(STORAGE_S)
        self._steps.append(None if is_storage or self._has_lost_nodes() else step)
        return self._judge(what, step, decision)

    def _has_lost_nodes(self) -> bool:
        """Since the last fault. Workers that start take minutes, without a step: nodes may go one by one meanwhile."""
        before, self._nodes = self._nodes, _nodes()
        return bool(before - self._nodes)

    def _judge(self, what: str, step: int, decision: FailureDecision) -> FailureDecision:
        """Say what becomes of the last fault."""
        if self._steps[-REPEATED:] == [step] * REPEATED:
            text = f"the same fault came {REPEATED} times after step {step}, so that it is no accident: {what}"
            self._mailbox.put.remote({"event": "verdict", "text": f"{text}. The workers' logs say more"})
            return FailureDecision.RAISE
        limit = self.failure_config.max_failures
        if len(self._steps) > limit:  # Ray itself would try to start workers for ever
            return FailureDecision.RAISE
        if decision == FailureDecision.RETRY:
            self._say(f"{what} after step {step}", f" (fault {len(self._steps)} of at most {limit})")
        return decision

    def _say(self, what: str, count: str) -> None:
        text = f"{what}; the workers start again from the newest checkpoint{count}"
        self._mailbox.put.remote({"event": "fault", "text": text})

    def _describe(self, cause: BaseException, error: Any, silent_s: float) -> str:
        """In a few words: Ray's own explanation of a process that ended fills a screen.

        Who died comes before who failed, which is mostly because of that.
        """
        failures = getattr(error, "worker_failures", {})
        dead = [rank for rank, failure in failures.items() if isinstance(failure, DEATHS)]
        ranks = sorted(dead or failures)
        who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}" if ranks else "Ray"
        if self._hang_after and silent_s >= self._hang_after:
            return f"{who} hung: no step for {silent_s:.0f} s, the stacks are in logs/"
        if dead:
            return f"{who} died"
        kind, said = type(cause).__name__, first_line(cause)
        return f"{who} failed ({kind if said == kind else f'{kind}: {said}'})"


class AsksNobody(FixedScalingPolicy):
    """So many workers, where there is no autoscaler that could make room for them."""

    def _send_resource_request(self) -> None:
        pass

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request


class SavesFirst(ElasticScalingPolicy):
    """Adding workers starts all of them anew: so first a checkpoint is asked for, and waited for."""

    def __init__(self, config: Any, mailbox: Any):
        super().__init__(config)
        self._mailbox = mailbox
        self._wanted: ResizeDecision | None = None
        self._saved, self._since = 0, 0.0

    def make_decision_for_running_worker_group(self, *arguments: Any, **named: Any) -> ScalingDecision:
        if ray.get(self._mailbox.is_stopping.remote()):
            return NoopDecision()
        if self._wanted is None:
            decision = super().make_decision_for_running_worker_group(*arguments, **named)
            if isinstance(decision, ResizeDecision):
                self._wanted, self._since = decision, time.monotonic()
                self._saved = ray.get(self._mailbox.last_saved.remote())
                self._mailbox.wish.remote("save")
                return NoopDecision()
            return decision
        is_saved = ray.get(self._mailbox.last_saved.remote()) != self._saved
        if not is_saved and time.monotonic() - self._since < SAVED_WITHIN_S:
            return NoopDecision()
        decision, self._wanted = self._wanted, None
        whence = "there" if is_saved else "the newest checkpoint"
        text = f"the workers start again from {whence}, {decision.num_workers} of them now"
        self._mailbox.put.remote({"event": "fault", "text": text})
        return decision

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._wanted = None
        return super().make_decision_for_non_running_worker_group()


def _nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def root_cause(error: BaseException) -> BaseException:
    """What a worker itself raised, out of what Ray wraps around it; a RaygptError before what followed from it."""
    failures = getattr(error, "worker_failures", {}).values()
    causes: list[BaseException] = [getattr(failure, "cause", None) or failure for failure in failures]
    for cause in causes:
        if isinstance(cause, RaygptError):
            return type(cause)(first_line(cause))
    return next(iter(causes), error)
