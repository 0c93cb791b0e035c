"""The hardware that a plan is for: `h200`, `8xh100`, `4x8xa100-80`, `v6e:4x4`, `2*v5p:4x4x4`, or this machine."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from raygpt.config import Cluster, Recipe
from raygpt.deploy.tpu import GKE_NAMES, Slice, slice_of, topologies_of
from raygpt.engines import choices
from raygpt.engines.base import Devices
from raygpt.engines.precision import NUMBER_BYTES, choose_precision
from raygpt.errors import RaygptError
from raygpt.host import cores, memory_for_work
from raygpt.planning.cpu_speed import cpu_speed
from raygpt.planning.devices import ALIASES, DEVICES, GB, GIB, TERA, Device, device_of, may_be, ray_device
from raygpt.planning.micro_batch_size import cpu_devices
from raygpt.resources import resources_of_worker

HERE = "here"
DIMENSIONS = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}
MOST_DEVICES = 100_000  # more than any machine has; a search looks at every mesh of them
# Least and most of what the command line may say of a device: from a slow CPU to a thousand of today's largest.
FIGURES = {"peak": (1e-3, 1e6, "TFLOP/s"), "memory": (1e-3, 1e6, "GiB"), "bandwidth": (1e-3, 1e7, "GB/s")}
NAME_OTHERS = "name other devices by --on"
COMMAND_LINE = "the command line"
ASK_DRIVER_S = 10.0


@dataclass(frozen=True)
class Target:
    """Devices of one kind: `count` of them in `groups` nodes or slices, between which they send over the network."""

    device: Device
    count: int
    groups: int = 1
    name: str = HERE

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.name == HERE

    @property
    def sides(self) -> tuple[int, ...]:
        """Of a slice of TPUs, in chips; none of other devices."""
        return tuple(int(size) for size in self.name.partition(":")[2].split("x") if size)

    def __str__(self) -> str:
        nodes = (
            "" if self.groups == 1 else f" in {self.groups} {'slices' if self.device.platform == 'tpu' else 'nodes'}"
        )
        return f"{self.count} × {self.device.name}{nodes}"


def parse_target(
    text: str, peak: float | None = None, memory: float | None = None, bandwidth: float | None = None
) -> Target:
    """The target that a text names; `peak` (TFLOP/s), `memory` (GiB) and `bandwidth` (GB/s) describe a device that is
    not in the table, or replace what the table says."""
    _check_figures(peak=peak, memory=memory, bandwidth=bandwidth)
    number, written = r"([0-9]{1,9})", text.lower()
    if written == HERE:
        return this_machine(peak, memory, bandwidth)
    slices = re.fullmatch(rf"(?:{number}\*)?([a-z0-9]+):([0-9]{{1,9}}(?:x[0-9]{{1,9}})*)", written)
    gpus = re.fullmatch(rf"(?:{number}x)?(?:{number}x)?([a-z][a-z0-9-]*|[0-9]{{4}})", written)
    if slices:
        count, name, topology = int(slices[1] or 1), slices[2], [int(size) for size in slices[3].split("x")]
        device = _device(name, text, peak, memory, bandwidth)
        _check_slice(device, topology, text)
        target = Target(device, count * prod(topology), count, written)
    elif gpus:
        numbers = [int(number) for number in gpus.groups()[:2] if number]
        device = _device(gpus[3], text, peak, memory, bandwidth)
        if device.platform == "tpu":
            raise RaygptError(f"--on {text}: a TPU needs its slice; write e.g. --on {_example(device)}")
        target = _nodes(device, numbers, text)
    else:
        raise RaygptError(f"--on {text}: is no target; write e.g. {_meant(written)}")
    if not target.count:
        raise RaygptError(f"--on {text}: has no devices; write e.g. --on {_example(device)}")
    if target.count > MOST_DEVICES:
        raise RaygptError(
            f"--on {text}: {target.count:,} devices are more than a plan is for; write {MOST_DEVICES:,} or fewer"
        )
    return target


def _check_figures(**figures: float | None) -> None:
    """Refuse what no device has; not a number is neither more nor less than anything."""
    for name, figure in figures.items():
        least, most, unit = FIGURES[name]
        if figure is not None and not least <= figure <= most:
            raise RaygptError(f"--{name} {figure:g}: no device has this; write {least:g} to {most:,.0f} {unit}")


def _example(device: Device) -> str:
    """A target with this device."""
    if device.platform != "tpu":
        return f"8x{device.name}"
    return f"{device.name}:{'x'.join(['4'] * DIMENSIONS.get(device.name, 2))}"


def _meant(written: str) -> str:
    """What may have been meant by a text that is no target."""
    if times := re.fullmatch(r"([1-9][0-9]*)\*([a-z][a-z0-9-]*)", written):
        device = DEVICES.get(ALIASES.get(times[2], times[2]))
        if device and device.platform == "gpu":
            return f"--on {times[1]}x{device.per_node}x{device.name}"
    return "h200, 8xh100, 4x8xa100-80, v6e:4x4 or 2*v5p:4x4x4"


def _device(name: str, text: str, peak: float | None, memory: float | None, bandwidth: float | None) -> Device:
    name = ALIASES.get(name, name)
    if name in DEVICES:
        return _described(Target(DEVICES[name], 1), peak, memory, bandwidth).device
    if name == "cpu":
        raise RaygptError(f"--on {text}: a CPU is measured, not looked up; write --on {HERE} on that machine")
    if peak is None or memory is None or bandwidth is None:
        raise RaygptError(
            f"--on {text}: {name} is not one of {', '.join(DEVICES)}; describe it by --peak TFLOPS --memory GIB "
            "--bandwidth GB/S"
        )
    return _described(Target(_unknown(name), 1), peak, memory, bandwidth).device


def _unknown(name: str) -> Device:
    """A GPU that the command line describes."""
    return Device(name, "gpu", 0, 0, 0, 0, 32 * GB, 6 * GB, COMMAND_LINE, (), 8.0)


def _described(target: Target, peak: float | None, memory: float | None, bandwidth: float | None) -> Target:
    """The target with what the command line says of its device."""
    device = target.device
    given = {"peak": peak, "memory": memory, "bandwidth": bandwidth}
    names = [name for name, figure in given.items() if figure is not None]
    if peak is not None:
        fp32 = device.fp32 / device.peak if device.peak else 0.5  # of the peak in bf16
        device = replace(device, peak=peak * TERA, fp32=fp32 * peak * TERA)
    if memory is not None:
        device = replace(device, memory=int(memory * GIB))
    if bandwidth is not None:
        device = replace(device, bandwidth=bandwidth * GB)
    if names:
        rest = "" if device.source == COMMAND_LINE or len(names) == len(given) else f"{device.source}; "
        device = replace(device, source=f"{rest}{' and '.join(names) + ' by ' if rest else ''}{COMMAND_LINE}")
    return replace(target, device=device)


def _check_slice(device: Device, topology: list[int], text: str) -> None:
    if device.platform != "tpu":
        fitting = _in_nodes(device, max(1, prod(topology)))
        raise RaygptError(f"--on {text}: only TPUs come in slices; write e.g. --on {fitting}")
    wanted = DIMENSIONS.get(device.name, len(topology))
    if len(topology) != wanted:
        raise RaygptError(
            f"--on {text}: a slice of {device.name} has {wanted} sides; write e.g. --on {_example(device)}"
        )
    kind, sides = _kind(device), "x".join(map(str, topology))
    try:
        slice_of(kind, sides)
    except RaygptError:
        raise RaygptError(
            f"--on {text}: there is no slice {sides} of {kind}; there are {topologies_of(kind)}; "
            f"write several as e.g. --on 2*{_example(device)}"
        ) from None


def _kind(device: Device) -> str:
    """Ray's name of a TPU."""
    return next(name for name in GKE_NAMES if (known := ray_device(name)) and known.name == device.name)


def _nodes(device: Device, numbers: list[int], text: str) -> Target:
    """[8] is one node of 8, [4, 8] four of them."""
    nodes, each = [1, 1, *numbers][-2:]
    if each > device.per_node:
        fitting = _in_nodes(device, each)
        raise RaygptError(f"--on {text}: a node has at most {device.per_node} GPUs; write e.g. --on {fitting}")
    return Target(device, nodes * each, nodes, text)


def _in_nodes(device: Device, count: int) -> str:
    """A target with so many GPUs or a few more, in full nodes if one has too few."""
    nodes = -(-count // device.per_node)
    return f"{count}x{device.name}" if nodes == 1 else f"{nodes}x{device.per_node}x{device.name}"


def worker_keys(cluster: Cluster, target: Target) -> dict[str, Any]:
    """The keys of `cluster` with which a run uses all devices of a target: a worker has a GPU, a TPU's host, or a
    part of a CPU's cores."""
    device = target.device
    if device.platform == "tpu":
        kind = _kind(device)
        one = Slice(kind, "x".join(map(str, target.sides)))
        workers = target.groups * one.hosts
        return {"cluster.workers": workers, "cluster.accelerator_type": kind, "cluster.topology": one.topology}
    if device.platform == "cpu":
        return {"cluster.workers": cluster.workers}  # they share its cores, however many they are
    return {"cluster.workers": target.count // _gpus_of_worker(cluster, target)}


def _gpus_of_worker(cluster: Cluster, target: Target) -> int:
    """Refuses workers that would leave some of a node's GPUs idle, and several with a part of a GPU each."""
    each, node = resources_of_worker(cluster, target.device.platform, ()).get("GPU", 1), target.count // target.groups
    if target.count == 1 and 0 < each <= 1:
        return 1
    if 0 < each < 1:
        raise RaygptError(
            f"cluster.resources_per_worker: a run with {each:g} of a GPU has one, not {target}; "
            f"write --on {target.device.name}, or leave GPU out"
        )
    if not each or node % each:
        fitting = max(number for number in range(1, node + 1) if node % number == 0 and number <= max(each, 1))
        raise RaygptError(
            f"cluster.resources_per_worker: {target} needs workers with whole GPUs that divide the {node} of a node, "
            f"not {each:g}; write GPU: {fitting}"
        )
    return int(each)


def other_hardware_keys(cluster: Cluster, target: Target) -> dict[str, Any]:
    """The keys with which `cluster` asks for other hardware than the target, and what to write for it."""
    device, right, keys = target.device, worker_keys(cluster, target), dict[str, Any]()
    if cluster.accelerator not in ("auto", device.platform):
        keys["cluster.accelerator"] = device.platform
    if cluster.accelerator_type and not may_be(device, cluster.accelerator_type):
        keys["cluster.accelerator_type"] = right.get("cluster.accelerator_type")
    if cluster.topology and cluster.topology != right.get("cluster.topology"):
        keys["cluster.topology"] = right.get("cluster.topology")
    return keys


def as_overrides(keys: Mapping[str, Any]) -> str:
    """Keys as the command line writes them."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in keys.items())


def precision_on(recipe: Recipe, target: Target) -> str:
    """The precision of the arithmetic."""
    return choose_precision(recipe.model.precision, target.device.platform, target.device.capability)


def devices_on(recipe: Recipe, target: Target) -> Devices:
    """What an engine would find on a target."""
    device, training = target.device, recipe.training
    if device.platform == "cpu":
        workers = recipe.cluster.max_workers
        return cpu_devices(recipe, workers, workers, cores(), device.memory)
    if device.platform == "tpu" and recipe.engine == "torch":
        raise RaygptError(f"--on {target.name}: engine torch knows no TPU; write engine=jax")
    precision, mesh = precision_on(recipe, target), recipe.mesh_over(target.count, NAME_OTHERS)
    setup = device.platform, device.capability, precision, mesh, recipe.model
    is_jax = recipe.engine == "jax"
    scanned = choices.scans(training.compile, device.platform, recipe.model.layers)
    return Devices(
        target.count,
        int(device.usable_memory(recipe.engine) * _share_of_gpu(recipe, target)),
        NUMBER_BYTES[precision],
        keeps_scores=is_jax and choices.attention(*setup, training.deterministic) == "XLA",
        platform=device.platform,
        fused=is_jax and choices.kernels(*setup, scanned) == "fused",
    )


def _share_of_gpu(recipe: Recipe, target: Target) -> float:
    """The part of a device that the recipe's worker has."""
    return recipe.cluster.gpu_share if target.device.platform == "gpu" else 1.0


def found_target(about: Mapping[str, str], nodes: int, topology: str | None) -> Target | None:
    """The target that a run found, by its engine's description of itself, on so many nodes or in slices of this
    topology; None if its device is not in the table. All cores of a machine are one device here."""
    if about["device"] == "cpu":
        return Target(this_cpu(), nodes, nodes)
    device, count = device_of(about["device"]), int(about["devices"])
    if device is None:
        return None
    if device.platform != "tpu":
        return Target(device, count, nodes)
    if topology is None:  # one host, whose chips are all linked
        return Target(device, count)
    slices = max(1, count // prod(map(int, topology.split("x"))))
    return Target(device, count, slices, f"{slices}*{device.name}:{topology}")


def this_machine(peak: float | None = None, memory: float | None = None, bandwidth: float | None = None) -> Target:
    """The GPUs that NVIDIA's driver reports, or the CPU's cores with the speed that they have now; and what the command
    line says of them, as for `parse_target`."""
    gpus = _reported_gpus()
    if not gpus:
        return _described(Target(this_cpu(), 1), peak, memory, bandwidth)
    name, mebibytes = (part.strip() for part in gpus[0].rsplit(",", 1))
    device = device_of(name) or _unknown(name)
    if mebibytes.isdecimal():  # a GPU that shares the host's memory reports [N/A]
        device = replace(device, memory=int(mebibytes) * 2**20)
    target = _described(Target(device, len(gpus)), peak, memory, bandwidth)
    figures = target.device.peak, target.device.memory, target.device.bandwidth
    options = ("--peak TFLOPS", "--memory GIB", "--bandwidth GB/S")
    if missing := [option for option, figure in zip(options, figures, strict=True) if not figure]:
        raise RaygptError(f"{name} is not in the table of devices; describe it by {' '.join(missing)}")
    return target


def _reported_gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_DRIVER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def this_cpu() -> Device:
    """All cores of this machine as one device, with the speed that NumPy measures."""
    peak, bandwidth = cpu_speed(cores())
    source = f"measured here on {cores()} cores by NumPy"
    return Device("cpu", "cpu", peak, peak, memory_for_work(), bandwidth, bandwidth, GB, source, ("cpu",), 0.0, 1)
