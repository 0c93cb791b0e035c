"""What is kept of a run's metrics when it is killed, when the disk is full, and when it goes on."""

import json
import threading
from pathlib import Path

import pytest

from raygpt.training.session import MetricsFile


def lines(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def metrics(tmp_path):
    file = MetricsFile(str(tmp_path))
    file.keep_until(0)
    for step in range(1, 4):
        file.append({"step": step, "loss": float(step)})
    file.append({"step": 3, "val_loss": 9.0})
    return file


def test_what_is_logged_after_the_step_that_is_gone_on_from_is_dropped(metrics, tmp_path):
    assert MetricsFile(str(tmp_path)).keep_until(2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_validation_that_is_made_again_is_not_there_twice(metrics, tmp_path):
    MetricsFile(str(tmp_path)).keep_until(3, is_validated=False)
    assert lines(tmp_path)[-1] == {"step": 3, "loss": 3.0}


def test_half_a_line_that_a_killed_process_left_is_no_line(metrics, tmp_path):
    with Path(tmp_path, "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = MetricsFile(str(tmp_path))
    again.keep_until(10)
    again.append({"step": 4, "loss": 4.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 3, 4]


def test_lines_that_a_full_disk_refused_are_kept_and_written_once(metrics, tmp_path, monkeypatch):
    warnings = []
    metrics._warn = warnings.append
    real = open

    def full(path, mode="r"):
        file = real(path, mode)
        if "metrics.jsonl" in str(path):
            whole = file.write

            def write(content):
                whole(content[:5])  # as much as there was room for
                file.flush()
                raise OSError(28, "No space left on device")

            file = Proxy(file, write)
        return file

    monkeypatch.setattr("builtins.open", full)
    metrics.append({"step": 4, "loss": 4.0})
    metrics.append({"step": 5, "loss": 5.0})
    monkeypatch.setattr("builtins.open", real)
    metrics.append({"step": 6, "loss": 6.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 3, 4, 5, 6]
    assert len(warnings) == 1


class Proxy:
    """A file that writes in its own way."""

    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def test_no_line_is_lost_while_another_thread_flushes(tmp_path):
    file, done = MetricsFile(str(tmp_path)), threading.Event()
    file.keep_until(0)

    def flush():
        while not done.is_set():
            file.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for step in range(1, 3001):
        file.append({"step": step})
    done.set()
    thread.join()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 3001))
