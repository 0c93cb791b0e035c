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


def test_mostly_there_are_none(monkeypatch, tmp_path):
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


def test_one_that_always_strikes_does(tmp_path):
    asked = Faults((Fault("raise", 5, once=False),), str(tmp_path))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="at step 5"):
            asked.strike(5, 0)
