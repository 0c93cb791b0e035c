"""A signal asks the workers to save and end, whatever the driver is doing just then."""

import os
import signal

import pytest

from raygpt.training.events import StopRequested
from raygpt.training.stopping import STOP_FILE, clear_stop_request, stoppable


def test_a_signal_in_the_middle_of_a_line_prints_nothing_into_it(tmp_path):
    said, asked = [], []
    with stoppable(str(tmp_path), lambda: asked.append("stop"), said.append) as poll:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["stop"]  # the workers know at once
        assert said == []
        poll()
    assert said == [
        StopRequested("SIGTERM, once more to stop at once: saving after one of the next steps", by_signal=True)
    ]


def test_a_second_signal_ends_the_run_without_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("raygpt.training.stopping.AGAIN_S", 0)
    with stoppable(str(tmp_path), lambda: None, lambda event: None):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_the_process_and_at_once_to_its_group_is_one_as_timeout_sends_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("raygpt.training.stopping.AGAIN_S", 60)
    with stoppable(str(tmp_path), lambda: asked.append("stop"), lambda event: None):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["stop"]


@pytest.mark.parametrize("ignored", [True, False])
def test_a_closed_terminal_ends_a_run_unless_nohup_started_it(tmp_path, monkeypatch, ignored):
    asked = []
    monkeypatch.setattr("raygpt.training.stopping.AGAIN_S", 60)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stoppable(str(tmp_path), lambda: asked.append("stop"), lambda event: None):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == ["stop"] * (not ignored)


def test_a_request_from_elsewhere_is_found_and_an_old_one_is_forgotten(tmp_path, monkeypatch):
    asked, said = [], []
    monkeypatch.setattr("raygpt.training.stopping.STOP_POLL_S", 0)
    (tmp_path / STOP_FILE).touch()
    clear_stop_request(str(tmp_path))
    with stoppable(str(tmp_path), lambda: asked.append("stop"), said.append) as poll:
        poll()
        assert asked == []
        (tmp_path / STOP_FILE).touch()
        poll()
        poll()
    assert asked == ["stop"]
    assert [event.by_signal for event in said] == [False]
