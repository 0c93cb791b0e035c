"""Metrics as columns: nothing lost that a reader would look for."""

import math

from directories import logged, make_run

from raygpt.runs import open_run
from raygpt.show.series import compact, restarts, thinned, train_series, val_series


def test_columns_follow_the_log_and_what_is_no_number_is_none(tmp_path):
    lines = [{"step": 0, "val_loss": 8.0, "time": 990.0}, *logged([10, 20], lambda step: 100 / step, mfu=0.5)]
    lines += [{"step": 20, "restart": True, "time": 1030.0}, {"step": 30, "loss": math.nan, "time": 1040.0}]
    run = open_run(make_run(tmp_path, "a", lines))
    train = train_series(run)
    assert train["step"] == [10, 20, 30]
    assert train["tokens"] == [10 * 4096, 20 * 4096, 30 * 4096]
    assert train["time"] == [20.0, 30.0, 50.0]  # since the first line
    assert train["loss"] == [10.0, 5.0, None]
    assert train["mfu"] == [0.5, 0.5, None]
    assert val_series(run) == {"step": [0], "tokens": [0], "time": [0.0], "loss": [8.0]}
    assert restarts(run) == {"step": [20], "tokens": [20 * 4096], "time": [40.0]}


def test_a_run_without_times_has_no_time_axis(tmp_path):
    run = open_run(make_run(tmp_path, "a", [{"step": 1, "loss": 2.0}]))
    assert train_series(run)["time"] == [None]


def test_a_long_run_is_thinned_but_keeps_its_ends_and_its_spikes():
    steps = list(range(100_000))
    loss = [10.0 if step == 43_210 else 1.0 + (step % 7) / 100 for step in steps]
    loss[77_777] = 0.5
    thin = thinned({"step": steps, "loss": loss, "lr": [float(s) for s in steps]}, 1000)
    assert 900 <= len(thin["step"]) <= 1002
    assert {0, 43_210, 77_777, 99_999} <= set(thin["step"])
    assert thin["step"] == sorted(thin["step"])
    assert thin["lr"] == [float(step) for step in thin["step"]]  # rows stay together
    short = {"step": [1, 2], "loss": [None, 1.0]}
    assert thinned(short, 1000) is short


def test_a_page_carries_whole_steps_and_short_numbers():
    series = {"step": [123_456_789], "tokens": [1], "time": [12.345], "loss": [3.14159265], "lr": [None]}
    assert compact(series) == {"step": [123_456_789], "time": [12.3], "loss": [3.1416], "lr": [None]}
