"""What a run leaves beside its metrics: samples, what it ran on, how it ended."""

import json
import platform

import pytest

from raygpt.errors import RaygptError
from raygpt.runs.records import (
    Outcome,
    keep_sample,
    read_about,
    read_result,
    read_samples,
    write_about,
    write_result,
)


@pytest.fixture(params=["disk", "s3"])
def folder(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else f"{request.getfixturevalue('s3')}/records-{tmp_path.name}"


def test_samples_are_kept_in_order_and_those_that_a_restart_undid_are_gone(folder):
    assert read_samples(folder) == []
    for step, text in [(0, "a"), (100, "b\nc"), (200, "é"), (100, "again")]:
        keep_sample(folder, step, text)
    assert read_samples(folder) == [{"step": 0, "text": "a"}, {"step": 100, "text": "again"}]


def test_what_a_run_ran_on_is_kept_with_machine_and_versions(folder):
    assert read_about(folder) == {}
    write_about(folder, {"engine": "jax 1", "device": "cpu"})
    about = read_about(folder)
    assert (about["engine"], about["device"]) == ("jax 1", "cpu")
    assert platform.node() not in json.dumps(about)  # a report may be shown to others
    assert about["versions"]["python"] == platform.python_version()
    assert about["versions"]["jax"] == __import__("jax").__version__
    assert about["processor"]


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (None, "finished", ""),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (RaygptError("no space left; free some"), "failed", "no space left; free some"),
        (ValueError("bad\nTraceback of it"), "failed", "bad"),
        (RuntimeError("Training failed:\n\n  a worker died\nmore"), "failed", "Training failed: a worker died"),
        (MemoryError(), "failed", "MemoryError"),
    ],
)
def test_how_a_run_ended_is_kept_in_a_line(tmp_path, error, state, why):
    assert read_result(str(tmp_path)) is None
    write_result(str(tmp_path), Outcome.of(error))
    result = read_result(str(tmp_path))
    assert (result["state"], result["why"]) == (state, why)
    assert result["time"] > 1.7e9
