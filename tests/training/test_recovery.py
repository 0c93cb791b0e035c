"""Real runs that are disturbed: workers that hang or fail again and again, a driver that is killed or told to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raygpt
from raygpt.errors import RaygptError
from raygpt.recipes import check_part
from raygpt.runs import checkpoints
from raygpt.runs.metrics import read as read_metrics
from raygpt.testing.chaos import losses
from raygpt.testing.faults import VARIABLE
from raygpt.training.ray.backend import Processes
from raygpt.training.ray.mailbox import open_mailbox
from raygpt.training.ray.scaling import choose_workers
from raygpt.training.ray.trainer import Trainer, fit
from raygpt.training.stopping import AGAIN_S, ask_to_stop

SMALL = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "data": {"tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "training": {"batch_tokens": 80, "steps": 40, "log_every": 1, "eval_every": 20, "checkpoint_every": 5},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    home = tmp_path_factory.mktemp("recovery")
    text = home / "text.txt"
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))
    return {**SMALL, "data.source": str(text), "run.storage": str(home)}


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, recipe):
    return raygpt.train("tiny", **recipe, **{"run.name": "undisturbed"})


# Workers


@pytest.mark.slow
def test_a_worker_that_hangs_is_noticed_and_shows_where(ray_cluster, recipe, undisturbed, monkeypatch):
    monkeypatch.setenv(VARIABLE, "hang@8")
    result = raygpt.train("tiny", **recipe, **{"run.name": "hung", "training.hang_after": 20})
    assert result.error is None
    assert losses(result.path) == losses(undisturbed.path)
    assert [line["step"] for line in read_metrics(result.path) if "restart" in line] == [5]
    log = Path(result.path, "logs", "worker-0.log").read_text()
    assert "Timeout" in log
    assert "in strike" in log  # the line that it hung at


@pytest.mark.slow
def test_where_one_worker_hangs_all_show_where_they_are(ray_cluster, recipe, monkeypatch):
    monkeypatch.setenv(VARIABLE, "hang@8:1")
    asked = {"run.name": "both", "cluster.workers": 2, "training.steps": 10, "training.hang_after": 20}
    result = raygpt.train("tiny", **recipe, **asked)
    assert result.error is None
    waits, hangs = (Path(result.path, "logs", f"worker-{rank}.log").read_text() for rank in (0, 1))
    for log in (waits, hangs):
        assert "Timeout" in log
        assert "loop.py" in log  # the stack of the thread that trains
    assert "in strike" in hangs
    assert "in strike" not in waits


@pytest.mark.slow
def test_workers_end_with_a_driver_that_gives_up_where_ray_lives_on(ray_cluster, tmp_path):
    def work(config):  # a closure, so that Ray sends it by value
        import os
        import time
        from pathlib import Path

        import ray.train

        rank = ray.train.get_context().get_world_rank()
        Path(config["folder"], f"{rank}.pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)

    def poll():
        if len(list(tmp_path.glob("*.pid"))) == 2:
            raise RaygptError("taken over by somebody else")

    workers, mailbox = choose_workers(check_part("cluster", {"workers": 2})), open_mailbox()
    trainer = Trainer(work, {"folder": str(tmp_path)}, workers, str(tmp_path / "run"), mailbox, backend=Processes())
    with pytest.raises(RaygptError, match="taken over"):
        fit(trainer, lambda event: None, poll)
    deadline = time.monotonic() + 600
    for path in tmp_path.glob("*.pid"):
        while Path("/proc", path.read_text()).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_fault_that_comes_back_at_its_step_ends_the_run_with_that_diagnosis(ray_cluster, recipe, monkeypatch):
    monkeypatch.setenv(VARIABLE, "raise@8:always")
    result = raygpt.train("tiny", **recipe, **{"run.name": "thrice"})
    assert isinstance(result.error, RaygptError)
    assert "the same fault came 3 times after step 7" in str(result.error)
    assert "RuntimeError: an injected fault at step 8" in str(result.error)
    assert [step for step, _ in losses(result.path)][:6] == list(range(1, 7))  # the last may be missing


@pytest.mark.extended  # test_faults_judged.py has the limit
def test_no_restarts_are_made_where_none_are_allowed(ray_cluster, recipe, monkeypatch):
    monkeypatch.setenv(VARIABLE, "raise@3")
    result = raygpt.train("tiny", **recipe, **{"run.name": "once", "cluster.max_faults": 0})
    assert "an injected fault at step 3" in str(result.error)


# The driver


@pytest.fixture
def driver(recipe):
    """`raygpt train` in a process of its own, with a cluster of its own."""
    started = []

    def start(name, **variables):
        words = [f"{key}={value}" for key, value in recipe.items() if not isinstance(value, dict)]
        for part, values in SMALL.items():
            words += [f"{part}.{key}={value}" for key, value in values.items()]
        words += ["training.steps=4000", f"run.name={name}"]
        quickly = {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"
        }  # as in the session's cluster: other programs round differently
        found = {"PYTHONPATH": str(Path(raygpt.__file__).parents[1])}
        environment = {**os.environ, **variables, **quickly, **found}
        command = [sys.executable, "-m", "raygpt", "train", "tiny", *words]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for_step(folder, step, process):
    """Until a run has logged it."""
    deadline = time.monotonic() + 900
    path = Path(folder, "metrics.jsonl")
    while time.monotonic() < deadline and process.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.1)
    raise AssertionError(process.communicate(timeout=30)[0])


def wait_for_line(text, process):
    """Until a process has said it."""
    said = []
    for line in process.stdout:
        said.append(line)
        if text in line:
            return
    raise AssertionError("".join(said))


@pytest.mark.slow
def test_a_driver_may_be_killed_interrupted_and_stopped_from_elsewhere(driver, recipe, undisturbed):
    folder = f"{recipe['run.storage']}/driven"
    killed = driver("driven")
    wait_for_step(folder, 12, killed)
    killed.kill()
    killed.wait()
    interrupted = driver("driven")  # its lock is stale
    wait_for_step(folder, 60, interrupted)
    interrupted.send_signal(signal.SIGINT)
    output = interrupted.communicate(timeout=600)[0]
    assert interrupted.returncode == 130, output
    assert "SIGINT, once more to stop at once: saving after one of the next steps" in output
    assert "the same command resumes it" in output
    stopped = driver("driven")
    done = losses(folder)[-1][0]
    wait_for_step(folder, done + 10, stopped)
    assert f"process {stopped.pid}" in ask_to_stop(folder)
    output = stopped.communicate(timeout=600)[0]
    assert stopped.returncode == 130, output
    assert f"continuing after step {done}" in output
    logged = losses(folder)
    assert [step for step, _ in logged] == list(range(1, len(logged) + 1))
    assert logged[:40] == losses(undisturbed.path)
    with pytest.raises(RaygptError, match="is not being trained"):
        ask_to_stop(folder)


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_nobody_and_a_closed_terminal_saves(driver, recipe, undisturbed):
    folder = f"{recipe['run.storage']}/twice"
    hung = driver("twice", **{VARIABLE: "hang@13"})  # it will never save
    wait_for_step(folder, 12, hung)
    while checkpoints.find_newest(folder).step < 10:  # it is written while the step hangs
        assert hung.poll() is None
        time.sleep(0.05)
    hung.send_signal(signal.SIGINT)
    wait_for_line("once more to stop at once", hung)
    time.sleep(2 * AGAIN_S)  # at once it would count as the same request
    hung.send_signal(signal.SIGINT)
    output = hung.communicate(timeout=600)[0]
    assert hung.returncode == 130, output
    assert checkpoints.find_newest(folder).step == 10
    closed = driver("twice")
    wait_for_step(folder, 50, closed)
    closed.send_signal(signal.SIGHUP)
    output = closed.communicate(timeout=600)[0]
    assert closed.returncode == 130, output
    assert "SIGHUP, once more to stop at once" in output
    logged = losses(folder)
    assert checkpoints.find_newest(folder).step == len(logged)
    assert [step for step, _ in logged] == list(range(1, len(logged) + 1))
    assert logged[:40] == losses(undisturbed.path)
    assert [line["step"] for line in read_metrics(folder) if "restart" in line] == [10]
