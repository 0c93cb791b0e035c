"""How a run and its plan compared."""

import json

from raygpt.runs.planned import compare
from raygpt.runs.records import write_peak, write_plan

PLAN = {"tokens": 4096_000, "steps": 1000, "step_s": {"total": 0.1}, "memory": {"total": 2**30}}


def log(folder, *speeds):
    lines = [{"step": n, "loss": 1.0, "tokens_per_s": speed} for n, speed in enumerate(speeds, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_plan_of_the_last_start_is_compared_with_its_speeds_alone(tmp_path):
    """A run that goes on with other hardware has the plan of that."""
    write_plan(str(tmp_path), PLAN)
    log(tmp_path, 100.0, 100.0, 100.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "restart": true}\n{"step": 4, "loss": 1.0, "tokens_per_s": 40960.0}\n')
    assert compare(str(tmp_path)).taken_s == 0.1


def test_a_run_without_a_plan_is_not_compared(tmp_path):
    assert compare(str(tmp_path)) is None
    write_peak(str(tmp_path), 5)
    assert compare(str(tmp_path)) is None


def test_the_median_step_and_the_peak_are_compared_with_the_plan(tmp_path):
    write_plan(str(tmp_path), PLAN)
    assert str(compare(str(tmp_path))) == "100.0 ms a step planned; 1.0 GiB planned on a device"
    log(tmp_path, 10_000.0, 32_768.0, 40_000.0)  # the first one compiles
    write_peak(str(tmp_path), int(1.1 * 2**30))
    got = compare(str(tmp_path))
    assert got.taken_s == 0.125
    assert str(got) == (
        "100.0 ms a step planned, 125.0 ms taken (+25%); "
        "1.0 GiB planned on a device, 1.1 GiB at most in use (+10%)"
    )  # fmt: skip
