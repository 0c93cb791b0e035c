"""A Session for a loop in a single process, without Ray and without a driver."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raygpt.training.events import Event, Metrics, Warned
from raygpt.training.session import Orders, steps_until_next_poll


@dataclass
class LocalSession:
    """Keeps the events in a list, and gives the orders of another."""

    events: list[Event] = field(default_factory=list)
    queued_orders: list[Orders] = field(default_factory=list)  # returned one after another
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
        if self.queued_orders:
            return self.queued_orders.pop(0)
        return Orders(next_poll_in_steps=steps_until_next_poll(steps_per_s))

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
