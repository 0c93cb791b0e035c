"""The batch script's body, with stand-ins for slurm's programs: signalled, requeued, run again to its end."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pods import CODE, descendants, end, wait_for

from raygpt.deploy import slurm
from raygpt.deploy.deployment import plan_deployment
from raygpt.deploy.options import Options
from raygpt.recipes import load_recipe
from raygpt.testing.chaos import losses
from raygpt.training.stopping import ask_to_stop

# One node of the job gets the command as it is; each of the others an address of its own.
SRUN = """#!/bin/bash
nodes=1
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) nodes=${1#*=} ;; --exclude=*) others=yes ;; esac
  shift
done
for number in $(seq "$nodes"); do
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
  where=(--dashboard-agent-listen-port="$port")
  [ -n "${others:-}" ] && where+=(--node-ip-address="127.0.0.$((number + 1))")
  "$@" "${where[@]}" >>"$LOGS" 2>&1 &
done
wait
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) printf '127.0.0.1\\n127.0.0.2\\n' ;;
  requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""
RECIPE = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "data": {"tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    # Without end, so that it never matters how fast it trains beside what is done to it
    "training": {"batch_tokens": 80, "steps": 10**6, "log_every": 1, "eval_every": 10**6, "checkpoint_every": 20},
    "cluster": {"accelerator": "cpu", "workers": 2, "resources_per_worker": {"CPU": 2}},
}


def free_job():
    """A job whose port is free."""
    while True:
        job = random.randrange(10_000)
        if socket.socket().connect_ex(("127.0.0.1", 20_000 + job)):
            return str(job)


@pytest.fixture
def batch(tmp_path):
    """Start the script of a run, as sbatch would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "text.txt").write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))
    raygpt = f'#!/bin/bash\nexec "{sys.executable}" -m raygpt "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("raygpt", raygpt)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    rest = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RAY_ADDRESS")}
    started = []

    def start(name, **changes):
        changes |= {"run.name": name, "run.storage": f"{tmp_path}/runs", "data.source": f"{tmp_path}/text.txt"}
        deployment = plan_deployment(load_recipe("tiny", {**RECIPE, **changes}), Options("slurm", cpus=3))
        script = tmp_path / "train.sbatch"
        script.write_text(slurm.script(deployment))
        of_slurm = {"SLURM_JOB_ID": free_job(), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        files = {"LOGS": f"{tmp_path}/ray.log", "REQUEUED": f"{tmp_path}/requeued"}
        environment = {**rest, **of_slurm, **files, "PYTHONPATH": CODE, "PATH": path, "RAY_worker_niceness": "0"}
        with (tmp_path / "job.log").open("a") as log:
            process = subprocess.Popen(
                ["bash", str(script)], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        return process, of_slurm["SLURM_JOB_ID"]

    def finish(process):
        """Wait for a job, and end what it leaves on its nodes, as slurm does."""
        nodes, deadline = [], time.monotonic() + 900
        while process.poll() is None and time.monotonic() < deadline:
            nodes = descendants(process.pid)
            time.sleep(0.2)
        end(nodes)
        return process.wait(timeout=60)

    yield start, finish
    for process in started:
        if process.poll() is None:
            end(descendants(process.pid))


@pytest.mark.slow
def test_a_job_whose_time_is_over_saves_and_requeues_itself_and_goes_on(batch, tmp_path):
    start, finish = batch
    folder, log = f"{tmp_path}/runs/requeued", tmp_path / "job.log"

    def step():
        logged = losses(folder) if Path(folder, "metrics.jsonl").exists() else []
        return logged[-1][0] if logged else 0

    process, job = start("requeued")
    wait_for(lambda: step() >= 50)
    os.kill(process.pid, signal.SIGUSR1)
    assert finish(process) == 130, log.read_text()
    assert (tmp_path / "requeued").read_text() == f"{job}\n"
    done = step()
    process, _ = start("requeued")
    wait_for(lambda: step() >= done + 50)
    ask_to_stop(folder)
    assert finish(process) == 0, log.read_text()
    assert f"continuing after step {done}" in log.read_text()
    assert (tmp_path / "requeued").read_text() == f"{job}\n"  # stopped, so not again
    straight, _ = start("straight", **{"training.steps": step()})
    assert finish(straight) == 0, log.read_text()
    assert losses(folder) == losses(f"{tmp_path}/runs/straight")


@pytest.mark.parametrize(("status", "requeued"), [(130, "7\n"), (1, "7\n"), (78, ""), (0, "")])
def test_a_job_that_is_signalled_is_requeued_unless_it_is_done_or_no_retry_helps(status, requeued, tmp_path):
    driver = f"trap 'exit {status}' TERM; kill -USR1 $PPID; while true; do sleep 0.1; done"
    (tmp_path / "requeued").touch()
    done = run_with_stand_ins(tmp_path, Options("slurm"), raygpt=driver)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "requeued").read_text() == requeued
    assert ("not requeued: the error above would come again" in done.stdout) == (status == 78)


@pytest.mark.parametrize(("of_slurm", "cpus"), [({}, 6), ({"SLURM_CPUS_PER_TASK": "24"}, 24)])
def test_each_step_has_all_cpus_of_the_job_on_its_node(of_slurm, cpus, tmp_path):
    steps = tmp_path / "steps"
    record = f"""printf '%s\\n' "$*" >>{steps}"""
    wait = f"for _ in $(seq 300); do [ $(wc -l <{steps}) = 2 ] && break; sleep 0.1; done"
    done = run_with_stand_ins(
        tmp_path, Options("slurm", cpus=6), srun=record, raygpt=wait, SLURM_JOB_NUM_NODES="3", **of_slurm
    )
    assert done.returncode == 0, done.stderr
    head, others = sorted(steps.read_text().splitlines(), key=lambda line: "--exclude" in line)
    assert head.startswith(f"--nodes=1 --ntasks=1 --cpus-per-task={cpus} --nodelist=127.0.0.1 ray start --head ")
    assert others.startswith(f"--nodes=2 --ntasks=2 --cpus-per-task={cpus} --exclude=127.0.0.1 bash -c ")
    assert f"--num-cpus={cpus} " in head
    assert f"--num-cpus={cpus} " in others


def run_with_stand_ins(tmp_path, options, raygpt, srun="", **of_slurm):
    """Run the batch script with these programs in place of slurm's, Ray's and ours."""
    deployment = plan_deployment(load_recipe("tiny", {"run.storage": str(tmp_path)}), options)
    (tmp_path / "train.sbatch").write_text(slurm.script(deployment))
    programs = {"srun": srun, "ray": "", "scontrol": SCONTROL, "getent": "echo 127.0.0.1", "raygpt": raygpt}
    for name, text in programs.items():
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        **of_slurm,
        "REQUEUED": f"{tmp_path}/requeued",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    return subprocess.run(["bash", str(tmp_path / "train.sbatch")], env=environment, capture_output=True, text=True)
