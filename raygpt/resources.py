"""What a run's workers need of a Ray cluster's nodes, and how many of them fit; imports no Ray.

For the cluster that this process is connected to (`training/ray/scaling.py`), and for one that is only known by its job
server (`jobs.py`). A node is its resources as Ray counts them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from raygpt.config import Cluster
from raygpt.errors import RaygptError
from raygpt.formatting import size

Accelerator = Literal["cpu", "gpu", "tpu"]
Resources = dict[str, float]
Nodes = Sequence[Mapping[str, float]]
PROCESS_BYTES = 3 * 2**28  # of a worker beside its model: libraries, compiled programs; measured 0.45 to 0.75 GiB


def choose_accelerator(cluster: Cluster, engine: str | None, nodes: Nodes) -> Accelerator:
    """`auto` takes a TPU or a GPU if the cluster has one; PyTorch takes GPUs only."""
    if cluster.accelerator != "auto":
        return cluster.accelerator
    has = {name for node in nodes for name, amount in node.items() if amount}
    is_tpu = engine != "torch" and (cluster.topology or "TPU" in has)
    return "tpu" if is_tpu else "gpu" if "GPU" in has else "cpu"


def resources_of_worker(
    cluster: Cluster, accelerator: Accelerator, nodes: Nodes, memory: int = PROCESS_BYTES
) -> Resources:
    """The resources of one worker: a CPU with `memory`, a GPU, or all chips of a TPU's host."""
    defaults: Resources = {"CPU": 1.0}
    if accelerator == "gpu":
        defaults["GPU"] = 1
    elif accelerator == "tpu":
        defaults["TPU"] = _chips_of_host(cluster, nodes)
    else:
        defaults["memory"] = memory
    wanted = defaults | cluster.resources_per_worker
    if not any(wanted.values()):
        raise RaygptError("cluster.resources_per_worker: with nothing a worker has no place; write e.g. {CPU: 1}")
    return wanted


def _chips_of_host(cluster: Cluster, nodes: Nodes) -> float:
    chips = max((node.get("TPU", 0) for node in nodes), default=0)
    if not chips and "TPU" not in cluster.resources_per_worker:
        raise RaygptError(
            f"cluster.accelerator: tpu is not there, the cluster has {describe_nodes(nodes)}; write "
            "cluster.accelerator: auto, or cluster.topology and cluster.accelerator_type of a slice that is to come"
        )
    return chips


def room_on(nodes: Nodes, wanted: Mapping[str, float], accelerator_type: str | None) -> int:
    """How many workers with these resources would fit if nothing else were running."""
    if accelerator_type:
        wanted = {**wanted, f"accelerator_type:{accelerator_type}": 0.001}  # as Ray marks such a node
    counted = {name: each for name, each in wanted.items() if each}
    return sum(min(_room(name, node.get(name, 0), each) for name, each in counted.items()) for node in nodes)


def _room(name: str, amount: float, each: float) -> int:
    """How many workers a node has enough of a resource for. A fraction of a GPU comes from one GPU, never from two."""
    if name in ("GPU", "TPU") and each < 1:
        return math.floor(1 / each) * math.floor(amount)
    return math.floor(amount / each)


def no_room(workers: str, room: int, nodes: Nodes, wanted: Mapping[str, float], where: str = "the cluster") -> str:
    """The error for workers that do not fit: what there is room for, and what to write."""
    otherwise = "add nodes, or write cluster.accelerator: cpu" if {"GPU", "TPU"} & wanted.keys() else "add nodes"
    remedy = f"write cluster.workers: {room}, or add nodes" if room else otherwise
    has = f"{where} has room for {room} ({describe_nodes(nodes, *wanted)})"
    return f"cluster.workers: {workers} do not fit: {has}; {remedy}"


def describe_workers(cluster: Cluster, wanted: Mapping[str, float]) -> str:
    """8 × 1 CPU, 4 TPU TPU-V6E in 4x4."""
    kind = f" {cluster.accelerator_type}" if cluster.accelerator_type else ""
    topology = f" in {cluster.topology}" if cluster.topology else ""
    return f"{cluster.workers} × {describe_resources(wanted)}{kind}{topology}"


def describe_nodes(nodes: Nodes, *wanted: str) -> str:
    """CPUs, accelerators and what else is wanted, of all nodes: 2 nodes, 8 CPU, 2 GPU, 14.3 GiB memory."""
    names = dict.fromkeys(("CPU", "GPU", "TPU", *wanted))
    totals = {name: sum(node.get(name, 0) for node in nodes) for name in names}
    counts = describe_resources({name: amount for name, amount in totals.items() if amount})
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {counts or 'no CPU'}"


def describe_resources(resources: Mapping[str, float]) -> str:
    """As people write them: 1 CPU, 2.5 GiB memory."""
    return ", ".join(
        f"{size(amount) if name == 'memory' else f'{amount:g}'} {name}" for name, amount in resources.items()
    )


def can_grow(node_types: Mapping[str, str]) -> bool:
    """Whether an autoscaler can add nodes, by the type that it reports of each: where it cannot, the node's id."""
    return any(kind != f"node_{node}" for node, kind in node_types.items())
