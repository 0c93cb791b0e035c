"""Runs on a cluster that `ray start` made: submitted, followed, stopped by raygpt stop; storage that is not shared."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raygpt

pytestmark = pytest.mark.slow
RAY = str(Path(sys.executable).with_name("ray"))
CODE = str(Path(raygpt.__file__).parents[1])
SMALL = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
    "data": {"tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "training": {"batch_tokens": 80, "steps": 5000, "log_every": 1, "eval_every": 5000, "checkpoint_every": 1000},
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def environment():
    return {**os.environ, "PYTHONPATH": CODE, "RAY_AUTH_MODE": "token"}


@pytest.fixture
def head(environment):
    """(address of the cluster, address of its job server)"""
    port, jobs = free_port(), free_port()
    agent = f"--dashboard-agent-listen-port={free_port()}"  # else that of another cluster on this machine is in its way
    here = ("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", agent)
    process = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={jobs}", "--num-cpus=4", *here],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while socket.socket().connect_ex(("127.0.0.1", jobs)) and time.monotonic() < deadline:
        time.sleep(0.3)
    yield f"127.0.0.1:{port}", f"http://127.0.0.1:{jobs}"
    os.killpg(process.pid, signal.SIGKILL)


def words(home, **more):
    text = Path(home, "text.txt")
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))
    keys = {f"{part}.{key}": value for part, values in SMALL.items() for key, value in values.items()}
    keys |= {"data.source": text, "run.storage": home, **more}
    return [f"{key}={value}" for key, value in keys.items()]


def test_a_submitted_run_is_followed_and_stopped_from_elsewhere(head, environment, tmp_path):
    _, jobs = head

    def run(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    train = [sys.executable, "-m", "raygpt", "train", "tiny", *words(tmp_path, **{"run.name": "job"})]
    metrics, deadline = tmp_path / "job" / "metrics.jsonl", time.monotonic() + 900
    submit = [RAY, "job", "submit", "--address", jobs, "--no-wait", "--submission-id", "job", "--", *train]
    while (submitted := run(*submit)).returncode:  # the job server answers before it can take jobs
        assert time.monotonic() < deadline, submitted.stderr
    while not (metrics.exists() and '"step": 20' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.3)
    asked = run(sys.executable, "-m", "raygpt", "stop", tmp_path / "job")
    assert asked.returncode == 0, asked.stderr
    while "stopped after step" not in (log := run(RAY, "job", "logs", "--address", jobs, "job").stdout):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    step = int(log.partition("stopped after step ")[2].partition(",")[0])
    last = [json.loads(line) for line in metrics.read_text().splitlines()][-1]["step"]
    assert last == step
    assert (tmp_path / "job" / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process a file system of its own")
def test_a_storage_that_a_node_does_not_share_is_refused_before_anything_starts(head, environment, tmp_path):
    address, _ = head
    elsewhere = f"mount -t tmpfs tmpfs {tmp_path} && exec {RAY} start --address={address} --num-cpus=4 --block"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", elsewhere],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        joined = "import ray, time; ray.init(log_to_driver=False)\nwhile len(ray.nodes()) < 2: time.sleep(0.2)"
        subprocess.run([sys.executable, "-c", joined], env={**environment, "RAY_ADDRESS": address}, check=True)
        command = [sys.executable, "-m", "raygpt", "train", "tiny", *words(tmp_path, **{"run.name": "split"})]
        done = subprocess.run(
            command, env={**environment, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=600
        )
    finally:
        os.killpg(node.pid, signal.SIGKILL)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert f"run.storage: {tmp_path}/split is not the same folder on node" in said
    assert "write a folder that all nodes share (NFS), or s3://bucket/path" in said
    assert not (tmp_path / "split" / "metrics.jsonl").exists()


@pytest.mark.parametrize("token", [None, "0" * 64], ids=["none", "another"])
def test_who_has_not_the_clusters_token_is_refused(head, environment, tmp_path, token):
    address, _ = head
    stranger = {key: value for key, value in environment.items() if not key.startswith("RAY_AUTH")}
    stranger |= {"HOME": str(tmp_path), "RAY_ADDRESS": address}
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(token)
    command = [sys.executable, "-m", "raygpt", "train", "tiny", *words(tmp_path, **{"run.name": "strange"})]
    done = subprocess.run(command, env=stranger, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert f"the Ray cluster at RAY_ADDRESS={address} wants its token; copy ~/.ray/auth_token" in " ".join(
        done.stderr.split()
    )
    assert not (tmp_path / "strange" / "metrics.jsonl").exists()
