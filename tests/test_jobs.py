"""Runs on a cluster's job server: what is refused before anything is sent, and a run that outlives its laptop."""

import contextlib
import http.server
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
import yaml
from ray.job_submission import JobStatus

import raygpt
from raygpt.errors import RaygptError
from raygpt.jobs import Job, JobServer
from raygpt.recipes import load_recipe
from raygpt.runs import find_folder
from raygpt.testing.chaos import losses

sys.path.append(str(Path(__file__).with_name("deploy")))
from pods import RAY, TOKEN, descendants, end, free_port, wait_for

CODE = str(Path(raygpt.__file__).parents[1])
PYTHON = platform.python_version()
NODES = [{"CPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}]
# What Ray 2.60 answers to /api/cluster_status?format=1: with an autoscaler, and without one (`ray start --no-monitor`).
AUTOSCALER_REPORT = (
    "======== Autoscaler status: 2026-11-19 04:15:26.441632 ========\nNode status\n-----------\nActive:\n"
)
NO_REPORT = "No cluster status. It may take a few seconds for the Ray internal services to start up."


class Client:
    """A job server that answers as one would."""

    def __init__(self, nodes=NODES, ray_version=ray.__version__, python=PYTHON, jobs=()):
        summary = [{"raylet": {"state": "ALIVE", "resourcesTotal": resources}} for resources in nodes]
        self.answers = {
            "/api/v0/cluster_metadata": {"rayVersion": ray_version, "pythonVersion": python},
            "/nodes?view=summary": {"summary": [*summary, {"raylet": {"state": "DEAD"}}]},
            "/api/cluster_status": {"clusterStatus": {"autoscalerReport": {"nodeTypeMapping": {"a": "node_a"}}}},
            "/api/cluster_status?format=1": {"clusterStatus": AUTOSCALER_REPORT},
        }
        self.jobs, self.sent = list(jobs), []

    def _do_request(self, method, path):
        return SimpleNamespace(status_code=200, json=lambda: {"data": self.answers[path]})

    def list_jobs(self):
        return self.jobs

    def submit_job(self, **job):
        shipped = Path(job["runtime_env"]["working_dir"])
        code = Path(*job["runtime_env"]["py_modules"])
        self.sent.append({**job, "recipe": (shipped / "recipe.yaml").read_text(), "code": code.name})
        assert (code / "cli" / "app.py").exists()
        self.jobs.append(details(job["submission_id"], JobStatus.PENDING, job["metadata"]))


def details(name, status, metadata):
    facts = {"metadata": metadata, "start_time": 1_700_000_000_000, "driver_exit_code": None}
    return SimpleNamespace(submission_id=name, status=status, **facts)


@pytest.fixture
def server():
    """A JobServer whose client is ours."""

    def make(**facts):
        made = object.__new__(JobServer)
        made.address, made._client = "http://head:8265", Client(**facts)
        return made

    return make


HERE = {"run.storage": "/mnt/runs", "run.name": "one"}


def test_a_recipe_is_sent_whole_with_this_raygpt_and_found_by_name(server):
    made = server()
    workers = {"cluster.workers": 2, "cluster.runtime_env": {"env_vars": {"A": "b"}}}
    job = made.submit(load_recipe("tiny", {**HERE, **workers}))
    (sent,) = made._client.sent
    assert sent["entrypoint"] == "python -m raygpt train recipe.yaml --unattended"
    assert sent["code"] == "raygpt"
    assert "env_vars:\n      A: b" in sent["recipe"]
    assert (job.name, job.folder, job.status) == ("one", "/mnt/runs/one", "PENDING")
    assert made.find("one") == made.find("/mnt/runs/one") == made.find(job.id) == job
    with pytest.raises(RaygptError, match=r"has no run called 'other'; it has one$"):
        made.find("other")
    with pytest.raises(
        RaygptError, match=r"/mnt/runs/one is not there yet, or this machine does not see it; `raygpt logs"
    ):
        made.readable_folder("one")


@pytest.mark.parametrize(
    ("facts", "changes", "line"),
    [
        ({"ray_version": "2.53.0"}, {}, "has Ray 2.53.0, and this raygpt runs on"),
        ({"python": "3.9.1"}, {}, "has Python 3.9.1, and this raygpt runs on"),
        (
            {},
            {"cluster.workers": 3},
            "cluster.workers: 3 × 1 CPU, 1 GPU do not fit: http://head:8265 has room for 2 (2 nodes, 6 CPU, 2 GPU)",
        ),
        (
            {"nodes": [{"CPU": 8.0, "TPU": 4.0}]},
            {"cluster.workers": 2},
            "2 × 1 CPU, 4 TPU do not fit: http://head:8265 has room for 1 (1 node, 8 CPU, 4 TPU)",
        ),
        ({"nodes": []}, {}, "has room for 0 (0 nodes, no CPU); add nodes"),
        ({}, {"run.storage": "runs"}, "run.storage: runs would be a folder of the job, and deleted with it"),
        ({}, {"data.source": "text.txt"}, "data.source: text.txt is a file of this machine"),
        ({}, {"data.tokenizer": "./mine"}, "data.tokenizer: ./mine is a file of this machine"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(server, facts, changes, line):
    made = server(**facts)
    with pytest.raises(RaygptError) as refused:
        made.submit(load_recipe("tiny", {**HERE, **changes}))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert made._client.sent == []


def test_a_run_that_is_being_trained_is_not_submitted_twice(server):
    metadata = {"raygpt_run": "/mnt/runs/one", "raygpt_name": "one"}
    made = server(jobs=[details("job", JobStatus.RUNNING, metadata), details("other", JobStatus.RUNNING, {})])
    with pytest.raises(RaygptError, match="one is being trained as job job; follow it with `raygpt logs one"):
        made.submit(load_recipe("tiny", HERE))
    made = server(jobs=[details("job", JobStatus.FAILED, metadata)])
    assert made.submit(load_recipe("tiny", HERE)).id != "job"  # it resumes
    with pytest.raises(RaygptError, match="one is not being trained: job job is FAILED"):
        server(jobs=[details("job", JobStatus.FAILED, metadata)]).stop(made.find("job"))


def test_a_run_of_another_recipe_is_not_sent_unless_forced(server, tmp_path):
    here, folder = {**HERE, "run.storage": str(tmp_path)}, tmp_path / "one"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(load_recipe("tiny", here).to_yaml())
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    made, changed = server(), load_recipe("tiny", {**here, "model.context": 64})
    with pytest.raises(RaygptError, match=r"is a run of another recipe \(model.context: 128 → 64\).+or add --force"):
        made.submit(changed)
    assert made._client.sent == []
    made.submit(changed, force=True)
    assert made._client.sent[0]["entrypoint"].endswith("--unattended --force")
    assert server().submit(load_recipe("tiny", here)).folder == str(folder)


def test_a_run_that_is_not_followed_is_submitted_with_how_to_come_back(raygpt, server, monkeypatch):
    monkeypatch.setattr("raygpt.jobs.JobServer", lambda address: server())
    done, out, _ = raygpt("submit", "tiny", "run.storage=/mnt/runs", "--cluster", "head:8265", "--detach")
    assert (done, out.splitlines()[1]) == (0, "run directory   /mnt/runs/tiny")
    assert out.endswith(
        "\n  raygpt logs tiny --cluster http://head:8265\n  raygpt stop tiny --cluster http://head:8265\n"
    )


@pytest.mark.parametrize(
    ("status", "exit_code", "shell", "line"),
    [
        ("SUCCEEDED", 0, 0, ""),
        ("STOPPED", 130, 130, "note: job a was stopped; submitted again, the run resumes"),
        ("FAILED", 78, 1, "error: job a failed; correct the error above, then submit it again"),
        ("FAILED", -9, 1, "error: job a failed; submitted again, the run resumes"),
    ],
)
def test_a_followed_run_ends_as_its_job(raygpt, monkeypatch, status, exit_code, shell, line):
    job = Job("a", "one", "/mnt/runs/one", status, None, exit_code)
    follow = SimpleNamespace(address="http://head:8265", find=lambda name: job, follow=lambda job, say: job)
    monkeypatch.setattr("raygpt.jobs.JobServer", lambda address: follow)
    done, _, err = raygpt("logs", "one", "--cluster", "head:8265")
    assert (done, err.strip()) == (shell, line)


def test_a_head_that_is_lost_while_a_run_is_submitted_or_followed_is_said_in_one_line(server):
    made = server()
    job = made.submit(load_recipe("tiny", HERE))
    said = []

    async def tail(job_id):
        yield "step 1/2  loss 5.5\n"
        raise RuntimeError("WebSocket connection closed unexpectedly\nwith close code 1006")

    made._client.tail_job_logs = tail
    with pytest.raises(RaygptError, match=r"^http://head:8265 no longer answers \(WebSocket [a-z ]+\); if its head is"):
        made.follow(job, said.append)
    assert said == ["step 1/2  loss 5.5\n"]
    made._client.jobs, made._client.submit_job = [], Mock(side_effect=RuntimeError("status code 500: no\nTraceback"))
    with pytest.raises(
        RaygptError, match=r"^http://head:8265 did not accept the run \(status code 500: no\); try again"
    ):
        made.submit(load_recipe("tiny", HERE))


def test_nodes_that_an_autoscaler_may_bring_are_not_missed(server):
    made = server(nodes=[{"CPU": 1.0}])
    made._client.answers["/api/cluster_status"]["clusterStatus"]["autoscalerReport"]["nodeTypeMapping"] = {"a": "gpu"}
    assert made.submit(load_recipe("tiny", {**HERE, "cluster.workers": 8})).name == "one"


def test_nodes_that_autoscaler_v2_may_bring_are_not_missed_and_without_an_autoscaler_they_are(server):
    made, large = server(nodes=[{"CPU": 1.0, "memory": 4e9}]), load_recipe("tiny", {**HERE, "cluster.workers": 8})
    made._client.answers["/api/cluster_status"] = {"clusterStatus": None}  # v1 alone writes it
    made._client.answers["/api/cluster_status?format=1"] = {"clusterStatus": NO_REPORT}
    with pytest.raises(RaygptError, match=r"8 × .+ do not fit: http://head:8265 has room for 1 .+ or add nodes"):
        made.submit(large)
    made._client.answers["/api/cluster_status?format=1"] = {"clusterStatus": AUTOSCALER_REPORT}
    assert made.submit(large).name == "one"


def test_what_ray_adds_to_a_jobs_log_is_not_shown(server):
    made = server()
    job = made.submit(load_recipe("tiny", HERE))
    lines = ["2026-11-16 19:18:36,000\tINFO job_manager.py:581 -- Runtime env is setting up.\n", "step 1/2  loss 5.5\n"]
    made._client.get_job_logs = lambda job_id: "".join([*lines, "Running entrypoint for job one: python\n"])
    assert made.logs(job) == "step 1/2  loss 5.5\n"


@pytest.mark.parametrize(
    ("storage", "source", "val"),
    [("/mnt/runs", "/mnt/texts", "hf:a/b"), ("s3://bucket/runs", "s3://bucket/texts", "/mnt/val.txt")],
)
def test_paths_that_every_node_sees_are_sent_as_they_are(server, monkeypatch, storage, source, val):
    monkeypatch.setattr("raygpt.jobs._check_run", lambda *facts: None)  # no S3 here
    made = server()
    changes = {"run.storage": storage, "data.source": source, "data.val": val, "data.tokenizer": "/mnt/mine"}
    job = made.submit(load_recipe("tiny", {**HERE, **changes}))
    (sent,) = made._client.sent
    recipe = yaml.safe_load(sent["recipe"])
    assert (recipe["run"]["storage"], job.folder) == (storage, f"{storage}/one")
    assert (recipe["data"]["source"], recipe["data"]["val"], recipe["data"]["tokenizer"]) == (source, val, "/mnt/mine")


def test_a_wrong_address_says_what_to_name():
    with pytest.raises(RaygptError, match=r"no Ray job server answers at http://127.0.0.1:9 .+e\.g\. http://head:8265"):
        JobServer("127.0.0.1:9")


@pytest.mark.parametrize("verb", [("runs",), ("stop", "one"), ("logs", "one"), ("submit", "tiny", "run.storage=/mnt")])
@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("", "error: --cluster: the address is empty; write that of the dashboard, e.g. http://head:8265"),
        ("ray://127.0.0.1:10001", "error: --cluster: ray://127.0.0.1:10001 is no http:// address of a dashboard"),
        ("ftp://head", "error: --cluster: ftp://head is no http:// address of a dashboard"),
        ("http://", "error: --cluster: http:// is no http:// address of a dashboard"),
        ("head:port", "error: --cluster: head:port is no http:// address of a dashboard"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(raygpt, verb, address, line):
    status, out, err = raygpt(*verb, "--cluster", address)
    assert (status, out) == (1, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


RUN = {
    "type": "SUBMISSION",
    "entrypoint": "raygpt",
    "submission_id": "a",
    "status": "RUNNING",
    "metadata": {"raygpt_run": "/mnt/one"},
}
BAD_ANSWERS = {
    "500": (500, "it broke\nTraceback", r"did not answer \(.*status code 500"),
    "a page": (200, "<html>hello</html>", r"does not answer as a Ray job server does \(Expecting value"),
    "other JSON": (200, '{"detail": "x"}', r"does not answer as a Ray job server does \("),
    "a list": (200, "[1]", r"does not answer as a Ray job server does \("),
    "unauthorized": (401, "no", "wants its token; copy ~/.ray/auth_token"),
    "nothing": (None, "", r"did not answer \(\('Connection aborted"),
}


@pytest.fixture
def bad_server():
    """Start an HTTP server that answers well on some paths, and as told on all others; returns its address."""
    started = []

    def start(good, status, text):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = (200, good[self.path]) if self.path in good else (status, text)
                if answer[0] is None:
                    self.close_connection = True
                    return
                body = answer[1].encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                self.do_GET()

            def do_PUT(self):
                self.do_GET()

            def log_message(self, *words):
                pass

        started.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


VERSION = {"/api/version": json.dumps({"ray_version": ray.__version__, "version": "4", "ray_commit": "x"})}
FOUND = {**VERSION, "/api/jobs/": json.dumps([RUN])}
METADATA = {"/api/v0/cluster_metadata": {"rayVersion": ray.__version__, "pythonVersion": PYTHON}}
NODES_THERE = {
    "/nodes?view=summary": {"summary": [{"raylet": {"state": "ALIVE", "resourcesTotal": {"CPU": 4.0, "memory": 4e9}}}]},
    "/api/cluster_status": {"clusterStatus": {}},
    "/api/cluster_status?format=1": {"clusterStatus": NO_REPORT},
}
READY = {path: json.dumps({"data": answer}) for path, answer in {**METADATA, **NODES_THERE}.items()}
SUBMIT = ("submit", "tiny", "run.storage=/mnt/runs", "cluster.accelerator=cpu")


@pytest.mark.parametrize("answer", BAD_ANSWERS)
@pytest.mark.parametrize(
    ("good", "words"),
    [
        (VERSION, ("runs",)),
        (VERSION, ("show", "a")),
        (VERSION, SUBMIT),
        (FOUND, ("stop", "a")),
        (FOUND, ("logs", "a", "--no-follow")),
    ],
)
def test_a_job_server_that_answers_badly_is_said_in_one_line(raygpt, bad_server, good, words, answer):
    status, text, line = BAD_ANSWERS[answer]
    done, out, err = raygpt(*words, "--cluster", bad_server(good, status, text))
    assert (done, out) == (1, "")
    assert err.count("\n") == 1
    assert re.search(line, err)


@pytest.mark.parametrize(("answer", "line"), [("500", "did not accept the run (Req"), ("a page", "does not answer as")])
def test_a_run_that_is_not_accepted_is_said_in_one_line(raygpt, bad_server, answer, line):
    good = {**VERSION, **READY, "/api/jobs/": "[]"}
    done, out, err = raygpt(*SUBMIT, "--cluster", bad_server(good, *BAD_ANSWERS[answer][:2]))
    assert (done, out, err.count("\n")) == (1, "", 1)
    assert line in err


def test_the_named_server_is_asked_whatever_rays_variables_say(bad_server, monkeypatch):
    named = bad_server({**VERSION, "/api/jobs/": json.dumps([RUN])}, 500, "")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    assert [job.name for job in JobServer(named).jobs()] == ["a"]
    assert os.environ["RAY_ADDRESS"] == "http://127.0.0.1:9"


@pytest.mark.parametrize("answer", BAD_ANSWERS)
def test_a_server_that_is_no_job_server_is_said_in_one_line(bad_server, answer):
    with pytest.raises(RaygptError, match=r"^(no Ray job server answers at|the Ray cluster at) http://127"):
        JobServer(bad_server({}, *BAD_ANSWERS[answer][:2]))


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "recipe.yaml").touch()
    assert find_folder("one") == f"{tmp_path}/runs/one"
    assert find_folder("./one") == f"{tmp_path}/one"
    assert find_folder("s3://bucket/one/") == "s3://bucket/one"
    assert find_folder("two") == f"{tmp_path}/two"


# A real job server


DRIVER, WORKER = "python -m raygpt train", "ray::RayTrainWorker"


class Machines:
    """A head with a job server, and three workers, as processes."""

    def __init__(self, folder):
        self.folder, self.port, self.jobs, self.nodes = folder, free_port(), free_port(), {}
        self.disks = []
        rest = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RAY_ADDRESS")}
        ours = {"PYTHONPATH": "", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_worker_niceness": "0"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` there is the one that runs Ray
        self.environment = {**rest, **ours, "PATH": path}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.jobs}"

    def start(self):
        head = ["--head", f"--port={self.port}", f"--dashboard-port={self.jobs}", "--dashboard-host=127.0.0.1"]
        self._node(0, *head, "--num-cpus=0")
        wait_for(lambda: self.raygpt("runs", "--cluster", self.address).returncode == 0)
        wait_for(lambda: self.replace_lost() or len(self._alive()) == 4)

    def replace_lost(self):
        """Start workers that are missing: killed, or not up in time, as happens where cores are busy."""
        for number in (1, 2, 3):
            if number not in self.nodes or self.nodes[number].poll() is not None:
                address = f"--node-ip-address=127.0.0.{number + 1}"
                self._node(number, f"--address=127.0.0.1:{self.port}", address, "--num-cpus=2")

    def _alive(self):
        """Ids of nodes by their addresses."""
        request = urllib.request.Request(
            f"{self.address}/nodes?view=summary", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            nodes = json.load(answer)["data"]["summary"]
        # A node that has just joined has no address yet.
        alive = [node for node in nodes if node["raylet"].get("state") == "ALIVE" and "ip" in node]
        return {node["ip"]: node["raylet"]["nodeId"] for node in alive}

    def _node(self, number, *words):
        # Each has a disk of its own: where nodes share one, the first to be done with a job's code deletes it for all.
        # Not below tmp_path: a socket's path has 107 characters at most.
        disk = tempfile.mkdtemp(prefix="node-")
        command = [
            RAY,
            "start",
            "--block",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--temp-dir={disk}",
            *words,
        ]
        self.disks.append(disk)
        log = (self.folder / "nodes.log").open("a")
        self.nodes[number] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    def kill(self, *numbers):
        for number in numbers:
            node = self.nodes.pop(number)
            end(descendants(node.pid))
            node.wait(timeout=60)

    def drain(self, number):
        """As a cloud's notice does."""
        command = [RAY, "drain-node", f"--address=127.0.0.1:{self.port}"]
        command += [f"--node-id={self._alive()[f'127.0.0.{number + 1}']}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message=spot", "--deadline-remaining-seconds=300"]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def number_of(self, name):
        """The node on which a process runs, by how its command begins."""
        return next(number for number, node in self.nodes.items() if _processes(node.pid, name))

    def kill_process(self, name):
        end(_processes(self.nodes[self.number_of(name)].pid, name)[:1])

    def raygpt(self, *words, **options):
        command = [sys.executable, "-m", "raygpt", *map(str, words)]
        environment = {**self.environment, "PYTHONPATH": CODE}
        start = subprocess.Popen if options.pop("wait", True) is False else subprocess.run
        if start is subprocess.run:
            options["timeout"] = 600
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return start(command, env=environment, cwd=self.folder, **pipes, **options)


def _processes(node, name):
    """The processes of a node whose command begins so."""
    found = []
    for process in descendants(node):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
            found += [process] if command.startswith(name) else []
    return found


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.kill(*list(made.nodes))
        for disk in made.disks:
            shutil.rmtree(disk, ignore_errors=True)


@pytest.mark.slow
def test_a_run_is_left_stopped_resumed_and_loses_one_of_everything_and_ends_as_if_not(machines, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))
    words = [
        *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "model.dropout=0.1"),
        *(f"data.source={text}", "data.tokenizer=bytes", "data.val=0.1", f"run.storage={tmp_path}/runs"),
        *("schedule.kind=constant", "schedule.warmup_steps=0", "training.batch_tokens=80", "training.log_every=1"),
        *("training.eval_every=1000000", "training.checkpoint_every=20"),
        *("cluster.workers=2", "cluster.resources_per_worker={CPU: 2}"),
    ]
    folder, on = tmp_path / "runs" / "job", ("--cluster", machines.address)
    # Without end, so that it never matters how fast it trains beside what is done to it.
    submit = ("submit", "tiny", *words, "training.steps=1000000", "run.name=job", *on)

    def step():
        return losses(str(folder))[-1][0] if (folder / "metrics.jsonl").exists() and losses(str(folder)) else 0

    def wait_for_steps():
        """Until it has gone on for a while."""
        since = step()
        wait_for(lambda: machines.replace_lost() or step() >= since + 40)

    def logs():
        return machines.raygpt("logs", "job", *on, "--no-follow").stdout

    def state():
        (newest, *_) = json.loads(machines.raygpt("runs", *on, "--json").stdout)
        assert (newest["name"], newest["folder"]) == ("job", str(folder))
        return newest["status"]

    def stop():
        stopped = machines.raygpt("stop", "job", *on)
        assert stopped.returncode == 0, stopped.stdout
        wait_for(lambda: state() == "STOPPED")
        assert f"stopped after step {step()}, which is saved" in " ".join(logs().split())
        return step()

    def submit_again():
        again = machines.raygpt(*submit, "--detach")
        assert again.returncode == 0, again.stdout
        wait_for_steps()
        assert "continuing after step" in logs()

    # The laptop goes, politely
    laptop = machines.raygpt(*submit, wait=False)
    wait_for_steps()
    laptop.send_signal(signal.SIGINT)
    said = laptop.communicate(timeout=600)[0]
    assert laptop.returncode == 0, said
    assert f"raygpt logs job --cluster {machines.address}" in " ".join(said.split())
    wait_for_steps()
    assert "is being trained as job" in machines.raygpt(*submit).stdout
    assert state() == "RUNNING"
    assert json.loads(machines.raygpt("show", "job", *on, "--json").stdout)["state"] == "running"
    # It comes back, and is gone without a word
    laptop = machines.raygpt("logs", "job", *on, wait=False)
    assert any(line.startswith("step ") for line in laptop.stdout)
    laptop.kill()
    laptop.communicate(timeout=600)
    wait_for_steps()
    # A worker's process, a machine, a machine with notice
    machines.kill_process(WORKER)
    wait_for_steps()
    machines.kill(machines.number_of(WORKER))
    wait_for_steps()
    drained = machines.number_of(WORKER)
    machines.drain(drained)
    wait_for(lambda: "a node is about to be lost: saving before it goes" in logs())
    machines.kill(drained)
    wait_for_steps()
    # Stopped and resumed
    stop()
    submit_again()
    # The driver, then the head, and the workers with it; whoever restarts jobs submits again
    machines.kill_process(DRIVER)
    wait_for(lambda: state() == "FAILED")
    submit_again()
    machines.kill(*list(machines.nodes))
    machines.start()
    submit_again()
    done = stop()
    straight = machines.raygpt("submit", "tiny", *words, f"training.steps={done}", "run.name=straight", *on)
    assert straight.returncode == 0, straight.stdout
    assert f"step {done}/{done}" in straight.stdout.replace(",", "")
    assert "Running entrypoint" not in straight.stdout  # the run's progress, not Ray's
    assert losses(str(folder)) == losses(str(tmp_path / "runs" / "straight"))
