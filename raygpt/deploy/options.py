"""Where a recipe is deployed, as the command line says it, checked as far as that needs no recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raygpt.deploy.clouds import CLOUDS
from raygpt.deploy.names import check_image, check_name, check_namespace, check_node_label, check_quantity, seconds
from raygpt.errors import RaygptError

MAX_COUNT = 1000  # of retries and nodes; Kubernetes itself refuses 2³¹
SAVE_S = 120  # before the end of its time a slurm job is asked to save
# Besides SAVE_S: slurm may signal a minute early, and Ray has two minutes to start. A shorter job would save and be
# requeued for ever, without a step.
MIN_TIME_S = SAVE_S + 60 + 120


@dataclass(frozen=True)
class Options:
    """Where a recipe is deployed. None: not given, so that what a target cannot use is refused only if it is."""

    target: str
    image: str | None = None
    namespace: str | None = None
    spot: bool = False
    gpus_per_node: int | None = None
    cpus: int | None = None
    memory: str | None = None
    prepare_nodes: int = 0
    volume: str | None = None
    volume_size: str | None = None
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    retries: int | None = None
    time: str | None = None


def check_options(options: Options) -> None:
    """Refuse what no target can use, and what this one cannot."""
    _check_target(options)
    _check_names(options)
    _check_amounts(options)
    if options.time is not None:
        _check_time(options.time)
    if options.volume_size and not options.volume:
        raise RaygptError("--volume-size: there is no --volume to make; write --volume NAME as well")


def parse_selector(pairs: Sequence[str]) -> dict[str, str]:
    """["KEY=VALUE"] -> {KEY: VALUE}, as --node-selector gives them."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise RaygptError(f"--node-selector: {pair!r} is not KEY=VALUE; write e.g. --node-selector pool=h100")
        found[key] = value
    return found


def _check_target(options: Options) -> None:
    cloud = CLOUDS.get(options.target)
    if cloud is None:
        raise RaygptError(f"--target: {options.target} is none of {', '.join(CLOUDS)}; write e.g. --target gke")
    if options.spot and not cloud.spot:
        own = "name their partition in the script" if options.target == "slurm" else "write --node-selector KEY=VALUE"
        raise RaygptError(
            f"--spot: --target {options.target} has no label for spot machines; write --target gke, eks or aks, or "
            f"leave it out and {own}"
        )
    if options.target != "slurm":
        if options.time is not None:
            raise RaygptError(f"--time: is for slurm, and --target is {options.target}; leave it out")
        return
    for option, value in _of_kubernetes(options).items():
        if value is not None:
            raise RaygptError(f"{option}: is for Kubernetes, and --target is slurm; leave it out")


def _of_kubernetes(options: Options) -> dict[str, object]:
    """What a batch script of slurm has no place for."""
    return {
        "--image": options.image,
        "--namespace": options.namespace,
        "--prepare-nodes": options.prepare_nodes or None,
        "--volume": options.volume,
        "--volume-size": options.volume_size,
        "--secret": options.secrets or None,
        "--service-account": options.service_account,
        "--node-selector": options.node_selector or None,
        "--retries": options.retries,
    }


def _check_names(options: Options) -> None:
    if options.image is not None:
        check_image("--image", options.image)
    if options.namespace is not None:
        check_namespace("--namespace", options.namespace)
    named = [("--volume", options.volume), ("--service-account", options.service_account)]
    for option, name in [*named, *(("--secret", secret) for secret in options.secrets)]:
        if name is not None:
            check_name(option, name)
    for key, value in options.node_selector.items():
        check_node_label("--node-selector", key, value)


def _check_amounts(options: Options) -> None:
    for option, quantity in (("--memory", options.memory), ("--volume-size", options.volume_size)):
        if quantity is not None:
            check_quantity(option, quantity)
    for option, count in (("--retries", options.retries), ("--prepare-nodes", options.prepare_nodes)):
        if count is not None and count > MAX_COUNT:
            raise RaygptError(f"{option}: {count} are too many; write {MAX_COUNT} or fewer")


def _check_time(time: str) -> None:
    if 0 < seconds("--time", time) < MIN_TIME_S:  # 0 is no limit
        raise RaygptError(
            f"--time: {time} is too short: a job is asked to save {SAVE_S} s before its end, and would be requeued for "
            f"ever; write {MIN_TIME_S // 60} (minutes) or more"
        )
