"""A worker's connection to the other workers and the driver: rank, events, orders, metrics. This module has no Ray."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from raygpt.errors import RaygptError
from raygpt.runs.metrics import Line
from raygpt.training.events import Event, Metrics

POLL_S = 5.0  # the longest time between two polls for orders: a node may be about to be lost


class Orders(NamedTuple):
    """What the driver or the controller orders all workers to do."""

    stop: bool = False  # save, then end
    save: bool = False  # save, then continue: a node is about to be lost, or more workers wait to join
    next_poll_in_steps: int = 0  # at the latest; 0: at the next logged step


def steps_until_next_poll(steps_per_s: float) -> int:
    """The number of steps until the workers poll again."""
    return max(1, int(POLL_S * steps_per_s))


class Session(Protocol):
    """What the loop needs from its surroundings. Only rank 0 emits events and metrics."""

    rank: int
    workers: int

    def emit(self, event: Event) -> None:
        """Send an event to the driver."""
        ...

    def warn(self, text: str) -> None:
        """Send a warning to the driver."""
        ...

    def record(self, metrics: Metrics) -> None:
        """Write metrics to metrics.jsonl, and send them to the driver."""
        ...

    def resume(self, step: int, is_validated: bool = True) -> None:
        """Start or resume after a step. Metrics of later steps are dropped because they will be logged again; so is
        the step's own validation unless `is_validated`."""
        ...

    def beat(self, step: int) -> None:
        """Heartbeat: the worker has made progress since its last beat."""
        ...

    def rest(self) -> None:
        """Suspend the watchdog until the next step: the worker waits for others, or for storage."""
        ...

    def orders(self, steps_per_s: float) -> Orders:
        """The orders, the same in every worker: all poll after the same steps. Rank 0's speed decides the next poll."""
        ...

    def decide(self, what: Callable[[], int]) -> int:
        """Broadcast rank 0's result of `what` to every worker."""
        ...

    def expect(self, step: int) -> None:
        """A checkpoint is about to be written: discard the parts of an earlier attempt. Rank 0 only."""
        ...

    def flush(self) -> None:
        """Write everything that was recorded to the run's storage, if possible."""
        ...

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        """Report that this worker's part of a checkpoint is written, or why it is not."""
        ...

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        """The parts of a checkpoint that workers have reported so far, by rank."""
        ...

    def saved(self, step: int, folder: str) -> None:
        """A checkpoint was committed."""
        ...

    def close(self) -> None:
        """Nothing more will be emitted or recorded."""
        ...


class Listener(Protocol):
    """Receives metrics as they are logged: see tracking.py."""

    def begin(self, after: int) -> None: ...

    def record(self, line: Line) -> None: ...

    def close(self, succeeded: bool = True) -> None: ...


def write_or_warn(session: Session, what: str, write: Callable[[], None]) -> None:
    """Write something in rank 0; a storage failure is only a warning."""
    if session.rank > 0:
        return
    try:
        write()
    except (OSError, RaygptError) as error:
        session.warn(f"{what} could not be kept ({error}); training continues")
