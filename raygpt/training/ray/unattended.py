"""What a run waits for that a scheduler has started again: on a new head the worker nodes join one by one."""

import time
from collections.abc import Callable

from raygpt.cluster import has_autoscaler
from raygpt.training.ray.scaling import Workers

JOIN_S = 1800.0  # a machine starts and pulls an image of several GB in less; then the job fails, and may be retried
POLL_S = 1.0


def wait_for_nodes(workers: Workers, say: Callable[[str], None]) -> None:
    """Return when the cluster has room for the workers, or after half an hour without: `ensure_room` decides then.

    On a cluster that grows by itself at once: it adds nodes only when Ray Train asks for them.
    """
    if has_autoscaler():
        return
    deadline = time.monotonic() + JOIN_S
    said = -1
    while (room := workers.room()) < workers.cluster.min_workers and time.monotonic() < deadline:
        if room != said:
            say(f"waiting for nodes: the cluster has room for {room} of {workers}")
            said = room
        time.sleep(POLL_S)
