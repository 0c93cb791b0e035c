"""When the workers poll for orders: all after the same steps, or after the same parts of a validation."""

from raygpt.training.clock import Clock
from raygpt.training.session import Orders, Session

# Speed is measured over the steps since the last poll, and the next poll is at most twice as many steps away. A few
# steps alone may look too fast: their batches were prefetched while the first step was compiled.
MAX_GROWTH = 2


class Polling:
    """Polls a session every few seconds, counted in steps so that all workers agree."""

    def __init__(self, session: Session, done: int = 0):
        self._session, self._clock = session, Clock(done)
        self._next = done + 2  # the first includes compilation

    def restart(self, done: int) -> None:
        """Start measuring the speed again, after something that is not training."""
        self._clock.restart(done)

    def is_due(self, done: int) -> bool:
        return done == self._next

    def poll(self, done: int) -> Orders:
        """The orders; the speed since the last poll decides when the next is due."""
        timed = done - self._clock.step
        orders = self._session.orders(self._clock.lap(done))
        self._next = done + min(MAX_GROWTH * timed, orders.next_poll_in_steps)
        return orders
