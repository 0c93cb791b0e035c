"""Runs as jobs of a Ray cluster's job server: submitted, found by name, followed, stopped.

What cannot work is refused before anything is sent. The job is `raygpt train --unattended` with this raygpt, so a job
that is submitted again resumes its run.
"""

import asyncio
import contextlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raygpt import storage
from raygpt.config import Recipe
from raygpt.deploy.local_files import local_files
from raygpt.errors import RaygptError, first_line
from raygpt.ray_private import RAY_JOB_CONFIG_JSON_ENV_VAR
from raygpt.resources import can_grow, choose_accelerator, describe_workers, no_room, resources_of_worker, room_on
from raygpt.runs import RECIPE
from raygpt.training import resume

RUN_KEY, NAME_KEY = "raygpt_run", "raygpt_name"  # of a job's metadata
STOP_WAIT_S = 300  # how long a job that is stopped may take to save; Ray's own 3 s are too few for most models
RUNNING = (JobStatus.PENDING, JobStatus.RUNNING)
POLL_S = 1.0
END_S = 60.0  # within which a job server ends the job that asked for it
EXAMPLE = "http://head:8265"
NO_ANSWER = (OSError, RuntimeError)  # refused or closed connections, and statuses other than 200
NOT_AN_ANSWER = (ValueError, LookupError, TypeError, AttributeError)  # an HTML page, or JSON of another server
TRY_AGAIN = "try again, or read the dashboard's log on its head"
LOST = ("no longer answers", "if its head is lost, submit the run again, and it resumes")
AUTOSCALER_REPORT = "Autoscaler status:"  # in the first line of an autoscaler's report
OF_RAY = re.compile(r"[\d-]+ [\d:,]+\t|Running entrypoint for job ")  # lines that Ray adds to a job's log
for noisy in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
    logging.getLogger(f"ray.{noisy}").setLevel(logging.WARNING)  # uploads and closed sockets are not the run's progress


@dataclass(frozen=True)
class Job:
    """A run on a job server."""

    id: str
    name: str
    folder: str
    status: str
    started: float | None
    exit_code: int | None  # of its driver; None while it runs, and if nobody saw it end

    @property
    def is_running(self) -> bool:
        return self.status in [str(status.value) for status in RUNNING]


@contextlib.contextmanager
def _without_rays_addresses() -> Iterator[None]:
    """Ray prefers the address in one of these variables to the one that it is given."""
    kept = {name: os.environ.pop(name) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


class JobServer:
    """A cluster's job server, by the address of its dashboard."""

    def __init__(self, address: str):
        self.address = _checked(address)
        try:
            with _without_rays_addresses():
                self._client = JobSubmissionClient(self.address)
        except AuthenticationError:
            raise self._wants_token() from None
        except (*NO_ANSWER, *NOT_AN_ANSWER) as error:
            raise RaygptError(
                f"no Ray job server answers at {self.address} ({first_line(error)[:200]}); name the dashboard's "
                f"address, e.g. {EXAMPLE}"
            ) from None

    def jobs(self) -> list[Job]:
        """The runs that were submitted here, the newest first."""
        with self._explained():
            found = [_job(details) for details in self._client.list_jobs() if RUN_KEY in (details.metadata or {})]
        return sorted(found, key=lambda job: job.started or 0, reverse=True)

    def find(self, name: str) -> Job:
        """The newest job of a run, by the run's name, its folder or the job's id."""
        found = self.jobs()
        for job in found:
            if name in (job.name, job.folder, job.id):
                return job
        known = ", ".join(sorted({job.name for job in found}))
        others = f"it has {known}" if known else "none was submitted there"
        raise RaygptError(f"{self.address} has no run called {name!r}; {others}")

    def readable_folder(self, name: str) -> str:
        """The directory of a run by name; refuses one that this machine cannot read."""
        job = self.find(name)
        if not storage.exists(storage.join(job.folder, RECIPE)):
            raise RaygptError(
                f"{job.folder} is not there yet, or this machine does not see it; `raygpt logs {job.name} --cluster "
                f"{self.address}` shows how job {job.id} ({job.status.lower()}) is doing"
            )
        return job.folder

    def submit(self, recipe: Recipe, force: bool = False) -> Job:
        """Check a recipe, send it with this raygpt, and start it; refuses in one line."""
        folder = storage.join(recipe.run.storage.rstrip("/"), str(recipe.run.name))
        check_files(recipe)
        _check_run(folder, recipe, force)
        self._check_versions()
        self._check_room(recipe)
        for job in self.jobs():
            if job.folder == folder and job.is_running:
                raise RaygptError(
                    f"{recipe.run.name} is being trained as job {job.id}; follow it with "
                    f"`raygpt logs {job.name} --cluster {self.address}`, or set run.name to begin another run"
                )
        name = f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        with tempfile.TemporaryDirectory() as shipped:
            _write_recipe(recipe, Path(shipped, RECIPE))
            code = Path(shipped, "code", "raygpt")  # without what a checkout leaves behind
            shutil.copytree(Path(__file__).parent, code, ignore=shutil.ignore_patterns("__pycache__"))
            environment = {
                "working_dir": shipped,
                "py_modules": [str(code)],
                "excludes": ["/code"],
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
            }
            with self._explained("did not accept the run"):
                self._client.submit_job(
                    entrypoint=f"python -m raygpt train {RECIPE} --unattended{' --force' * force}",
                    submission_id=name,
                    runtime_env=environment,
                    metadata={RUN_KEY: folder, NAME_KEY: str(recipe.run.name)},
                )
        return self.find(name)

    def follow(self, job: Job, say: Callable[[str], None]) -> Job:
        """Pass on what the run prints, from its beginning, until the job has ended; returns the job as it ended."""
        asyncio.run(self._tail(job.id, say))
        while True:
            with self._explained(*LOST):
                job = _job(self._client.get_job_info(job.id))
            if not job.is_running:
                return job
            time.sleep(POLL_S)

    async def _tail(self, job_id: str, say: Callable[[str], None]) -> None:
        texts = self._client.tail_job_logs(job_id)
        while True:
            with self._explained(*LOST):
                text = await anext(texts, None)
            if text is None:
                return
            say(_of_the_run(text))

    @contextlib.contextmanager
    def _explained(self, what: str = "did not answer", remedy: str = TRY_AGAIN) -> Iterator[None]:
        """Convert exceptions of Ray's client, which are of three libraries, into one line."""
        from aiohttp import ClientError

        try:
            yield
        except AuthenticationError:
            raise self._wants_token() from None
        except NOT_AN_ANSWER as error:
            raise RaygptError(
                f"{self.address} does not answer as a Ray job server does ({first_line(error)[:200]}); name the "
                f"dashboard's address, e.g. {EXAMPLE}"
            ) from None
        except (*NO_ANSWER, ClientError) as error:
            raise RaygptError(f"{self.address} {what} ({first_line(error)[:300]}); {remedy}") from None

    def _wants_token(self) -> RaygptError:
        return RaygptError(
            f"the Ray cluster at {self.address} wants its token; copy ~/.ray/auth_token from its head node to the "
            "same place here, and export RAY_AUTH_MODE=token"
        )

    def logs(self, job: Job) -> str:
        """What the run has printed so far."""
        with self._explained():
            return _of_the_run(str(self._client.get_job_logs(job.id)))

    def stop(self, job: Job) -> None:
        """Ask a job to save and end."""
        if not job.is_running:
            raise RaygptError(f"{job.name} is not being trained: job {job.id} is {job.status}")
        with self._explained():
            self._client.stop_job(job.id)

    # What the cluster has

    def _get(self, path: str) -> dict[str, Any]:
        """The dashboard's answer. Its client has no public method for these."""
        with self._explained():
            response = self._client._do_request("GET", path)
            if response.status_code != 200:
                raise RuntimeError(f"status code {response.status_code} for {path}")
            return dict(response.json()["data"])

    def _check_versions(self) -> None:
        there = self._get("/api/v0/cluster_metadata")
        for what, ours, theirs in (
            ("Ray", ray.__version__, str(there.get("rayVersion"))),
            ("Python", platform.python_version(), str(there.get("pythonVersion"))),
        ):
            if ours.split(".")[:2] != theirs.split(".")[:2]:
                raise RaygptError(
                    f"{self.address} has {what} {theirs}, and this raygpt runs on {ours}; use the same minor version"
                )

    def _check_room(self, recipe: Recipe) -> None:
        cluster = recipe.cluster
        if cluster.topology or self._has_autoscaler():
            return  # slices and nodes to come: Ray Train counts them when the run starts
        with self._explained():
            found = self._get("/nodes?view=summary")["summary"]
            alive = [node["raylet"] for node in found if node["raylet"].get("state") == "ALIVE"]
            nodes = [node.get("resourcesTotal") or {} for node in alive]
        accelerator = choose_accelerator(cluster, recipe.engine, nodes)
        wanted = resources_of_worker(cluster, accelerator, nodes)
        room = room_on(nodes, wanted, cluster.accelerator_type)
        if room < recipe.worker_counts(accelerator)[0]:
            raise RaygptError(no_room(describe_workers(cluster, wanted), room, nodes, wanted, self.address))

    def _has_autoscaler(self) -> bool:
        """Whether the cluster can grow by itself: as `cluster.has_autoscaler`, over HTTP."""
        with self._explained():
            status = self._get("/api/cluster_status").get("clusterStatus")
            if status:  # of autoscaler v1, which reports on every cluster
                return can_grow((status.get("autoscalerReport") or {}).get("nodeTypeMapping") or {})
            # v2 writes no such status: the dashboard asks it for its report, as text. Without any autoscaler, as on
            # Kubernetes with a fixed number of pods, the text is "No cluster status. …".
            text = self._get("/api/cluster_status?format=1").get("clusterStatus")
            return AUTOSCALER_REPORT in str(text)


def _checked(address: str) -> str:
    """The address of a job server, with its scheme; Ray's client would take others for modules to import."""
    whole = address if "://" in address else f"http://{address}"
    if not address.strip():
        raise RaygptError(f"--cluster: the address is empty; write that of the dashboard, e.g. {EXAMPLE}")
    try:
        parts = urlsplit(whole)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_valid = False
    if not is_valid:
        raise RaygptError(f"--cluster: {address} is no http:// address of a dashboard; write e.g. {EXAMPLE}")
    return whole


def stop_this_job() -> None:
    """Have the job server end the job that this process is the driver of, as STOPPED. Returns only if it does not."""
    config = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    job = config.get("metadata", {}).get("job_submission_id")
    with contextlib.suppress(AuthenticationError, *NO_ANSWER, *NOT_AN_ANSWER):
        if job:
            JobSubmissionClient().stop_job(job)
            time.sleep(END_S)


def check_files(recipe: Recipe) -> None:
    """Refuse paths that mean something else on another machine."""
    home = recipe.run.storage
    if not storage.is_remote(home) and not home.startswith("/"):
        raise RaygptError(
            f"run.storage: {home} would be a folder of the job, and deleted with it; write s3://bucket/path, or the "
            "absolute path of a folder that all nodes share"
        )
    for key, path in local_files(recipe):
        if not path.startswith("/"):
            raise RaygptError(
                f"{key}: {path} is a file of this machine; put it where all nodes see it and write its absolute path, "
                "or s3://…"
            )


def _check_run(folder: str, recipe: Recipe, force: bool) -> None:
    """Refuse to resume a run of another recipe. Where its directory cannot be read from here, the job refuses it."""
    try:
        storage.exists(folder)
    except RaygptError:
        return
    resume.check(folder, recipe, force)


def _of_the_run(log: str) -> str:
    """A job's log without Ray's lines."""
    return "".join(line for line in log.splitlines(keepends=True) if not OF_RAY.match(line))


def _write_recipe(recipe: Recipe, path: Path) -> None:
    """The whole recipe, with the workers' runtime environment, which a run directory does not keep."""
    values = recipe.to_dict()
    values["cluster"]["runtime_env"] = recipe.cluster.runtime_env
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def _job(details: JobDetails) -> Job:
    metadata = details.metadata or {}
    started = details.start_time / 1000 if details.start_time else None
    job_id = str(details.submission_id)
    status, exit_code = str(details.status.value), details.driver_exit_code
    return Job(job_id, metadata.get(NAME_KEY, job_id), metadata[RUN_KEY], status, started, exit_code)
