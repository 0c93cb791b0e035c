"""What is known of the machine."""

import os

import ray

from raygpt import cluster


def test_memory_is_the_machines_or_what_a_container_may_take(tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cluster, "MEMORY_LIMITS", (str(tmp_path / "no such file"), str(limit)))
    for text, memory in (("max\n", machine), (f"{2**30}\n", 2**30), (f"{2**63}\n", machine)):
        limit.write_text(text)
        assert cluster.host_memory() == memory


def test_a_cluster_that_this_process_started_is_our_own_and_no_other(ray_cluster, monkeypatch):
    assert cluster.is_our_own()
    node = ray._private.worker._global_node
    monkeypatch.setattr(ray, "nodes", lambda: ["ours", "one that joined"])
    assert not cluster.is_our_own()
    monkeypatch.undo()
    monkeypatch.setattr(node, "head", False)  # as where one was found at an address
    assert not cluster.is_our_own()
