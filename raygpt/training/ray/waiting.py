"""Says what a run waits for until its workers are there, and whether it can be stopped meanwhile."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util import placement_group_table

from raygpt.ray_private import actors
from raygpt.resources import describe_resources
from raygpt.training.events import Event, FaultHandled, Waiting
from raygpt.training.ray.scaling import Workers

FIRST_S, MORE_RARELY = 10.0, 4  # after 10 s, 40 s, 160 s, …
WORKER = "RayTrainWorker"  # the class of Ray Train's actors


class StartWait:
    """The wait for workers, from a start or restart until the first event of one of them."""

    def __init__(self, workers: Workers, mailbox: Any, watch: Callable[[Event], None]):
        self._workers, self._mailbox, self._watch = workers, mailbox, watch
        self._begin()

    def _begin(self) -> None:
        self._is_waiting, self._since, self._next = True, time.monotonic(), FIRST_S

    def on_event(self, event: Event) -> None:
        """An event of the workers has come, or one about a fault, after which they start again."""
        if isinstance(event, FaultHandled):
            self._begin()
        else:
            self._is_waiting = False

    def poll(self) -> None:
        """Say what the workers wait for, if it is time to. Raises KeyboardInterrupt if the run is to stop before all of
        them are there: then none has anything to save."""
        if not self._is_waiting:
            return
        if ray.get(self._mailbox.is_stopping.remote()) and (self._is_pending() or self._starting()):
            raise KeyboardInterrupt
        if time.monotonic() - self._since < self._next:
            return
        self._next *= MORE_RARELY
        if self._is_pending():
            free = ray.available_resources()
            has = describe_resources({name: free.get(name, 0) for name in self._workers.resources})
            self._watch(Waiting(f"waiting for {self._workers}: the cluster has {has} left, the rest is in use"))
        elif starting := self._starting():
            what = "set up cluster.runtime_env for" if self._workers.cluster.runtime_env else "start"
            self._watch(Waiting(f"waiting for Ray to {what} {starting} {'worker' if starting == 1 else 'workers'}"))

    def _is_pending(self) -> bool:
        """Whether Ray has no room for the workers yet."""
        wanted = {name: float(amount) for name, amount in self._workers.resources.items() if amount}
        groups = placement_group_table().values()
        bundles = (bundle for group in groups if group["state"] == "PENDING" for bundle in group["bundles"].values())
        return any(wanted.items() <= bundle.items() for bundle in bundles)  # Ray adds an accelerator's type

    def _starting(self) -> int:
        """The number of workers for which Ray has room, but no process yet."""
        job = ray.get_runtime_context().get_job_id()
        pending = actors(actor_state_name="PENDING_CREATION").values()
        return sum(actor["ActorClassName"] == WORKER and actor["JobID"] == job for actor in pending)
