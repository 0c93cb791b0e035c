"""Workers are killed at random steps, some of them in the middle of a save: nothing changes but the time it takes."""

import pytest

from raygpt.recipes import load_recipe
from raygpt.runs.metrics import read as read_metrics
from raygpt.testing.chaos import chaos, choose_kills, disturb, losses, steps_repeated
from raygpt.testing.faults import Strike, parse

SMALL = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "data": {"tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "cluster": {"workers": 2},
}
EVERY = 5


@pytest.fixture
def survive(ray_cluster, s3, tmp_path):
    """Kill so often in so many steps, or strike as is said: what came of it, and the disturbed run."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))

    def run(engine, kills, steps, where="folder", faults=()):
        training = {"batch_tokens": 5 * 16, "steps": steps, "log_every": 1, "eval_every": 10, "checkpoint_every": EVERY}
        if engine == "torch":
            pytest.importorskip("torch", reason="needs the extra torch")
        changes = {**SMALL, "engine": engine, "training": training, "data.source": str(text)}
        home = str(tmp_path) if where == "folder" else f"{s3}/chaos-{engine}"
        if faults:
            return disturb("tiny", list(faults), home=home, **changes), f"{home}/disturbed"
        return chaos("tiny", kills=kills, seed=1, home=home, **changes), f"{home}/disturbed"

    return run


RESTARTS = [{"step": step, "restart": True, "time": at} for step, at in ((5, 20.0), (5, 40.0), (10, 60.0))]


@pytest.mark.parametrize(
    ("struck", "repeated"),
    [
        (Strike(0, step=8, reached=7, time=10.0), 2),
        (Strike(0, step=6, reached=5, time=30.0), 0),  # before any progress
        (Strike(0, step=10, reached=12, time=39.0), 7),  # in a save of step 10, after two more steps
        (Strike(0, step=11, reached=10, time=39.9), 5),  # the other worker, before both start again
        (Strike(0, step=3, reached=2, time=10.0), 2),  # before anything was logged: there is no line of step 0
        (Strike(0, step=4, reached=3, time=70.0), 3),
    ],
)
def test_what_is_repeated_is_since_the_step_of_the_restart_that_follows(struck, repeated):
    assert steps_repeated(struck, RESTARTS) == repeated


def test_kills_are_spread_over_steps_workers_and_saves():
    training = {"batch_tokens": 5 * 16, "steps": 150, "checkpoint_every": EVERY}
    chosen = [parse(text) for text in choose_kills(load_recipe("tiny", {**SMALL, "training": training}), 20, seed=1)]
    steps = [fault.step for fault in chosen]
    assert len(chosen) == len(set(steps)) == 20
    assert steps == sorted(steps)
    assert {fault.rank for fault in chosen} == {0, 1}
    assert {fault.kind for fault in chosen} == {"kill"}
    saves = [fault.step for fault in chosen if fault.when == "save"]
    assert len(saves) == 6
    assert all(step % EVERY == 0 and step <= 150 - 2 * EVERY for step in saves)  # two more follow, if it is left out


def check(result, folder, kills, steps):
    assert sorted(result.struck) == sorted(result.faults)  # all of them
    assert len(result.struck) == len(result.steps_repeated) == kills
    assert result.is_identical  # parameters, optimizer and every loss, to the bit
    assert [step for step, _ in losses(folder)] == list(range(1, steps + 1))  # each once, in order
    assert 1 <= result.restarts == sum("restart" in line for line in read_metrics(folder)) <= kills


def check_cost(result, kills):
    """On a disk: a save that takes long is left out."""
    # Two may strike before the workers have started again, but that is rare.
    assert result.restarts >= kills - kills // 10
    # A save is begun when the one before is done: what is lost is since the last, and what one takes.
    assert all(0 <= repeated < 2 * EVERY for repeated in result.steps_repeated), result


def test_two_kills_one_of_them_in_a_save_to_s3_leave_no_trace_in_the_numbers(survive):
    faults = ("kill@8", "kill@10:1:save")
    check(*survive("torch", kills=0, steps=20, where="s3", faults=faults), kills=2, steps=20)


@pytest.mark.slow
def test_three_kills_leave_no_trace_in_the_numbers(survive):
    check(*survive("jax", kills=3, steps=30), kills=3, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_twenty_kills_leave_no_trace_in_the_numbers(survive, engine):
    result, folder = survive(engine, kills=20, steps=150)
    check(result, folder, kills=20, steps=150)
    check_cost(result, kills=20)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_segmentation_fault_and_an_exception_leave_none_either(survive, engine):
    result, folder = survive(engine, kills=0, steps=20, faults=("segfault@8", "raise@12:1"))
    check(result, folder, kills=2, steps=20)
    check_cost(result, kills=2)
