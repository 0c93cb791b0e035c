"""An actor that passes messages between a run's workers, its driver and Ray Train's controller; calls never block."""

import time
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raygpt.training.events import Event

Request = Literal["stop", "save"]


class Mailbox:
    """Holds the workers' events until the driver takes them, their last step, and the requests to them."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._step, self._since = 0, time.monotonic()
        self._requests: set[Request] = set()
        self._parts: dict[int, dict[int, Any]] = {}  # step -> rank -> its report on its part of the checkpoint
        self._saved = 0

    def begin(self) -> None:
        """A group of workers starts: discard what an earlier group left unfinished."""
        self._parts.clear()
        self._since = time.monotonic()

    def put(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> list[Event]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events

    def beat(self, step: int) -> None:
        """Record that a step was taken."""
        self._step, self._since = step, time.monotonic()

    def last_beat(self) -> tuple[int, float]:
        """The last step, and the seconds since."""
        return self._step, time.monotonic() - self._since

    def request(self, request: Request) -> None:
        self._requests.add(request)

    def take_requests(self) -> set[Request]:
        """All requests since the last call; a stop request stays, for workers that restart after a fault."""
        requests = set(self._requests)
        self._requests &= {"stop"}
        return requests

    def is_stopping(self) -> bool:
        return "stop" in self._requests

    def expect(self, step: int) -> None:
        """A checkpoint is about to be written: discard the parts of an earlier attempt."""
        self._parts[step] = {}

    def add_part(self, step: int, rank: int, part: Any) -> None:
        """A worker has written its part of a step's checkpoint, or failed to."""
        self._parts.setdefault(step, {})[rank] = part

    def parts_of(self, step: int) -> dict[int, Any]:
        """The workers' reports on a step's checkpoint, by rank."""
        return self._parts.get(step, {})

    def saved(self, step: int) -> None:
        """A checkpoint was committed."""
        self._saved = step
        self._parts.pop(step, None)

    def last_saved(self) -> int:
        """The step of the newest checkpoint."""
        return self._saved


def open_mailbox() -> Any:
    """Start the actor on the driver's node, which lives as long as the run does."""
    return ray.remote(num_cpus=0, scheduling_strategy=this_node_strategy())(Mailbox).remote()


def this_node_strategy() -> Any:
    """The scheduling strategy that places an actor on this node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
