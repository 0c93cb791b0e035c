"""A signal asks the workers to save and end, whatever the driver is doing just then."""

import os
import signal
from types import SimpleNamespace

import pytest

from raygpt.training.stopping import WISH, forget_wish, stoppable


@pytest.fixture
def mailbox():
    wishes = []
    return SimpleNamespace(wish=SimpleNamespace(remote=wishes.append), wishes=wishes)


def test_a_signal_in_the_middle_of_a_line_prints_nothing_into_it(tmp_path, mailbox):
    said = []
    with stoppable(str(tmp_path), mailbox, said.append) as look:
        os.kill(os.getpid(), signal.SIGTERM)
        assert mailbox.wishes == ["stop"]  # the workers know at once
        assert said == []
        look()
    assert [event["text"] for event in said] == [
        "SIGTERM, once more to stop at once: saving after one of the next steps"
    ]


def test_the_second_does_not_wait(tmp_path, mailbox):
    with stoppable(str(tmp_path), mailbox, lambda event: None):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_wish_from_elsewhere_is_found_and_an_old_one_is_forgotten(tmp_path, mailbox, monkeypatch):
    monkeypatch.setattr("raygpt.training.stopping.LOOKED_S", 0)
    (tmp_path / WISH).touch()
    forget_wish(str(tmp_path))
    with stoppable(str(tmp_path), mailbox, lambda event: None) as look:
        look()
        assert mailbox.wishes == []
        (tmp_path / WISH).touch()
        look()
    assert mailbox.wishes == ["stop"]
