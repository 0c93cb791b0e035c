"""Items made by a thread before they are needed."""

import threading
import time
from types import SimpleNamespace

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


def test_how_long_an_item_was_waited_for_comes_with_it(monkeypatch):
    """By a clock that advances only while an item is made for a reader who has begun to wait."""
    now, looks = [0.0], threading.Semaphore(0)

    def perf_counter():
        looks.release()
        return now[0]

    def items():
        for seconds in (5.0, 0.0, 3.0):
            looks.acquire()  # the reader begins to wait
            now[0] += seconds
            yield seconds
            looks.acquire()  # it has the item

    monkeypatch.setattr("raygpt.training.prefetch.time", SimpleNamespace(perf_counter=perf_counter))
    assert list(prefetch(items(), 2)) == [(5.0, 5.0), (0.0, 0.0), (3.0, 3.0)]


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
    made, before = [], set(threading.enumerate())
    reading = prefetch((made.append(n) for n in range(1000)), 2)
    next(reading)
    (thread,) = set(threading.enumerate()) - before
    while len(made) < 4:  # then it has made all that it may, and waits
        time.sleep(0.01)
    reading.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
