"""`raygpt train --unattended`, the entrypoint of jobs that a scheduler restarts: how it ends, and what it waits for."""

import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from raygpt.deploy import rayjob
from raygpt.deploy.deployment import plan_deployment
from raygpt.deploy.options import Options
from raygpt.recipes import load_recipe
from raygpt.testing.chaos import losses
from raygpt.training.ray import unattended
from raygpt.training.stopping import ask_to_stop

RECIPE = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
    "data": {"source": "/storage/text.txt", "tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "training": {"batch_tokens": 80, "steps": 100_000, "log_every": 1, "eval_every": 100_000},
    "cluster": {"accelerator": "cpu"},
}


@pytest.fixture
def job(tmp_path):
    """(words of the entrypoint, folder of the run), with the paths that its pods mount in a folder here."""
    (tmp_path / "text.txt").write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))
    deployment = plan_deployment(load_recipe("tiny", RECIPE), Options("kubernetes", volume="shared"))
    config, *_, manifest = yaml.safe_load_all(rayjob.text(deployment))
    (tmp_path / "recipe.yaml").write_text(config["data"]["recipe.yaml"].replace("/storage/", f"{tmp_path}/"))
    python, module, name, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert (python, module, name) == ("python", "-m", "raygpt")
    words = [word.replace(rayjob.RECIPE_FOLDER, str(tmp_path)) for word in words]
    return words, tmp_path / "runs" / "tiny"


def after_step(folder: Path, step: int, act) -> threading.Thread:
    """Act, in another thread, when the run has logged a step."""

    def wait():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if (folder / "metrics.jsonl").exists() and (logged := losses(str(folder))) and logged[-1][0] >= step:
                act()
                return
            time.sleep(0.1)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_what_raygpt_stop_ended_is_a_success_and_what_a_signal_ended_is_not(ray_cluster, raygpt, job):
    words, folder = job
    thread = after_step(folder, 10, lambda: ask_to_stop(str(folder)))
    status, out, err = raygpt(*words)
    thread.join()
    assert status == 0, err
    assert "stopped by raygpt stop" in out
    done = losses(str(folder))[-1][0]
    thread = after_step(folder, done + 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, out, err = raygpt(*words)
    thread.join()
    assert status == 130, err
    assert f"continuing after step {done}" in out


@pytest.fixture
def stopped(monkeypatch):
    """What the job server was asked to end."""
    asked = []
    monkeypatch.setattr("raygpt.jobs.stop_this_job", lambda: asked.append("this job"))
    return asked


def test_an_error_that_no_retry_helps_ends_with_a_status_of_its_own_and_stops_a_rayjob(raygpt, job, stopped):
    words, _ = job
    status, _, err = raygpt(*words, "data.source=missing.txt")
    assert (status, stopped) == (78, ["this job"])
    assert "no text at" in err
    assert "a retry would end the same way, so there is none" in " ".join(err.split())
    of_slurm = ["--unattended" if word == "--kuberay" else word for word in words]
    status, *_ = raygpt(*of_slurm, "data.source=missing.txt")
    assert (status, stopped) == (78, ["this job"])  # where there is no job server, nobody is asked


def test_an_error_that_a_retry_may_help_is_one_for_the_scheduler(raygpt, job, stopped, tmp_path):
    words, _ = job
    (tmp_path / "file").touch()
    status, _, err = raygpt(*words, f"run.storage={tmp_path}/file")
    assert (status, stopped) == (1, []), err


def test_a_restarted_job_waits_until_its_nodes_have_joined(monkeypatch):
    class Workers:
        cluster = load_recipe("tiny", {"cluster.workers": 2}).cluster
        rooms = iter([0, 0, 1, 2])

        def room(self):
            return next(self.rooms)

        def __str__(self):
            return "2 × 1 CPU"

    monkeypatch.setattr(unattended, "POLL_S", 0)
    monkeypatch.setattr(unattended, "has_autoscaler", lambda: False)
    said = []
    unattended.wait_for_nodes(Workers(), said.append)
    assert said == [f"waiting for nodes: the cluster has room for {room} of 2 × 1 CPU" for room in (0, 1)]
    assert list(Workers.rooms) == []
