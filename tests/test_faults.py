"""Faults on purpose: how they are written, and whom they strike."""

import pytest

from raygpt.errors import RaygptError
from raygpt.testing import faults
from raygpt.testing.faults import Fault, Faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@20", Fault("kill", 20)),
        ("kill@20:1", Fault("kill", 20, rank=1)),
        ("hang@3:2:always", Fault("hang", 3, rank=2, once=False)),
        ("raise@7:save", Fault("raise", 7, when="save")),
    ],
)
def test_a_fault_is_a_word(text, fault):
    assert faults.parse(text) == fault


@pytest.mark.parametrize("text", ["kill", "kill@", "explode@3", "kill@3:soon", "kill@-1"])
def test_what_is_no_fault_is_refused_with_an_example(text):
    with pytest.raises(RaygptError, match=r"is no fault; write kill\|segfault\|raise\|hang@STEP"):
        faults.parse(text)


def test_without_the_variable_there_are_no_faults(monkeypatch, tmp_path):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.from_environment(str(tmp_path)) == Faults((), str(tmp_path))


def test_it_strikes_its_rank_at_its_step_and_moment_once(tmp_path):
    asked = Faults((Fault("raise", 5, rank=1), Fault("raise", 6, when="save")), str(tmp_path))
    for step, rank in ((5, 0), (4, 1), (6, 0)):
        asked.strike(step, rank)
    with pytest.raises(RuntimeError, match="at step 5"):
        asked.strike(5, 1)
    asked.strike(5, 1)  # a worker that came back gets past it
    with pytest.raises(RuntimeError, match="at step 6"):
        asked.strike(6, 0, "save")


def test_one_in_a_save_strikes_in_the_first_at_or_after_its_step(tmp_path):
    asked = Faults((Fault("raise", 10, rank=1, when="save"),), str(tmp_path))
    for step, rank, when in ((10, 1, "step"), (5, 1, "save"), (10, 0, "save"), (15, 0, "save"), (15, 1, "step")):
        asked.strike(step, rank, when)
    with pytest.raises(RuntimeError, match="an injected fault"):
        asked.strike(15, 1, "save")  # that of step 10 was left out
    asked.strike(20, 1, "save")


def test_several_that_wait_for_a_save_strike_one_save_each(tmp_path):
    asked = Faults((Fault("raise", 5, when="save"), Fault("raise", 10, when="save")), str(tmp_path))
    for step in (10, 15):
        with pytest.raises(RuntimeError, match="an injected fault"):
            asked.strike(step, 0, "save")
    asked.strike(20, 0, "save")
    assert [(strike.number, strike.step) for strike in asked.struck()] == [(0, 10), (1, 15)]


def test_what_struck_is_told_in_its_order_with_the_step_that_was_reached(tmp_path):
    asked = (Fault("raise", 4, when="save"), Fault("raise", 8), Fault("raise", 99))

    def train(steps, saved):
        """A worker that takes these steps, and comes to the commit of a checkpoint at the end."""
        worker = Faults(asked, str(tmp_path))
        for step in steps:
            worker.strike(step, 0)
        worker.strike(saved, 0, "save")

    with pytest.raises(RuntimeError, match="at step 8"):
        train(range(1, 12), saved=4)
    with pytest.raises(RuntimeError, match="at step 4"):
        train(range(1, 12), saved=5)  # six steps are taken while it is written, and an eleventh begun
    struck = Faults(asked, str(tmp_path)).struck()
    assert [(strike.number, strike.step, strike.reached) for strike in struck] == [(1, 8, 7), (0, 5, 10)]


def test_one_that_always_strikes_does(tmp_path):
    asked = Faults((Fault("raise", 5, once=False),), str(tmp_path))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="at step 5"):
            asked.strike(5, 0)
