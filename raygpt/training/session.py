"""What a worker knows of the outside: its rank, its run directory, and who watches. Here without Ray."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from raygpt.errors import RaygptError
from raygpt.runs.metrics import Line
from raygpt.training.events import Event, Metrics, Warned

POLL_S = 5.0  # at most so long between two polls of the workers for orders: a node may be about to go


class Orders(NamedTuple):
    """What the outside wants of all workers."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and go on: a node is about to be lost, or more workers wait to join
    next_poll_in_steps: int = 0  # at the latest; 0: when a step is logged


def steps_until_next_poll(steps_per_s: float) -> int:
    """After how many steps the workers poll again."""
    return max(1, int(POLL_S * steps_per_s))


class Session(Protocol):
    """The loop's way out. Only rank 0 speaks."""

    rank: int
    workers: int

    def emit(self, event: Event) -> None:
        """Tell whoever watches."""
        ...

    def warn(self, text: str) -> None:
        """Tell whoever watches of what is no reason to end."""
        ...

    def record(self, metrics: Metrics) -> None:
        """Tell whoever watches, and keep it in the run's metrics."""
        ...

    def resume(self, step: int, is_validated: bool = True) -> None:
        """Begin, or go on, after a step: what the metrics say of later ones is about to be said again, and so is its
        own validation where it is still to come."""
        ...

    def beat(self, step: int) -> None:
        """This step is taken, or something after it: the worker is not stuck."""
        ...

    def rest(self) -> None:
        """Until the next step nothing is expected of this worker: it waits for others, or for storage."""
        ...

    def orders(self, steps_per_s: float) -> Orders:
        """What is wanted, the same in every worker: all poll after the same steps. Rank 0's speed says when again."""
        ...

    def decide(self, what: Callable[[], int]) -> int:
        """What rank 0 finds, in every worker."""
        ...

    def expect(self, step: int) -> None:
        """A checkpoint is about to be written: what was told of an earlier try does not count. Rank 0 alone."""
        ...

    def flush(self) -> None:
        """All that was recorded is in the run's storage, if that can be."""
        ...

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        """This worker's part of a checkpoint is written, or it says why not."""
        ...

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        """What the workers have told of a checkpoint so far, by rank."""
        ...

    def saved(self, step: int, folder: str) -> None:
        """A checkpoint is whole."""
        ...

    def close(self) -> None:
        """Nothing more will be said."""
        ...


@dataclass
class LocalSession:
    """A single process: what was said is kept."""

    events: list[Event] = field(default_factory=list)
    wanted: list[Orders] = field(default_factory=list)  # to be given, one after another
    rank: int = 0
    workers: int = 1
    _parts: dict[int, dict[int, Any]] = field(default_factory=dict)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def warn(self, text: str) -> None:
        self.emit(Warned(text))

    def record(self, metrics: Metrics) -> None:
        self.events.append(metrics)

    def resume(self, step: int, is_validated: bool = True) -> None:
        self.events = [event for event in self.events if getattr(event, "step", 0) <= step]

    def expect(self, step: int) -> None:
        self._parts.pop(step, None)

    def flush(self) -> None:
        pass

    def beat(self, step: int) -> None:
        pass

    def rest(self) -> None:
        pass

    def orders(self, steps_per_s: float) -> Orders:
        return self.wanted.pop(0) if self.wanted else Orders(next_poll_in_steps=steps_until_next_poll(steps_per_s))

    def decide(self, what: Callable[[], int]) -> int:
        return what()

    def add_part(self, step: int, part: dict[str, Any]) -> None:
        self._parts[step] = {0: part}

    def parts_of(self, step: int) -> dict[int, dict[str, Any]]:
        return self._parts.get(step, {})

    def saved(self, step: int, folder: str) -> None:
        pass

    def close(self) -> None:
        pass


class Listener(Protocol):
    """Who else is told of the metrics: see tracking.py."""

    def begin(self, after: int) -> None: ...

    def record(self, line: Line) -> None: ...

    def close(self, is_well: bool = True) -> None: ...


def write_or_warn(session: Session, what: str, write: Callable[[], None]) -> None:
    """Rank 0 writes something down; a storage that fails just now is no reason to end a run."""
    if session.rank > 0:
        return
    try:
        write()
    except (OSError, RaygptError) as error:
        session.warn(f"{what} could not be kept ({error}); training goes on")
