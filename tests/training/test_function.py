"""A function of one's own on the workers that recipes run on."""

import contextlib
import logging
import re

import pytest
from ray._private.state import actors

import raygpt
from raygpt.errors import RaygptError
from raygpt.training.ray import function


@pytest.fixture(scope="module")
def look():
    """A function inside another: Ray sends it by value, for its workers cannot import this file."""

    def look(config):
        import os

        import jax
        import ray.train

        ray.train.report({"loss": 1.0, "from": config["word"]})
        ray.train.report({"loss": 0.5, "processes": jax.process_count(), "threads": int(os.environ["NPROC"])})

    return look


@pytest.fixture(scope="module")
def looked(ray_cluster, look, tmp_path_factory):
    """What came back of two workers that looked, what was seen meanwhile, and the actors that were started."""
    seen, before, home = [], set(actors()), str(tmp_path_factory.mktemp("runs"))
    cluster = {"workers": 2, "accelerator": "cpu"}
    result = raygpt.run(look, {"word": "hello"}, cluster=cluster, storage_path=home, name="looked", watch=seen.append)
    assert result.error is None
    assert result.path == f"{home}/looked"
    return result, seen, [actor["ActorClassName"] for id, actor in actors().items() if id not in before]


def test_the_last_of_each_metric_comes_back_and_every_report_is_seen(looked):
    result, seen, _ = looked
    assert result.metrics.pop("threads") >= 16  # with one for each core, two all-reduces at once block each other
    assert result.metrics == {"loss": 0.5, "from": "hello", "processes": 2}
    assert [report["loss"] for report in seen] == [1.0, 0.5]


def test_on_a_cluster_of_our_own_no_process_is_started_that_a_run_does_not_need(looked):
    *_, started = looked
    assert sorted(started) == ["Controller", "Mailbox", "RayTrainWorker", "RayTrainWorker", "SynchronizationActor"]


def test_what_cannot_be_is_said_before_anything_starts(look):
    with pytest.raises(RaygptError, match=r"unknown key 'cluster\.wrokers'; did you mean 'cluster\.workers'"):
        raygpt.run(look, cluster={"wrokers": 2})
    with pytest.raises(RaygptError, match=r"run\.name: '\.\./x' is not 1 to 128 of"):
        raygpt.run(look, name="../x")
    with pytest.raises(RaygptError, match=r"run\.name: 'stores' is where prepared tokens lie"):
        raygpt.run(look, name="stores")
    with pytest.raises(
        RaygptError, match=r"cluster\.mesh: is a recipe's; leave it out, and call jax\.make_mesh in the"
    ):
        raygpt.run(look, cluster={"workers": 2, "mesh": {"data": 2}})


@pytest.fixture
def stumble():
    """Raises in its first lives, so many as the config says, after a report in each."""

    def stumble(config):
        import pathlib

        import ray.train

        lives = pathlib.Path(config["lives"])
        with lives.open("a") as file:
            file.write(".")
        life = len(lives.read_text())
        ray.train.report({"life": life})
        if life <= config["faults"]:
            raise ValueError(f"life {life} ends")

    return stumble


def test_workers_of_a_function_start_again_as_often_as_max_faults_says(ray_cluster, stumble, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("raygpt"), "warning", said.append)
    config, cluster = {"lives": str(tmp_path / "lives"), "faults": 3}, {"accelerator": "cpu", "max_faults": 3}
    result = raygpt.run(stumble, config, cluster=cluster, storage_path=str(tmp_path), name="run")
    assert result.error is None
    assert result.metrics["life"] == 4
    assert [re.search(r"life . ends.*fault \d of at most 3", text) is not None for text in said] == [True] * 3


@pytest.mark.parametrize(("cluster", "faults"), [({}, 0), ({"workers": 1}, 0), ({"max_faults": 5}, 5)])
def test_a_function_that_fails_is_not_repeated_unless_that_is_asked_for(monkeypatch, look, cluster, faults):
    asked = []
    monkeypatch.setattr(function, "connected", lambda cpus: contextlib.nullcontext())
    monkeypatch.setattr(function, "open_mailbox", lambda: None)
    monkeypatch.setattr(function, "fit", lambda trainer, watch: asked.append(trainer.run_config.failure_config))
    raygpt.run(look, cluster={"accelerator": "cpu", **cluster})
    assert [config.max_failures for config in asked] == [faults]
