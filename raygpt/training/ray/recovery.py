"""What happens when workers are lost: they restart, a limited number of times, unless a restart cannot help.

Ray Train's controller calls this policy. An error that the user has to fix ends the run immediately; so does a fault
that repeats at the same step.
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
DISK_ERRORS = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
STORAGE_PAUSE_S = 10.0  # pause after a storage failure, before the workers restart


class Recovery(DefaultFailurePolicy):
    """Counts and reports faults, and gives up on one that repeats."""

    def __init__(self, config: Any, mailbox: Any, hang_after: float | None):
        super().__init__(config)
        self._mailbox, self._hang_after = mailbox, hang_after
        self._steps: list[int | None] = []  # of the faults; None for one that is unrelated to a step
        self._nodes = _nodes()

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        cause = root_cause(training_failed_error)
        if isinstance(cause, RaygptError) and not isinstance(cause, StorageError):
            return FailureDecision.RAISE  # the user has to fix it
        decision = super().make_decision(training_failed_error)
        failure = getattr(training_failed_error, "controller_failure", None)
        if isinstance(failure, WorkerGroupStartupTimeoutError):
            return decision  # Ray counts lost nodes for a while, and new nodes take time to start
        if isinstance(failure, OSError):  # Ray could not write its list of checkpoints, which we do not use
            decision = FailureDecision.RETRY
        if is_preemption_failure(training_failed_error):
            self._report("a node was lost", "")
            return decision
        step, silent_s = ray.get(self._mailbox.last_beat.remote())
        what = self._describe(cause, training_failed_error, silent_s)
        is_storage = isinstance(cause, StorageError) or getattr(cause, "errno", None) in DISK_ERRORS
        if is_storage:
            time.sleep(STORAGE_PAUSE_S)
        self._steps.append(None if is_storage or self._has_lost_nodes() else step)
        return self._decide(what, step, decision)

    def _has_lost_nodes(self) -> bool:
        """Since the last fault. Workers take minutes to start, and several nodes may be lost meanwhile."""
        before, self._nodes = self._nodes, _nodes()
        return bool(before - self._nodes)

    def _decide(self, what: str, step: int, decision: FailureDecision) -> FailureDecision:
        """Decide about the last fault, and report it."""
        if self._steps[-REPEATED:] == [step] * REPEATED:
            text = f"the same fault came {REPEATED} times after step {step}, so a restart does not help: {what}"
            self._mailbox.put.remote(GivenUp(f"{text}. The workers' logs say more"))
            return FailureDecision.RAISE
        limit = self.failure_config.max_failures
        if len(self._steps) > limit:  # Ray itself would retry for ever
            return FailureDecision.RAISE
        if decision == FailureDecision.RETRY:
            self._report(f"{what} after step {step}", f" (fault {len(self._steps)} of at most {limit})")
        return decision

    def _report(self, what: str, count: str) -> None:
        self._mailbox.put.remote(FaultHandled(f"{what}; the workers start again from the newest checkpoint{count}"))

    def _describe(self, cause: BaseException, error: Any, silent_s: float) -> str:
        """A short description: Ray's own explanation of a dead process fills a screen.

        Workers that died are named rather than workers that failed, mostly as a consequence.
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


def _installer_error(error: BaseException) -> str:
    """The last line of pip's or another installer's output that is marked as an error, which explains the others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marked = [line.partition("ERROR:")[2].strip() for line in lines if line.startswith("ERROR:")]
    return (marked or lines or [type(error).__name__])[-1]


def root_cause(error: BaseException) -> BaseException:
    """The exception that a worker raised, unwrapped from Ray's; prefers a RaygptError to what followed from it."""
    if isinstance(failure := getattr(error, "controller_failure", None), ray.exceptions.RuntimeEnvSetupError):
        return RaygptError(f"cluster.runtime_env: Ray cannot set it up ({_installer_error(failure)}); correct it")
    failures = getattr(error, "worker_failures", {}).values()
    causes: list[BaseException] = [getattr(failure, "cause", None) or failure for failure in failures]
    for cause in causes:
        if isinstance(cause, RaygptError):
            return type(cause)(first_line(cause))
    return next(iter(causes), error)
