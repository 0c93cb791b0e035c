"""What the actor between workers and driver keeps, and what it forgets."""

from raygpt.training.ray.mailbox import Mailbox


def test_a_wish_to_stop_outlives_the_workers_that_took_it():
    mailbox = Mailbox()
    mailbox.wish("save")
    mailbox.wish("stop")
    assert mailbox.take_wishes() == {"save", "stop"}
    assert mailbox.take_wishes() == {"stop"}
    assert mailbox.is_stopping()


def test_what_was_told_of_an_earlier_try_does_not_count():
    mailbox = Mailbox()
    mailbox.add_part(5, 1, {"files": {}})
    mailbox.expect(5)
    assert mailbox.parts_of(5) == {}
