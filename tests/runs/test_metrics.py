"""What is kept of a run's metrics when it is killed, when the disk is full, and when it goes on."""

import json
import threading
from pathlib import Path

import pytest

from raygpt.runs.metrics import MetricsFile, latest, read, restarts


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


def test_task_scores_without_a_loss_are_not_there_twice_either(metrics, tmp_path):
    """What is logged of a validation where the corpus is too short for one, and eval_tasks are asked for."""
    metrics.append({"step": 4, "lambada_acc": 0.1})
    metrics.append({"step": 5, "loss": 5.0})
    metrics.append({"step": 5, "restart": True})
    metrics.append({"step": 5, "lambada_acc": 0.2})
    before = lines(tmp_path)
    MetricsFile(str(tmp_path)).keep_until(5)
    assert lines(tmp_path) == before
    MetricsFile(str(tmp_path)).keep_until(5, is_validated=False)
    assert lines(tmp_path) == before[:-1]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 4, "lo',  # killed while it was written
        b'{"step": 4, "loss": 4.0}',  # all but its end
        b'{"step": 4, "lo\n',
        b"\0" * 40 + b"\n",  # a machine that lost its power
        b"\xff\xfe\x80\n",
        b'"step"\n',
        b'{"step": "four", "loss": 4.0}\n',
        b"{}\n",
        b"\n",
    ],
)
def test_what_is_left_of_a_last_line_is_read_as_none_and_written_over(metrics, tmp_path, damage):
    whole = lines(tmp_path)
    with Path(tmp_path, "metrics.jsonl").open("ab") as file:
        file.write(damage)
    assert read(str(tmp_path)) == whole
    again = MetricsFile(str(tmp_path))
    assert again.keep_until(10)
    again.append({"step": 4, "loss": 4.0})
    assert lines(tmp_path) == read(str(tmp_path)) == [*whole, {"step": 4, "loss": 4.0}]


def test_a_line_whose_values_are_not_numbers_is_not_read(metrics, tmp_path):
    before = lines(tmp_path)
    with Path(tmp_path, "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": "4.0"}\n{"step": 4, "loss": null}\n{"step": 5, "loss": NaN}\n')
    *known, last = read(str(tmp_path))
    assert known == before
    assert (last["step"], str(last["loss"])) == (5, "nan")


def test_a_run_that_has_logged_nothing_has_no_lines(tmp_path):
    assert read(str(tmp_path)) == []
    assert latest([]) == {}
    assert not MetricsFile(str(tmp_path)).keep_until(0)


def test_the_latest_of_each_metric_and_the_restarts(metrics, tmp_path):
    metrics.append({"step": 3, "restart": True, "time": 5.0})
    metrics.append({"step": 4, "loss": 4.0})
    assert latest(read(str(tmp_path))) == {"step": 4, "loss": 4.0, "val_loss": 9.0, "time": 5.0}
    assert restarts(read(str(tmp_path))) == [{"step": 3, "restart": True, "time": 5.0}]


def test_lines_in_an_object_store_are_read_back_and_go_on(s3):
    first = MetricsFile(f"{s3}/logged")
    first.keep_until(0)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": float(step)})
    first.flush()
    again = MetricsFile(f"{s3}/logged")
    assert again.keep_until(2)
    again.append({"step": 3, "loss": 3.5})
    again.flush()
    assert [line["loss"] for line in read(f"{s3}/logged")] == [1.0, 2.0, 3.5]


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


def test_a_driver_that_slept_does_not_write_over_the_one_that_took_the_run_over(metrics, tmp_path):
    said = []
    metrics._warn = said.append
    other = MetricsFile(str(tmp_path))
    other.keep_until(2)
    for step in range(3, 9):
        other.append({"step": step, "loss": 0.5})
    metrics.append({"step": 4, "loss": 4.0})  # it woke up
    other.append({"step": 9, "loss": 0.5})
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))
    assert len(said) == 1
    assert "another process has written them" in said[0]


def test_nor_does_it_fill_up_what_the_other_has_dropped(metrics, tmp_path):
    MetricsFile(str(tmp_path)).keep_until(1)
    metrics.append({"step": 4, "loss": 4.0})
    assert Path(tmp_path, "metrics.jsonl").read_bytes() == b'{"step": 1, "loss": 1.0}\n'
