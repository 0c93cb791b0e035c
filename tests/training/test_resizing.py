"""How many workers an elastic run starts with what the cluster has left: by the policy alone, without a cluster."""

import pytest
import ray

from raygpt.recipes import load_recipe
from raygpt.training.ray.private import NoopDecision, ResizeDecision
from raygpt.training.ray.resizing import CheckpointBeforeResize
from raygpt.training.ray.scaling import Workers, for_mesh


@pytest.fixture
def decide(monkeypatch):
    """The decision of a run's policy where so many GPUs, each of a node of its own, are left to it."""

    def decide(gpus, **changes):
        monkeypatch.setattr(ray, "nodes", list)
        recipe = load_recipe("tiny", {"engine": "torch", **changes})
        workers = for_mesh(Workers(recipe.cluster, "gpu"), recipe)
        policy = CheckpointBeforeResize(workers.scaling(), None, workers.counts)
        left = {f"node {number}": {"CPU": 4.0, "GPU": 1.0} for number in range(gpus)}
        monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
        monkeypatch.setattr(policy, "_get_reserved_resources", lambda: left)
        return policy.make_decision_for_non_running_worker_group()

    return decide


@pytest.mark.parametrize(("gpus", "count"), [(2, 2), (3, 2), (4, 4), (5, 4), (9, 6)])
def test_with_the_workers_that_are_left_it_starts_as_many_as_fill_the_mesh(decide, gpus, count):
    decision = decide(gpus, **{"cluster.workers": "2..7", "cluster.mesh.fsdp": 2})
    assert isinstance(decision, ResizeDecision)
    assert decision.num_workers == count


def test_with_fewer_than_fill_the_mesh_it_waits_for_others(decide):
    changes = {"cluster.workers": "1..8", "cluster.mesh": {"fsdp": 2, "tensor": 2}}
    assert decide(3, **changes) == NoopDecision()
    assert decide(7, **changes).num_workers == 4


def test_with_copies_of_the_model_it_starts_all(decide):
    assert decide(3, **{"cluster.workers": "1..4"}).num_workers == 3
