"""Items made by a thread before they are needed."""

import threading
import time

import pytest

from raygpt.training.prefetch import prefetch


def test_items_come_in_order_and_at_most_so_many_are_made_ahead():
    made = []

    def items():
        for n in range(8):
            made.append(n)
            yield n

    got = []
    for item, waited in prefetch(items(), 2):
        time.sleep(0.02)  # time enough to run ahead
        assert waited >= 0
        assert len(made) <= item + 1 + 2 + 1  # this one, two ready, and one in hand
        got.append(item)
    assert got == made == list(range(8))


def test_items_are_made_while_the_one_before_is_used():
    made = [threading.Event() for _ in range(4)]

    def items():
        for event in made:
            event.set()
            yield event

    for number, _ in enumerate(prefetch(items(), 2)):
        assert all(event.wait(60) for event in made[number + 1 : number + 3])


def test_no_items_are_no_items():
    assert list(prefetch(iter([]), 2)) == []


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("broken")

    reading = prefetch(items(), 2)
    assert next(reading)[0] == 1
    with pytest.raises(ValueError, match="broken"):
        next(reading)


def test_the_thread_ends_when_nobody_reads_any_more():
    before = set(threading.enumerate())
    reading = prefetch(iter(range(1000)), 2)
    next(reading)
    (thread,) = set(threading.enumerate()) - before
    time.sleep(0.1)  # it has made all that it may, and waits
    reading.close()
    thread.join(timeout=2)
    assert not thread.is_alive()
