"""The curves of runs: nothing lost that a reader would look for."""

import math

import pytest
from directories import logged, make_run

from raygpt.runs import open_run
from raygpt.show.curves import loss_curves, metric_curves, restart_marks, thinned


@pytest.fixture
def run(tmp_path):
    lines = [{"step": 0, "val_loss": 8.0, "time": 990.0}, *logged([10, 20], lambda step: 100 / step, mfu=0.5)]
    lines += [{"step": 20, "restart": True, "time": 1030.0}, {"step": 30, "loss": math.nan, "time": 1040.0}]
    return open_run(make_run(tmp_path, "a", lines))


@pytest.mark.parametrize(
    ("axis", "train", "val", "restart"),
    [
        ("step", [10, 20, 30], 0, 20),
        ("tokens", [10 * 4096, 20 * 4096, 30 * 4096], 0, 20 * 4096),
        ("time", [20.0, 30.0, 50.0], 0.0, 40.0),  # since the first line
    ],
)
def test_losses_and_restarts_lie_at_their_step_tokens_or_time(run, axis, train, val, restart):
    training, validation = loss_curves([run], axis)
    assert training.points == list(zip(train, [10.0, 5.0, None], strict=True))  # no number, no value: a gap
    assert validation.points == [(val, 8.0)]
    (mark,) = restart_marks([run], axis)
    assert (mark.x, mark.title) == (restart, "a was restarted after step 20")


def test_a_metric_has_a_curve_only_where_it_was_logged(run):
    (curve,) = metric_curves([run], "mfu", "step", 100)
    assert curve.points == [(10, 50.0), (20, 50.0)]
    assert metric_curves([run], "unheard_of", "step") == []


def test_one_run_has_two_colours_and_several_have_one_each(run):
    assert [(curve.name, curve.colour) for curve in loss_curves([run], "step")] == [("training", 0), ("validation", 1)]
    assert [(curve.name, curve.colour, curve.is_faint) for curve in loss_curves([run, run], "step")] == [
        ("a training", 0, True),
        ("a validation", 0, False),
        ("a training", 1, True),
        ("a validation", 1, False),
    ]


def test_a_run_without_times_has_no_time_axis(tmp_path):
    run = open_run(make_run(tmp_path, "a", [{"step": 1, "loss": 2.0}]))
    assert loss_curves([run], "time") == []


def test_a_long_run_is_thinned_but_keeps_its_ends_and_its_spikes():
    lines = [{"step": step, "loss": 1.0 + (step % 7) / 100} for step in range(100_000)]
    lines[43_210]["loss"], lines[77_777]["loss"], lines[5]["loss"] = 10.0, 0.5, math.nan
    thin = thinned(lines, "loss", 1000)
    assert 900 <= len(thin) <= 1002
    steps = [line["step"] for line in thin]
    assert {0, 43_210, 77_777, 99_999} <= set(steps)
    assert steps == sorted(steps)
    short = [{"loss": math.nan}, {"loss": 1.0}]
    assert thinned(short, "loss", 1000) is short
