"""A RayJob's pods as node processes of this machine, and an operator that does with them what KubeRay's does.

Each pod is a `ray start --block` with the environment of its container; the entrypoint goes through Ray's job server.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml
from ray._private import ray_constants

import raygpt
from raygpt.deploy import rayjob
from raygpt.deploy.deployment import plan_deployment
from raygpt.deploy.options import Options
from raygpt.recipes import load_recipe

RAY = str(Path(sys.executable).with_name("ray"))
CODE = str(Path(raygpt.__file__).parents[1])
TOKEN = "0123456789abcdef" * 4


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(condition, seconds=900):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.2)


class Operator:
    """Runs one RayJob. `pods` are processes; a pod that is killed is made again by `reconcile`, as KubeRay would."""

    def __init__(self, folder, recipe, options=None):
        """`recipe` is made into a manifest; the paths that its pods mount are folders in `folder` here."""
        deployment = plan_deployment(load_recipe("tiny", recipe), options or Options("kubernetes", volume="shared"))
        config, *_, job = yaml.safe_load_all(rayjob.text(deployment))
        self.folder, self.job = Path(folder), job
        storage, self.config = f"{folder}/storage", f"{folder}/config"
        for path in (storage, self.config):
            Path(path).mkdir(exist_ok=True)
        content = config["data"][rayjob.RECIPE_FILE].replace("/storage/", f"{storage}/")
        Path(self.config, rayjob.RECIPE_FILE).write_text(content)
        self.entrypoint = self.mounted(job["spec"]["entrypoint"])
        self.run_folder = f"{storage}/runs/{deployment.recipe.run.name}"
        self.pods, self.health, self.clusters, self.failures = {}, {}, 0, 0
        (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        self.groups = {"head": job["spec"]["rayClusterSpec"]["headGroupSpec"]}
        self.groups |= {f"worker-{number}": group for number in range(group["maxReplicas"])}  # as an autoscaler would
        self.withheld = set()  # pods for which there is no machine at the moment

    def __enter__(self):
        self.make_cluster()
        return self

    def __exit__(self, *error):
        self.delete_cluster()

    def mounted(self, command):
        """A command of the manifest with the recipe's folder here: of this job alone, whatever else runs."""
        assert rayjob.RECIPE_FOLDER in command
        return command.replace(rayjob.RECIPE_FOLDER, self.config)

    # Pods

    def make_cluster(self):
        self.clusters += 1
        self.port, self.jobs = free_port(), free_port()
        self.reconcile()

    def delete_cluster(self):
        for name in list(self.pods):
            self.kill(name)

    def reconcile(self):
        """Make every pod that is missing or has ended, the head first."""
        self.pods = {name: pod for name, pod in self.pods.items() if pod.poll() is None}
        for number, (name, group) in enumerate(self.groups.items()):
            if name not in self.pods and name not in self.withheld:
                self.pods[name] = self._start(name, group, number)
                if name == "head":
                    wait_for(lambda: self._head_answers() or self.pods["head"].poll() is not None)

    def _start(self, name, group, number):
        container = group["template"]["spec"]["containers"][0]
        cpus = group["rayStartParams"].get("num-cpus", container["resources"]["limits"]["cpu"])
        self.health[name] = free_port()  # in a pod of its own each has the port that the manifest's probes name
        command = [RAY, "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"]
        command.append(f"--dashboard-agent-listen-port={self.health[name]}")
        if name == "head":
            command += ["--head", f"--port={self.port}", f"--dashboard-port={self.jobs}", "--dashboard-host=127.0.0.1"]
        else:  # an address for each, so that a node can be told from another
            command += [f"--address=127.0.0.1:{self.port}", f"--node-ip-address=127.0.0.{number + 1}"]
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen(
            command, env=self.environment(container), stdout=log, stderr=log, start_new_session=True
        )

    def environment(self, container):
        """The container's variables, and those that KubeRay adds."""
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        ours = {"PYTHONPATH": CODE, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # A worker whose head is gone ends soon, and is started again; Ray's minute is long for a test.
        soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_worker_niceness": "0"}
        rest = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RAY_ADDRESS")}
        return {**rest, **ours, **soon, **given, "PATH": path}

    def kill(self, name):
        """As if its machine were gone."""
        pod = self.pods.pop(name)
        end(descendants(pod.pid))
        pod.wait(timeout=60)

    def before_end(self, name, more=""):
        """Run the pod's preStop hook; `more` goes before its &&. No cloud is waited for, and busy cores may need a
        longer notice than a cloud's."""
        container = self.groups[name]["template"]["spec"]["containers"][0]
        *shell, command = container["lifecycle"]["preStop"]["exec"]["command"]
        command = self.mounted(command) if name == "head" else command.replace("sleep 20", "sleep 1")
        command = command.replace("-seconds 25 &&", f"-seconds 300{more} &&")
        address = {"RAY_ADDRESS": f"127.0.0.1:{self.port}"}
        return subprocess.Popen([*shell, command], env=self.environment(container) | address)

    def is_healthy(self, name):
        """Whether a pod answers its liveness probe, which brings no token."""
        probe = self.groups[name]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]
        assert probe["port"] == ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health[name]}{probe['path']}", timeout=30) as answer:
                return answer.status == 200
        except OSError:
            return False

    def node_id(self, name):
        (number,) = (number for number, pod in enumerate(self.groups) if pod == name)
        (node,) = (node for node in self._alive() if node["ip"] == f"127.0.0.{number + 1}")
        return node["raylet"]["nodeId"]

    def nodes(self):
        """How many have joined."""
        return len(self._alive())

    def _alive(self):
        nodes = self._get("/nodes?view=summary")["data"]["summary"]
        return [node for node in nodes if node["raylet"].get("state") == "ALIVE"]

    # The job

    def submit(self, submission):
        """As the submitter's pod does: not twice under one name."""
        if self.status(submission) is None:
            command = [RAY, "job", "submit", "--address", f"http://127.0.0.1:{self.jobs}", "--no-wait"]
            command += ["--submission-id", submission, "--", *self.entrypoint.split()]
            environment = self.environment(self.groups["head"]["template"]["spec"]["containers"][0])
            wait_for(lambda: not subprocess.run(command, env=environment, capture_output=True).returncode)

    def status(self, submission):
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; None if the head knows no such job."""
        try:
            return self._get(f"/api/jobs/{submission}")["status"]
        except urllib.error.HTTPError:
            return None

    def watch(self, *disturbances):
        """Run the job to its end: (status, log). Each disturbance comes 40 steps after the last."""
        left, submission, since = list(disturbances), None, 0
        while True:
            if submission is None:
                submission = f"job-{self.clusters}"
                self.submit(submission)
            try:
                status = self.status(submission)
            except (
                OSError
            ):  # the head is gone, workers end with it; all are made again, and the submitter submits again
                self.delete_cluster()
                self.reconcile()
                submission = None
                continue
            if status == "FAILED":
                self.failures += 1
                (self.folder / "failed.log").open("a").write(self.log(submission))
                if self.failures > self.job["spec"]["backoffLimit"]:
                    return status, self.log(submission)
                self.delete_cluster()
                self.make_cluster()
                submission = None
            elif status in ("SUCCEEDED", "STOPPED"):
                return status, self.log(submission)
            elif status is None:  # a new head
                submission = None
            if left and self.step() >= since + 40:
                left.pop(0)()
                since = self.step()
            self.reconcile()
            time.sleep(0.2)

    def step(self):
        """The last step that was logged."""
        metrics = Path(self.run_folder, "metrics.jsonl")
        steps = metrics.read_text().rpartition('"step": ')[2] if metrics.exists() else ""
        digits = "".join(character for character in steps[:8] if character.isdigit())
        return int(digits or 0)

    def log(self, submission):
        return self._get(f"/api/jobs/{submission}/logs")["logs"]

    def _head_answers(self):
        try:
            return bool(self._get("/api/version"))
        except (OSError, ValueError):
            return False

    def _get(self, path):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.jobs}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def descendants(process):
    """A process and all below it, by /proc; of Ray's, those of one node."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


def end(processes):
    """Kill processes, and wait until they are gone, with their ports."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_for(lambda: not any(_is_running(process) for process in processes), 60)


def _is_running(process):
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def has_programs():
    """Whether the programs of the image's hooks are here."""
    return all(shutil.which(program) for program in ("bash", "pkill", "pgrep"))
