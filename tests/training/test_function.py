"""A user function on the workers that recipes run on."""

import contextlib
import logging
import re

import pytest
from ray._private.state import actors

import raygpt
from raygpt.corpus.feed import Feed
from raygpt.corpus.prepare import prepare
from raygpt.errors import RaygptError
from raygpt.resources import PROCESS_BYTES
from raygpt.training.ray import function
from raygpt.training.ray.datasets import BatchRows


@pytest.fixture(scope="module")
def look():
    """A function inside another: Ray sends it by value, for its workers cannot import this file."""

    def look(config):
        import os

        import jax
        import ray.train

        ray.train.report({"loss": 1.0, "from": config["word"]})
        has = ray.get_runtime_context().get_assigned_resources()
        about = {"processes": jax.process_count(), "threads": int(os.environ["NPROC"]), "memory": has["memory"]}
        ray.train.report({"loss": 0.5, **about})

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
    assert result.metrics == {"loss": 0.5, "from": "hello", "processes": 2, "memory": PROCESS_BYTES}
    assert [report["loss"] for report in seen] == [1.0, 0.5]


def test_on_a_cluster_of_our_own_no_process_is_started_that_a_run_does_not_need(looked):
    *_, started = looked
    assert sorted(started) == ["Controller", "Mailbox", "RayTrainWorker", "RayTrainWorker", "SynchronizationActor"]


def test_what_cannot_be_is_said_before_anything_starts(look):
    with pytest.raises(RaygptError, match=r"unknown key 'cluster\.wrokers'; did you mean 'cluster\.workers'"):
        raygpt.run(look, cluster={"wrokers": 2})
    with pytest.raises(RaygptError, match=r"run\.name: '\.\./x' is not 1 to 128 of"):
        raygpt.run(look, name="../x")
    with pytest.raises(RaygptError, match="engine: 'keras' is not known; write jax or torch"):
        raygpt.run(look, engine="keras")
    with pytest.raises(RaygptError, match=r"run\.name: 'stores' is the folder of prepared tokens"):
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


@pytest.mark.extended
def test_workers_of_a_function_start_again_as_often_as_max_faults_says(ray_cluster, stumble, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("raygpt"), "warning", said.append)
    config, cluster = {"lives": str(tmp_path / "lives"), "faults": 2}, {"accelerator": "cpu", "max_faults": 2}
    result = raygpt.run(stumble, config, cluster=cluster, storage_path=str(tmp_path), name="run")
    assert result.error is None
    assert result.metrics["life"] == 3
    assert [re.search(r"life . ends.*fault \d of at most 2", text) is not None for text in said] == [True] * 2


@pytest.mark.parametrize(("cluster", "faults"), [({}, 0), ({"workers": 1}, 0), ({"max_faults": 5}, 5)])
def test_a_function_that_fails_is_not_repeated_unless_that_is_asked_for(monkeypatch, look, cluster, faults):
    asked = []
    monkeypatch.setattr(function, "connected", lambda cpus: contextlib.nullcontext())
    monkeypatch.setattr(function, "open_mailbox", lambda: None)
    monkeypatch.setattr(function, "fit", lambda trainer, watch: asked.append(trainer.run_config.failure_config))
    raygpt.run(look, cluster={"accelerator": "cpu", **cluster})
    assert [config.max_failures for config in asked] == [faults]


# With PyTorch, and with datasets


def test_a_pytorch_function_is_one_of_a_process_group_also_alone(ray_cluster, tmp_path):
    pytest.importorskip("torch", reason="needs the extra torch")

    def look(config):
        import os

        import ray.train
        import ray.train.torch
        import torch

        model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
        model(torch.ones(3, 2, device=ray.train.torch.get_device())).sum().backward()
        group = torch.distributed.get_rank(), torch.distributed.get_world_size(), os.environ["LOCAL_WORLD_SIZE"]
        ray.train.report({"group": group, "grad": next(model.parameters()).grad.tolist()})

    cluster = {"workers": 1, "accelerator": "cpu"}
    result = raygpt.run(look, engine="torch", cluster=cluster, storage_path=str(tmp_path), name="run")
    assert result.error is None
    assert result.metrics == {"group": (0, 1, "1"), "grad": [[3.0, 3.0]]}


def test_ray_splits_a_dataset_and_each_worker_gets_its_rows_of_ours(ray_cluster, tmp_path):
    import numpy as np
    import ray.data

    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text that is not long\n" for n in range(200)))
    store = prepare(str(tmp_path / "text.txt"), str(tmp_path / "store"), "bytes", val=0.1)
    feed = Feed([store.train], context=16, batch_rows=5, order="shuffled", seed=5)

    def look(config):
        import numpy as np
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        numbers = [int(row["id"]) for row in ray.train.get_dataset_shard("numbers").iter_rows()]
        rows = [batch["x"] for batch in ray.train.get_dataset_shard("rows").iter_batches(batch_size=2 + rank)]
        np.savez(f"{config['folder']}/{rank}.npz", numbers=numbers, rows=rows)

    result = raygpt.run(
        look,
        {"folder": str(tmp_path)},
        datasets={"numbers": lambda: ray.data.range(40), "rows": BatchRows(feed, range(3, 6))},
        cluster={"workers": 2, "accelerator": "cpu"},
        storage_path=str(tmp_path),
        name="run",
    )
    assert result.error is None
    seen = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    assert [len(one["numbers"]) for one in seen] == [20, 20]
    assert sorted(np.concatenate([one["numbers"] for one in seen])) == list(range(40))
    for rank, one in enumerate(seen):
        expected = [feed.rows(batch, [[0, 1], [2, 3, 4]][rank])[:, :-1] for batch in range(3, 6)]
        np.testing.assert_array_equal(one["rows"], expected)


def test_datasets_that_no_cpu_is_left_for_are_refused(ray_cluster, look, tmp_path):
    import ray

    cpus = int(ray.cluster_resources()["CPU"])
    workers = rf"{cpus} × 1 CPU, 768\.0 MiB memory"
    refusal = rf"datasets: {workers} leave Ray Data no CPU \(1 node, {cpus} CPU\); write fewer cluster\.workers"
    with pytest.raises(RaygptError, match=refusal):
        raygpt.run(
            look,
            datasets={"numbers": lambda: ray.data.range(4)},
            cluster={"workers": cpus, "accelerator": "cpu"},
            storage_path=str(tmp_path),
        )
