"""What is deployed: a recipe, where it goes, and every number that follows from the two."""

import re
from dataclasses import dataclass
from importlib import metadata
from math import ceil
from pathlib import PurePosixPath
from typing import Any, Literal

from raygpt.config import Recipe
from raygpt.deploy.clouds import CLOUDS, Cloud
from raygpt.deploy.local_files import local_files
from raygpt.deploy.names import NAME_LENGTH, mebibytes
from raygpt.deploy.options import Options, check_options
from raygpt.deploy.tpu import Slice, slice_of
from raygpt.errors import RaygptError
from raygpt.storage import is_remote

MOUNT = "/storage"  # of the volume, in every pod
DEFAULT_IMAGE = "raygpt:latest"
# What a pod has for each worker, unless --cpus and --memory say otherwise. A GPU's batches are read by its own pod, and
# the smallest host of a TPU has 24 CPUs and 48 GB.
CPUS = {"gpu": 8, "tpu": 20, "cpu": 4}
MEMORY_GIB = {"gpu": 32, "tpu": 40, "cpu": 8}
DATA_GIB = 4  # for each process of Ray Data that tokenises


@dataclass(frozen=True)
class Deployment:
    """A recipe for a place, checked. Made by `plan_deployment`."""

    recipe: Recipe  # as it runs there: accelerator and storage are explicit
    options: Options
    cloud: Cloud
    accelerator: Literal["cpu", "gpu", "tpu"]
    accelerator_type: str | None  # as the user named it; the recipe for GPUs of Kubernetes has none
    slice: Slice | None
    workers_per_pod: int

    @property
    def name(self) -> str:
        """The run's name as Kubernetes allows it: modern-1.5b -> modern-1-5b."""
        name = re.sub(r"[^a-z0-9]+", "-", str(self.recipe.run.name).lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[:NAME_LENGTH].strip("-")

    @property
    def image(self) -> str:
        return self.options.image or DEFAULT_IMAGE

    @property
    def retries(self) -> int:
        return 5 if self.options.retries is None else self.options.retries

    @property
    def time(self) -> str:
        return self.options.time or "24:00:00"

    @property
    def gpus_per_node(self) -> int:
        """0 without GPUs."""
        return (self.options.gpus_per_node or 1) if self.accelerator == "gpu" else 0

    @property
    def is_elastic(self) -> bool:
        return self.recipe.cluster.is_elastic

    @property
    def has_autoscaler(self) -> bool:
        return self.is_elastic or self.options.prepare_nodes > 0

    @property
    def min_replicas(self) -> int:
        """Of the worker group: pods, or slices."""
        return -(-self.recipe.cluster.min_workers // self._workers_per_replica)

    @property
    def max_replicas(self) -> int:
        return self.recipe.cluster.max_workers // self._workers_per_replica

    @property
    def hosts(self) -> int:
        """Pods of one replica: 1, or the hosts of a slice."""
        return self.slice.hosts if self.slice else 1

    @property
    def _workers_per_replica(self) -> int:
        return self.workers_per_pod * self.hosts

    @property
    def cpus_per_pod(self) -> int:
        return max(self.options.cpus or CPUS[self.accelerator] * self.workers_per_pod, self.min_cpus_per_pod)

    @property
    def min_cpus_per_pod(self) -> int:
        """One more than the workers take: Ray Data tokenises and reads with what is left."""
        return int(self.recipe.cluster.resources_per_worker.get("CPU", 1) * self.workers_per_pod) + 1

    @property
    def memory_per_pod(self) -> str:
        default = max(MEMORY_GIB[self.accelerator] * self.workers_per_pod, self.min_gib_per_pod)
        return self.options.memory or f"{default}Gi"

    @property
    def min_gib_per_pod(self) -> int:
        """What the workers take, if the recipe says it, and a process of Ray Data; 0 if it does not."""
        of_worker = self.recipe.cluster.resources_per_worker.get("memory", 0)
        return ceil(of_worker * self.workers_per_pod / 2**30) + DATA_GIB if of_worker else 0

    @property
    def extras(self) -> list[str]:
        """Extras of raygpt that the image needs for this recipe."""
        track = self.recipe.track
        device = {"gpu": "cuda", "tpu": "tpu"}.get(self.accelerator) if self.recipe.engine == "jax" else None
        trackers = {"tensorboard": track.tensorboard, "wandb": track.wandb, "mlflow": track.mlflow}
        engine = "torch" if self.recipe.engine == "torch" else device
        model = "transformers" if self.recipe.model.implementation == "huggingface" else None
        wanted = ["dashboard", "gpt2", "hf", engine, model, *(name for name, used in trackers.items() if used)]
        return sorted({name for name in wanted if name})


def plan_deployment(recipe: Recipe, options: Options) -> Deployment:
    """Check a recipe for the place that it is deployed to; raises RaygptError with one line."""
    check_options(options)
    cloud, accelerator = CLOUDS[options.target], _accelerator(recipe, options)
    slice_ = slice_of(recipe.cluster.accelerator_type, recipe.cluster.topology) if accelerator == "tpu" else None
    _check_credentials(recipe)
    if accelerator == "gpu":
        _check_gpu(recipe, options, cloud)
    placed = _placed(recipe, options, accelerator)
    _check_files(placed, options)
    deployment = Deployment(
        placed,
        options,
        cloud,
        accelerator,
        recipe.cluster.accelerator_type,
        slice_,
        _workers_per_pod(placed, options, accelerator),
    )
    _check_workers(deployment)
    _check_cpus(deployment)
    _check_memory(deployment)
    return deployment


def ray_version() -> str:
    """Of the Ray that is installed here; the image gets the same."""
    return metadata.version("ray")


def _accelerator(recipe: Recipe, options: Options) -> Literal["cpu", "gpu", "tpu"]:
    """`auto` is a GPU, or a TPU if the recipe has a topology: a manifest cannot wait and see."""
    asked = recipe.cluster.accelerator
    chosen: Any = asked if asked != "auto" else "tpu" if recipe.cluster.topology else "gpu"
    if chosen == "tpu" and options.target != "gke":
        raise RaygptError(f"cluster.accelerator: tpu is not for --target {options.target}; write --target gke")
    return chosen  # type: ignore[no-any-return]


def _check_credentials(recipe: Recipe) -> None:
    if recipe.cluster.runtime_env:
        raise RaygptError(
            "cluster.runtime_env: may hold secrets, so it is not written into a manifest; put variables into a Secret "
            "and write --secret NAME, and packages into the image"
        )


def _check_gpu(recipe: Recipe, options: Options, cloud: Cloud) -> None:
    """Refuse a GPU by name where no label of nodes is known for it: pods would land on any."""
    named = recipe.cluster.accelerator_type
    if named and not cloud.gpu_label and not options.node_selector and options.target != "slurm":
        raise RaygptError(
            f"cluster.accelerator_type: no node label is known for {named} with --target {options.target}; write "
            "--node-selector KEY=VALUE as well, with the label that your nodes have"
        )


def _placed(recipe: Recipe, options: Options, accelerator: str) -> Recipe:
    """The recipe with an explicit accelerator, so that a run whose nodes have not joined yet does not choose the CPU,
    and with a storage that all pods see."""
    home = recipe.run.storage
    if options.target != "slurm" and not is_remote(home):
        if not options.volume:
            raise RaygptError(
                f"run.storage: {home} would be a folder of one pod, and lost with it; write run.storage=s3://…, or "
                f"--volume NAME for a volume that all pods mount at {MOUNT}"
            )
        home = home if home.startswith("/") else f"{MOUNT}/{home}"
        if not _is_below(home, MOUNT):
            raise RaygptError(f"run.storage: {home} is not on the volume, which is mounted at {MOUNT}; write e.g. runs")
    explicit: dict[str, Any] = {"accelerator": accelerator}
    if accelerator == "gpu" and options.target != "slurm":
        # The node selector sees to the model of the GPU. Ray Train would ask the autoscaler for accelerator_type:H100
        # as well: running nodes have that resource, but the autoscaler does not expect it of new pods and adds none.
        explicit["accelerator_type"] = None
    cluster = recipe.cluster.model_copy(update=explicit)
    return recipe.model_copy(update={"cluster": cluster, "run": recipe.run.model_copy(update={"storage": home})})


def _check_files(recipe: Recipe, options: Options) -> None:
    """Refuse files of this machine: pods see the image, the volume and what has an address."""
    if options.target == "slurm":  # its nodes share the home directories
        return
    for key, path in local_files(recipe):
        if not (options.volume and _is_below(path, MOUNT)):
            place = f"{MOUNT}/{PurePosixPath(path).name}"
            remedy = f"copy it onto the volume and write {key}={place}" if options.volume else f"write {key}=s3://…"
            raise RaygptError(f"{key}: {path} is a file of this machine, which pods do not see; {remedy}")


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder) and ".." not in PurePosixPath(path).parts


def _workers_per_pod(recipe: Recipe, options: Options, accelerator: str) -> int:
    each = recipe.cluster.resources_per_worker
    unknown = sorted(set(each) - {"CPU", "GPU", "TPU", "memory"})
    if unknown:
        raise RaygptError(f"cluster.resources_per_worker: {unknown[0]} is no resource of a node there; leave it out")
    if accelerator != "gpu":
        if options.gpus_per_node is not None:
            raise RaygptError(f"--gpus-per-node: with cluster.accelerator: {accelerator} there are none; leave it out")
        return 1
    gpus, of_node = each.get("GPU", 1), options.gpus_per_node or 1
    if gpus < 1 or of_node % gpus:
        raise RaygptError(
            f"--gpus-per-node: {of_node} is no multiple of the {gpus:g} GPUs of a worker "
            f"(cluster.resources_per_worker); write e.g. --gpus-per-node {max(int(gpus), 1)}"
        )
    return int(of_node // gpus)


def _check_workers(deployment: Deployment) -> None:
    deployment.recipe.worker_counts(deployment.accelerator)  # refuses a range that never fills the mesh
    cluster, each = deployment.recipe.cluster, deployment.workers_per_pod * deployment.hosts
    if deployment.slice and deployment.is_elastic:
        raise RaygptError(
            f"cluster.workers: {cluster.workers} is elastic, and TPU slices are not; write e.g. cluster.workers: {each}"
        )
    if cluster.max_workers % each == 0:
        return
    low, high = -(-cluster.min_workers // each) * each, max(cluster.max_workers // each, 1) * each
    fitting = f"{low}..{high}" if low < high else low if deployment.is_elastic else high
    if deployment.slice:
        what = f"slices of {cluster.topology} {cluster.accelerator_type}, which have {each} hosts"
        raise RaygptError(
            f"cluster.workers: {cluster.workers} does not fill {what}; write cluster.workers: {fitting}, or a multiple"
        )
    raise RaygptError(
        f"cluster.workers: {cluster.workers} does not fill nodes of {deployment.gpus_per_node} GPUs; "
        f"write e.g. cluster.workers: {fitting}"
    )


def _check_cpus(deployment: Deployment) -> None:
    asked, needed = deployment.options.cpus, deployment.min_cpus_per_pod
    if asked is not None and asked < needed:
        raise RaygptError(
            f"--cpus: {asked} are too few: the workers of a pod take {needed - 1} (cluster.resources_per_worker), and "
            f"Ray Data needs one; write --cpus {needed}"
        )


def _check_memory(deployment: Deployment) -> None:
    asked, needed = deployment.options.memory, deployment.min_gib_per_pod
    if asked is not None and mebibytes(asked) < needed * 1024:
        raise RaygptError(
            f"--memory: {asked} is too little: the workers of a pod take {needed - DATA_GIB}Gi "
            f"(cluster.resources_per_worker), and Ray Data needs {DATA_GIB}Gi; write --memory {needed}Gi"
        )
