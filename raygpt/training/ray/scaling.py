"""Translates a recipe's `cluster` for Ray: number and resources of workers, and whether the cluster has them."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train.v2.api.config import ScalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.tpu import get_num_tpu_slices, get_tpu_worker_resources

from raygpt import storage
from raygpt.cluster import alive_nodes, has_autoscaler
from raygpt.config import Cluster, Recipe
from raygpt.engines import for_gpus
from raygpt.errors import RaygptError, TransientError
from raygpt.host import cores, host_memory
from raygpt.ray_private import worker
from raygpt.resources import (
    PROCESS_BYTES,
    Accelerator,
    Resources,
    choose_accelerator,
    describe_nodes,
    describe_workers,
    no_room,
    resources_of_worker,
    room_on,
)
from raygpt.training.ray import runtime_env

RESIZE_CHECK_S = 30.0  # between two checks for nodes that an elastic run could grow onto


@dataclass(frozen=True)
class Workers:
    """The workers of a run on the cluster that this process is connected to."""

    cluster: Cluster
    accelerator: Accelerator
    memory: int = PROCESS_BYTES  # of each, on CPUs: see memory.py
    counts: Sequence[int] | None = None  # with which the recipe's mesh can be made, ascending; None: any

    @property
    def resources(self) -> Resources:
        """The resources of one worker."""
        if self.accelerator == "tpu" and self.cluster.topology:
            return dict(self._slice[1]) | self.cluster.resources_per_worker
        return resources_of_worker(self.cluster, self.accelerator, _nodes(), self.memory)

    @property
    def _slice(self) -> tuple[int, Resources]:
        """The number of workers of one TPU slice, and the resources of each."""
        cluster = self.cluster
        try:
            return get_tpu_worker_resources(
                str(cluster.topology), str(cluster.accelerator_type), cluster.resources_per_worker or None, num_slices=1
            )
        except ValueError as error:
            raise RaygptError(
                f"cluster.topology: {cluster.topology} of {cluster.accelerator_type} is no slice for Ray ({error}); "
                "write e.g. cluster.topology: 4x4 and cluster.accelerator_type: TPU-V6E"
            ) from None

    @property
    def is_elastic(self) -> bool:
        """Whether their number may change during the run."""
        return self.cluster.is_elastic

    def scaling(self) -> ScalingConfig:
        """The workers as Ray Train's ScalingConfig."""
        cluster = self.cluster
        auto = "SPREAD" if self.accelerator == "tpu" else "PACK"
        try:
            return ScalingConfig(
                num_workers=(cluster.min_workers, cluster.max_workers) if self.is_elastic else cluster.max_workers,
                use_gpu=self.accelerator == "gpu",
                use_tpu=self.accelerator == "tpu",
                resources_per_worker=self.resources,
                accelerator_type=cluster.accelerator_type,
                topology=cluster.topology,
                placement_strategy=auto if cluster.placement == "auto" else cluster.placement,
                elastic_resize_monitor_interval_s=RESIZE_CHECK_S,
            )
        except ValueError as error:  # a number of workers that does not fill the slice
            raise RaygptError(f"cluster: {' '.join(str(error).split())}") from None

    @property
    def runtime_env(self) -> dict[str, Any] | None:
        """The workers' environment; for CUDA without LD_LIBRARY_PATH, which would hide the libraries in JAX's wheel."""
        env = runtime_env.checked(self.cluster.runtime_env)
        if self.accelerator == "gpu":
            env["env_vars"] = {"LD_LIBRARY_PATH": ""} | env.get("env_vars", {})
        return env or None  # without one a worker starts two seconds faster

    def room(self) -> int:
        """How many of these workers would fit on the cluster's nodes if nothing else were running."""
        if self.cluster.topology:
            return self._slice[0] * get_num_tpu_slices(self.cluster.topology, str(self.cluster.accelerator_type))
        return room_on(_nodes(), self.resources, self.cluster.accelerator_type)

    def spare_cpus(self) -> float:
        """CPUs of the cluster that the workers leave to Ray Data."""
        taken = self.resources.get("CPU", 0) * self.cluster.max_workers
        return sum(node.get("CPU", 0) for node in _nodes()) - taken

    def __str__(self) -> str:
        return describe_workers(self.cluster, self.resources)


def choose_workers(
    cluster: Cluster, engine: str | None = None, warn: Callable[[str], None] = lambda text: None
) -> Workers:
    """`auto` takes a TPU or a GPU if the cluster has one (PyTorch: GPUs only). On a cluster that we started, a GPU that
    the installed engine cannot use is left unused, with a warning; other machines are not checked."""
    nodes = _nodes()
    chosen = choose_accelerator(cluster, engine, nodes)
    is_mine = chosen == "gpu" and any(node.get("GPU") for node in nodes) and is_our_own()
    remedy = for_gpus(engine) if engine and is_mine else None
    if remedy is None:
        return Workers(cluster, chosen)
    if cluster.accelerator == "gpu":
        raise RaygptError(f"cluster.accelerator: gpu cannot be used by the {engine} installed here; {remedy}")
    warn(f"the GPU of this machine is not used: the {engine} installed here cannot use it; {remedy}")
    return Workers(cluster, "cpu")


def for_mesh(workers: Workers, recipe: Recipe) -> Workers:
    """The workers of a recipe in the numbers with which its mesh can be made."""
    counts = recipe.worker_counts(workers.accelerator)
    ends = f"{counts[0]}..{counts[-1]}" if len(counts) > 1 else counts[0]
    return replace(workers, cluster=workers.cluster.model_copy(update={"workers": ends}), counts=counts)


def ensure_room(workers: Workers, say: Callable[[str], None] = lambda text: None) -> None:
    """Refuse workers that can never fit; if an autoscaler can add nodes, say what the run waits for."""
    room, wanted = workers.room(), workers.cluster.min_workers
    if room >= wanted:
        return
    if has_autoscaler():
        say(f"waiting for {workers}: the cluster has room for {room}, and its autoscaler is asked for the rest")
        return
    raise TransientError(no_room(str(workers), room, _nodes(), workers.resources))


def ensure_spare_cpus(workers: Workers) -> None:
    """Refuse workers that leave no CPU for Ray Data to read datasets: they would wait for batches for ever."""
    if workers.spare_cpus() < 1 and not has_autoscaler():
        raise RaygptError(
            f"datasets: {workers} leave Ray Data no CPU ({describe_nodes(_nodes())}); write fewer cluster.workers, or "
            "let functions make the datasets, so that raygpt.run starts a cluster with room for both"
        )


def local_cpus(cluster: Cluster) -> int:
    """CPUs of a cluster on this machine: for the workers, as far as they fit its memory, and for Ray Data besides. Ray
    starts processes for all of them."""
    return cores() + min(cluster.max_workers, max(1, host_memory() // PROCESS_BYTES))


def is_our_own() -> bool:
    """Whether this process started the Ray cluster and no other node has joined: it ends with this process."""
    node: Any = worker._global_node
    return node is not None and bool(node.is_head()) and len(ray.nodes()) == 1


def ensure_shared(run_folder: str) -> None:
    """Refuse a storage that the nodes do not share, by writing a file and reading it on each: NFS looks like any
    folder."""
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in alive_nodes() if node["NodeID"] != here]
    if not others:
        return
    uri = storage.join(run_folder, f"shared-{uuid.uuid4().hex[:8]}")
    storage.write_bytes(uri, b"")
    try:
        ask = ray.remote(num_cpus=0)(storage.exists)
        answers = {
            node["NodeManagerHostname"]: ask.options(scheduling_strategy=on_node(node)).remote(uri) for node in others
        }
        for node, found in answers.items():
            if not ray.get(found, timeout=120):
                raise RaygptError(not_shared(run_folder, node))
    finally:
        storage.delete(uri)


def not_shared(run_folder: str, node: str) -> str:
    """The error for a node that does not see what the driver wrote."""
    return (
        f"run.storage: {run_folder} is not the same folder on node {node}; write a folder that all nodes share (NFS), "
        "or s3://bucket/path"
    )


def on_node(node: dict[str, Any]) -> Any:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _nodes() -> list[Resources]:
    """The resources of every node."""
    return [node["Resources"] for node in alive_nodes()]
