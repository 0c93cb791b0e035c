"""Workers are killed at random steps, some of them in the middle of a save: nothing changes but the time it takes."""

import pytest

from raygpt.testing.chaos import chaos, disturb, losses, read_metrics

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


def check(result, folder, kills, steps):
    assert len(result.faults) == kills
    assert result.is_identical  # parameters, optimizer and every loss, to the bit
    assert [step for step, _ in losses(folder)] == list(range(1, steps + 1))  # each once, in order
    assert sum("restart" in line for line in read_metrics(folder)) == kills
    # A save is begun when the one before is done: what is lost is since the last, and what one takes.
    assert all(0 <= repeated < 2 * EVERY for repeated in result.steps_repeated), result


@pytest.mark.parametrize(("engine", "where"), [("jax", "folder"), ("torch", "s3")])
def test_three_kills_leave_no_trace_in_the_numbers(survive, engine, where):
    check(*survive(engine, 3, 30, where), kills=3, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_twenty_kills_leave_no_trace_in_the_numbers(survive, engine):
    check(*survive(engine, kills=20, steps=150), kills=20, steps=150)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_segmentation_fault_and_an_exception_leave_none_either(survive, engine):
    result, folder = survive(engine, kills=0, steps=20, faults=("segfault@8", "raise@12:1"))
    check(result, folder, kills=2, steps=20)
