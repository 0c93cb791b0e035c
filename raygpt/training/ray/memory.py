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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ray

from raygpt.config import Recipe
from raygpt.errors import RaygptError, TransientError
from raygpt.formatting import size
from raygpt.host import cores, host_memory, memory_for_work
from raygpt.planning.devices import ray_device
from raygpt.planning.micro_batch_size import cpu_devices, split_batch, worker_bytes
from raygpt.planning.target import Target, devices_on
from raygpt.training.ray.scaling import Workers, alive_nodes, is_our_own, on_node

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
    count = int(workers.cluster.max_workers * workers.resources.get(workers.accelerator.upper(), 1))
    refusal = None
    for device in devices:
        if device is None:
            return
        try:
            recipe.cluster.mesh.over(count)
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
    mine = folder / str(os.getpid())
    with contextlib.suppress(PermissionError):  # of a folder for temporary files that is read-only
        _reserve(mine, workers.memory * workers.cluster.max_workers)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()


def _reserve(mine: Path, wanted: int) -> None:
    """Write down what this process wants, unless others on this machine leave less."""
    mine.parent.mkdir(exist_ok=True)
    with (mine.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = {file.name: int(file.read_text()) for file in mine.parent.glob("[0-9]*") if _is_alive(file)}
        taken, usable = sum(others.values()), host_memory() * 9 // 10
        if others and taken + wanted > usable:
            raise TransientError(
                f"cluster.workers: they need {size(wanted)}, and other runs on this machine (process "
                f"{', '.join(sorted(others))}) have {size(taken)} of {size(usable)}; wait for them, or stop one"
            )
        mine.write_text(str(wanted))


def _is_alive(file: Path) -> bool:
    """Whether the process of a file is still there; removes the file if not."""
    try:
        os.kill(int(file.name), 0)
    except ProcessLookupError:
        file.unlink()
        return False
    except PermissionError:
        pass
    return int(file.name) != os.getpid()


def _this_host() -> Host:
    return cores(), memory_for_work()
