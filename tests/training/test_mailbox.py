"""What the actor between workers and driver keeps, and what it forgets."""

from raygpt.training.ray.mailbox import Mailbox


def test_a_request_to_stop_outlives_the_workers_that_took_it():
    mailbox = Mailbox()
    mailbox.request("save")
    mailbox.request("stop")
    assert mailbox.take_requests() == {"save", "stop"}
    assert mailbox.take_requests() == {"stop"}
    assert mailbox.is_stopping()


def test_what_was_told_of_an_earlier_try_does_not_count():
    mailbox = Mailbox()
    mailbox.add_part(5, 1, {"files": {}})
    mailbox.expect(5)
    assert mailbox.parts_of(5) == {}
