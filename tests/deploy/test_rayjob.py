"""The RayJob's entrypoint for real, on node processes: lost pods, lost heads, retries, and the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pods import CODE, Operator, has_programs, wait_for

from raygpt.deploy.options import Options
from raygpt.runs import metrics
from raygpt.testing.chaos import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_programs(), reason="needs bash, pkill and pgrep, which the image has"),
]
RECIPE = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "data": {"source": "/storage/text.txt", "tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    # Without end, so that it never matters how fast it trains beside what is done to it
    "training": {"batch_tokens": 80, "steps": 10**6, "log_every": 1, "eval_every": 10**6, "checkpoint_every": 20},
    # With two of a pod's three CPUs each worker has a pod of its own
    "cluster": {"accelerator": "cpu", "workers": 2, "resources_per_worker": {"CPU": 2}},
}
# At tiny's rates with Muon a last bit's difference grows tenfold in some 25 steps on this text; at this one not at all
ELASTIC = {
    "model.precision": "fp64",
    "cluster.workers": "1..2",
    "optimizer.kind": "adamw",
    "optimizer.learning_rate": 1e-4,
}
RAYGPT = (sys.executable, "-m", "raygpt")
OPTIONS = Options("kubernetes", volume="shared", cpus=3)


def operator(folder, **more):
    folder.mkdir(exist_ok=True)
    (folder / "storage").mkdir(exist_ok=True)
    text = "".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400))
    (folder / "storage" / "text.txt").write_text(text)
    return Operator(folder, {**RECIPE, **more}, OPTIONS)


def undisturbed(job, folder, **more):
    """The losses of the same job with nothing done to it, to as many steps as it took."""
    steps = job.step()
    lengths = {f"training.{key}": steps for key in ("steps", "eval_every", "checkpoint_every")}
    with operator(folder, **{**more, **lengths}) as other:
        status, log = other.watch()
        assert (status, other.failures) == ("SUCCEEDED", 0), log
        return losses(other.run_folder)


def stop(job):
    subprocess.run([*RAYGPT, "stop", job.run_folder], check=True, env={"PYTHONPATH": CODE})


def test_pods_and_heads_are_lost_and_the_losses_are_those_of_an_undisturbed_run(tmp_path):
    with operator(tmp_path / "job") as job:
        wait_for(lambda: job.reconcile() or all(map(job.is_healthy, job.groups)))

        def drain():
            hook = job.before_end("worker-1", f" --node-id {job.node_id('worker-1')}")
            wait_for(lambda: "a node is about to be lost: saving before it goes" in job.log("job-1"))
            assert hook.wait(300) == 0
            job.kill("worker-1")

        def save_and_end_head():
            hook = job.before_end("head")
            assert hook.wait(300) == 0

        status, log = job.watch(
            lambda: job.kill("worker-0"), drain, lambda: job.kill("head"), save_and_end_head, lambda: stop(job)
        )
        assert status == "SUCCEEDED", log
        assert (job.failures, job.clusters) == (1, 2)  # the head that saved and ended was retried, in a new cluster
        ours = losses(job.run_folder)
    assert ours == undisturbed(job, tmp_path / "undisturbed")


def test_an_elastic_job_goes_on_with_one_worker_and_grows_back_with_the_same_losses(tmp_path):
    with operator(tmp_path / "job", **ELASTIC) as job:
        wait_for(lambda: job.reconcile() or job.nodes() == 3)  # otherwise it begins with one worker

        def when(workers, act):
            """A disturbance that comes when so many workers have taken steps."""

            def disturb():
                wait_for(lambda: job.reconcile() or workers_of(job.log("job-1"))[-1] == workers)
                since = job.step()
                wait_for(lambda: job.step() >= since + 40)
                act()

            return disturb

        def lose_a_machine():
            job.withheld.add("worker-1")
            job.kill("worker-1")

        status, log = job.watch(when(2, lose_a_machine), when(1, job.withheld.clear), when(2, lambda: stop(job)))
        assert (status, job.failures, workers_of(log)) == ("SUCCEEDED", 0, [2, 1, 2]), log
        ours, restarts = losses(job.run_folder), metrics.restarts(metrics.read(job.run_folder))
    theirs = undisturbed(job, tmp_path / "undisturbed", **{**ELASTIC, "cluster.workers": 2})
    alike = restarts[0]["step"]  # until then both have two workers
    assert ours[:alike] == theirs[:alike]
    assert [step for step, _ in ours] == [step for step, _ in theirs] == list(range(1, ours[-1][0] + 1))
    np.testing.assert_allclose([loss for _, loss in ours], [loss for _, loss in theirs], rtol=1e-6)


def workers_of(log):
    """How many workers each start of a run had, as its log says."""
    return [int(found) for found in re.findall(r"workers (\d+);", " ".join(log.split()))]


def test_a_run_that_raygpt_stop_ended_is_not_retried(tmp_path):
    with operator(tmp_path / "job") as job:
        status, log = job.watch(lambda: stop(job))
        assert (status, job.failures) == ("SUCCEEDED", 0), log
        assert "stopped by raygpt stop" in log
        assert list(Path(job.run_folder, "checkpoints").glob("step-*/checkpoint.json"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data.source": "/storage/missing.txt"}, "no text at"),
        (
            {"model.preset": None, "optimizer.kind": "adamw", "optimizer.learning_rate": 1e30},
            "the loss is not a number",
        ),
    ],
)
def test_an_error_that_no_retry_helps_stops_the_job_at_once(tmp_path, changes, error):
    with operator(tmp_path / "job", **changes) as job:
        status, log = job.watch()
        assert (status, job.failures, job.clusters) == ("STOPPED", 0, 1), log
        assert error in log
        assert "a retry would end the same way, so there is none" in " ".join(log.split())


def test_workers_that_die_at_the_same_step_again_and_again_stop_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYGPT_FAULTS", "kill@30:0:always")  # as one that needs more memory than there is
    with operator(tmp_path / "job") as job:
        status, log = job.watch()
        assert (status, job.failures) == ("STOPPED", 0), log
        assert "so a restart does not help" in " ".join(log.split())


def test_a_job_whose_workers_fail_at_ever_other_steps_is_retried_so_often_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYGPT_FAULTS", "kill@30 kill@60 kill@90")
    with operator(tmp_path / "job", **{"cluster.max_faults": 0}) as job:
        job.job["spec"]["backoffLimit"] = 1
        status, log = job.watch()
        assert (status, job.failures, job.clusters) == ("FAILED", 2, 2), log
