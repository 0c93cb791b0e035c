"""Policies by which Ray's controller chooses the number of workers: fixed without an autoscaler, or elastic."""

import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import ray

from raygpt.training.events import FaultHandled
from raygpt.training.ray.private import (
    ElasticScalingPolicy,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)

SAVED_WITHIN_S = 120.0  # after that the workers are resized without a checkpoint


class NoAutoscalerPolicy(FixedScalingPolicy):
    """A fixed number of workers, where there is no autoscaler to request resources from."""

    def _send_resource_request(self) -> None:
        pass

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request


class CheckpointBeforeResize(ElasticScalingPolicy):
    """Requests a checkpoint, and waits for it, before workers are added: that restarts all of them. `counts` are the
    numbers of workers with which the mesh can be made, ascending; None: any."""

    def __init__(self, config: Any, mailbox: Any, counts: Sequence[int] | None = None):
        super().__init__(config)
        self._mailbox, self._counts = mailbox, counts
        self._wanted: ResizeDecision | None = None
        self._saved, self._since = 0, 0.0

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        """Those that would not fill the mesh stay idle: with them the workers could not start."""
        possible: int = super()._count_possible_workers(reserved_resources)
        if self._counts is None:
            return possible
        fitting = bisect_right(self._counts, possible)
        return self._counts[fitting - 1] if fitting else 0

    def make_decision_for_running_worker_group(self, *arguments: Any, **named: Any) -> ScalingDecision:
        if ray.get(self._mailbox.is_stopping.remote()):
            return NoopDecision()
        if self._wanted is None:
            decision = super().make_decision_for_running_worker_group(*arguments, **named)
            if isinstance(decision, ResizeDecision):
                self._wanted, self._since = decision, time.monotonic()
                self._saved = ray.get(self._mailbox.last_saved.remote())
                self._mailbox.request.remote("save")
                return NoopDecision()
            return decision
        is_saved = ray.get(self._mailbox.last_saved.remote()) != self._saved
        if not is_saved and time.monotonic() - self._since < SAVED_WITHIN_S:
            return NoopDecision()
        decision, self._wanted = self._wanted, None
        start = "there" if is_saved else "the newest checkpoint"
        text = f"the workers start again from {start}, {decision.num_workers} of them now"
        self._mailbox.put.remote(FaultHandled(text))
        return decision

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._wanted = None
        return super().make_decision_for_non_running_worker_group()
