"""Whether the cluster has room for all replicas: Ray Serve waits silently, even for resources that never come."""

from collections.abc import Callable

from raygpt.errors import RaygptError, TransientError
from raygpt.resources import Nodes, Resources, describe_nodes, describe_resources, room_on

SMALLEST = 0.0001  # the smallest part of a GPU that Ray counts


def ensure_room(
    models: int,
    replicas: int,
    each: Resources,
    nodes: Nodes,
    has_autoscaler: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Refuse replicas, so many of each model, that can never fit; where nodes can be added, note what is awaited."""
    gpus = each["GPU"]
    if not (float(gpus).is_integer() or SMALLEST <= gpus < 1):
        raise RaygptError(f"--gpus {gpus:g}: Ray gives a replica a fraction of one GPU or whole ones; write 0.5 or 1")
    wanted = {name: amount for name, amount in each.items() if amount}
    count, room = models * replicas, room_on(nodes, wanted, None)
    if room >= count:
        return
    what = f"{count} × {describe_resources(wanted)}"
    if has_autoscaler():
        note(f"waiting for replicas, {what}: the cluster has room for {room}, and its autoscaler is asked for the rest")
        return
    remedy = _remedy(models, count, wanted, nodes, room)
    raise TransientError(
        f"replicas: {what} do not fit: the cluster has room for {room} ({describe_nodes(nodes)}); {remedy}"
    )


def _remedy(models: int, count: int, each: Resources, nodes: Nodes, room: int) -> str:
    """What to write: the largest share of a GPU with which all fit, else fewer replicas, else fewer models."""
    shares = [100 // per_gpu / 100 for per_gpu in range(1, 101)]  # with two digits
    for gpus in (*shares, 0) if "GPU" in each else ():
        if gpus < each["GPU"] and room_on(nodes, {**each, "GPU": gpus}, None) >= count:
            return f"write --gpus {gpus:g}" + (", or add nodes" if gpus else " to use CPUs, or add nodes with GPUs")
    if room >= models:
        return f"write --replicas {room // models}, or add nodes"
    return "serve fewer models, or add nodes" if room else "add nodes"
