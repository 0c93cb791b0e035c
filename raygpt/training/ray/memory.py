"""Memory that CPU workers request of Ray, which places no more of them on a node than fit there.

Ray limits the memory of a node, not of a run: when a run takes too much, workers of any run on that node are killed.
With a request for each worker a run that does not fit beside the others waits, or is refused, before it starts. Local
clusters do not know of each other, so runs on them also write down what they need, each in a file of its own. GPUs
and TPUs have memory of their own: a model that is too large for every kind of the cluster is refused, and the workers
look at what they really have before they create it.
"""

import contextlib
import fcntl
import math
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ray

from raygpt import storage
from raygpt.cluster import alive_nodes
from raygpt.config import Recipe
from raygpt.errors import RaygptError, TransientError
from raygpt.formatting import size
from raygpt.host import cores, host_memory, memory_for_work
from raygpt.planning.devices import ray_device
from raygpt.planning.micro_batch_size import cpu_devices, split_batch, worker_bytes
from raygpt.planning.target import Target, devices_on
from raygpt.training.ray.scaling import Workers, is_our_own, on_node

Host = tuple[int, int]  # its cores, and the bytes that workers may use
ANSWER_S = 60.0
ACCELERATOR = "accelerator_type:"  # before the kind of a node's GPUs or TPUs, among Ray's resources


def request_memory(workers: Workers, recipe: Recipe, vocab: int) -> Workers:
    """The workers with the memory that a recipe needs on the cluster's CPUs; refuses a model that fits on no node."""
    if workers.accelerator != "cpu":
        _refuse_too_large(workers, recipe, vocab)
        return workers
    needs, refusal = [], None
    for (cores_, memory), beside in _hosts(workers).items():
        count = workers.cluster.max_workers
        try:
            needs.append(worker_bytes(recipe, vocab, cpu_devices(recipe, count, beside, cores_, memory), count))
        except RaygptError as error:
            refusal = error
    if refusal and not needs:
        raise refusal
    return replace(workers, memory=max(needs)) if needs else workers


def _refuse_too_large(workers: Workers, recipe: Recipe, vocab: int) -> None:
    """Refuse a model that fits on none of the cluster's accelerators, as far as their kinds are known."""
    kinds = {name for node in alive_nodes() for name in node["Resources"] if name.startswith(ACCELERATOR)}
    devices = [ray_device(name.removeprefix(ACCELERATOR)) for name in sorted(kinds)]
    count = workers.cluster.max_workers * max(1, int(workers.resources.get(workers.accelerator.upper(), 1)))
    refusal = None
    for device in devices:
        if device is None:
            return
        try:
            recipe.mesh_over(count)
        except RaygptError:
            return  # an elastic run may begin with fewer workers, which then say so
        try:
            split_batch(recipe, vocab, devices_on(recipe, Target(device, count)))
            return
        except RaygptError as error:
            refusal = error
    if refusal:
        raise refusal


def _hosts(workers: Workers) -> dict[Host, int]:
    """The kinds of nodes that have a CPU for a worker, and how many workers Ray would place on each."""
    count = workers.cluster.max_workers
    if is_our_own():
        return {_this_host(): count}
    per_worker = workers.resources.get("CPU", 1) or 1
    nodes = [node for node in alive_nodes() if node["Resources"].get("CPU", 0) >= per_worker]
    look = ray.remote(num_cpus=0)(_this_host)
    try:
        hosts: list[Host] = ray.get(
            [look.options(scheduling_strategy=on_node(node)).remote() for node in nodes], timeout=ANSWER_S
        )
    except ray.exceptions.RayError:  # a node that is just being lost: its workers will look themselves
        return {}
    if "SPREAD" in workers.cluster.placement:
        return dict.fromkeys(hosts, math.ceil(count / max(1, len(nodes))))
    room = [int(node["Resources"]["CPU"] // per_worker) for node in nodes]
    return {host: min(count, fits) for host, fits in zip(hosts, room, strict=True)}


@contextlib.contextmanager
def reserved(workers: Workers) -> Iterator[None]:
    """Inside the block this machine's other local clusters know what the workers need; refuses more than they leave.

    Ray counts the free memory when a cluster starts: two runs that start together would both count the same.
    """
    if workers.accelerator != "cpu" or not is_our_own():
        yield
        return
    folder = Path(tempfile.gettempdir()) / f"raygpt-memory-{os.getuid()}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(PermissionError):  # another user made a folder of this name
            held.enter_context(_written_down(folder, workers.memory * workers.cluster.max_workers))
        yield


@contextlib.contextmanager
def _written_down(folder: Path, wanted: int) -> Iterator[None]:
    """Inside the block a file says what is wanted, with a lock that ends with this process; refuses more than others on
    this machine leave."""
    folder.mkdir(exist_ok=True)
    mine = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"  # a sweep has several runs in one process
    with contextlib.ExitStack() as held:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _refuse_beside_others(folder, wanted)
            file = held.enter_context(mine.open("w"))
            held.callback(mine.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(str(wanted))
            file.flush()
        yield


def _refuse_beside_others(folder: Path, wanted: int) -> None:
    """Count what other processes have, and delete the files of those that have ended."""
    taken, processes = 0, set()
    for path in folder.glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError), path.open() as file:  # its run may end at this moment
            process = path.name.partition("-")[0]
            if storage.try_lock(file):
                path.unlink()
            elif process != str(os.getpid()):  # whose workers Ray counts itself
                taken += int(file.read())
                processes.add(process)
    usable = host_memory() * 9 // 10
    if processes and taken + wanted > usable:
        raise TransientError(
            f"cluster.workers: they need {size(wanted)}, and other runs on this machine (process "
            f"{', '.join(sorted(processes))}) have {size(taken)} of {size(usable)}; wait for them, or stop one"
        )


def _this_host() -> Host:
    return cores(), memory_for_work()
