"""Replicas that the cluster has no room for: refused with what to write, or awaited where the cluster can grow."""

import pytest

from raygpt.errors import RaygptError
from raygpt.serving.room import ensure_room

CPUS = {"CPU": 4.0}
ONE, FOUR = {"CPU": 8.0, "GPU": 1.0}, {"CPU": 64.0, "GPU": 4.0}


def check(nodes, models=1, replicas=1, gpus=1.0, has_autoscaler=False):
    """What is noted."""
    notes = []
    ensure_room(models, replicas, {"CPU": 1, "GPU": gpus}, nodes, lambda: has_autoscaler, notes.append)
    return notes


@pytest.mark.parametrize(
    ("nodes", "asked"),
    [
        ([ONE], {}),
        ([ONE], {"models": 2, "gpus": 0.5}),
        ([ONE], {"models": 3, "gpus": 0.33}),
        ([ONE], {"models": 2, "replicas": 4, "gpus": 0}),
        # Ray 2.60 on a node with two GPUs placed 4 actors of 0.4, and 6 of 0.3.
        ([{"CPU": 8.0, "GPU": 2.0}], {"replicas": 4, "gpus": 0.4}),
        ([{"CPU": 8.0, "GPU": 2.0}], {"replicas": 6, "gpus": 0.3}),
        ([ONE, FOUR], {"replicas": 5}),
        ([FOUR], {"replicas": 2, "gpus": 2.0}),
        ([CPUS], {"replicas": 4, "gpus": 0.0}),
    ],
)
def test_replicas_that_fit_are_not_spoken_of(nodes, asked):
    assert check(nodes, **asked) == []


@pytest.mark.parametrize(
    ("nodes", "asked", "message"),
    [
        (
            [ONE],
            {"models": 2},
            "replicas: 2 × 1 CPU, 1 GPU do not fit: the cluster has room for 1 (1 node, 8 CPU, 1 GPU); write "
            "--gpus 0.5, or add nodes",
        ),
        ([ONE], {"replicas": 3}, "room for 1 (1 node, 8 CPU, 1 GPU); write --gpus 0.33, or add nodes"),
        ([{"CPU": 8.0, "GPU": 2.0}], {"replicas": 5, "gpus": 0.4}, "room for 4 .* write --gpus 0.33, or add nodes"),
        ([ONE, ONE], {"models": 2, "gpus": 2.0}, "room for 0 .* write --gpus 1, or add nodes"),
        ([ONE], {"replicas": 9}, "room for 1 .* write --replicas 1, or add nodes"),  # 9 CPUs are not there
        ([FOUR, FOUR], {"models": 3, "replicas": 50}, "room for 8 .* write --replicas 2, or add nodes"),
        ([CPUS], {}, "room for 0 (1 node, 4 CPU); write --gpus 0 to use CPUs, or add nodes with GPUs"),
        ([CPUS], {"models": 5, "gpus": 0}, "5 × 1 CPU do not fit: .* for 4 .* serve fewer models, or add nodes"),
        ([ONE], {"gpus": 1.5}, "--gpus 1.5: Ray gives a replica a fraction of one GPU or whole ones; write 0.5 or 1"),
        ([ONE], {"gpus": float("nan")}, "--gpus nan"),
        ([ONE], {"gpus": 1e-9}, "--gpus 1e-09"),
    ],
)
def test_replicas_that_never_fit_are_refused_in_one_line_with_what_to_write(nodes, asked, message):
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(RaygptError, match=pattern):
        check(nodes, **asked)


def test_replicas_for_which_nodes_are_added_are_awaited_with_a_note():
    expected = (
        "waiting for replicas, 2 × 1 CPU, 1 GPU: the cluster has room for 1, and its autoscaler is asked for the rest"
    )
    assert check([ONE], replicas=2, has_autoscaler=True) == [expected]
