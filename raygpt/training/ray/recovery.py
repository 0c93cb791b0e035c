"""What happens when workers are lost: they start again, a bounded number of times, unless that is of no use.

Ray Train asks a policy in its controller. An error that the user has to mend ends the run at once; so does a fault that
comes back at the same step.
"""

import errno
import time
from typing import Any

import ray

from raygpt.errors import RaygptError, StorageError, first_line
from raygpt.training.events import FaultHandled, GivenUp
from raygpt.training.ray.private import (
    DefaultFailurePolicy,
    FailureDecision,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    is_preemption_failure,
)

DEATHS = (ray.exceptions.RayActorError, WorkerHealthCheckFailedError)
REPEATED = 3  # faults at one step end the run
DISK_TROUBLE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
STORAGE_S = 10.0  # that a storage which failed is given before workers ask it again


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
        if is_preemption_failure(training_failed_error):
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
            self._mailbox.put.remote(GivenUp(f"{text}. The workers' logs say more"))
            return FailureDecision.RAISE
        limit = self.failure_config.max_failures
        if len(self._steps) > limit:  # Ray itself would try to start workers for ever
            return FailureDecision.RAISE
        if decision == FailureDecision.RETRY:
            self._say(f"{what} after step {step}", f" (fault {len(self._steps)} of at most {limit})")
        return decision

    def _say(self, what: str, count: str) -> None:
        self._mailbox.put.remote(FaultHandled(f"{what}; the workers start again from the newest checkpoint{count}"))

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


def _nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def root_cause(error: BaseException) -> BaseException:
    """What a worker itself raised, out of what Ray wraps around it; a RaygptError before what followed from it."""
    failures = getattr(error, "worker_failures", {}).values()
    causes: list[BaseException] = [getattr(failure, "cause", None) or failure for failure in failures]
    for cause in causes:
        if isinstance(cause, RaygptError):
            return type(cause)(first_line(cause))
    return next(iter(causes), error)
