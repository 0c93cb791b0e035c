"""What is known of the Ray cluster."""

import ray

from raygpt import cluster


def test_a_cluster_that_this_process_started_is_our_own_and_no_other(ray_cluster, monkeypatch):
    assert cluster.is_our_own()
    node = ray._private.worker._global_node
    monkeypatch.setattr(ray, "nodes", lambda: ["ours", "one that joined"])
    assert not cluster.is_our_own()
    monkeypatch.undo()
    monkeypatch.setattr(node, "head", False)  # as where one was found at an address
    assert not cluster.is_our_own()
