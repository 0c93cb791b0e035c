"""How a batch is split so that it fits the devices: by the plan on paper, and by every worker before it begins."""

from collections.abc import Mapping
from dataclasses import dataclass

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.precision import NUMBER_BYTES, choose_precision
from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.planning.memory import Memory, step_memory

PROCESS_BYTES = 3 * 2**28  # of a worker beside its model: libraries, compiled programs; measured 0.45 to 0.75 GiB
# Of the memory, how much a batch is cut to fill; the rest is for fragmentation, and for what the estimate misses.
FILLED = {"cpu": 0.8, "gpu": 0.93, "tpu": 0.9}


@dataclass(frozen=True)
class Split:
    """How a batch is split: into micro-batches, each distributed over the devices."""

    rows: int
    micro_rows: int  # of a micro-batch, over all devices
    accumulation: int
    devices: int
    memory: Memory  # estimated, per device

    @property
    def memory_bytes(self) -> int:
        return self.memory.total

    def __str__(self) -> str:
        devices = "1 device" if self.devices == 1 else f"{self.devices:,} devices"
        padding = self.micro_rows * self.accumulation - self.rows
        padded = f", {padding:,} of them padding" if padding else ""
        return f"{self.rows:,} rows = {self.micro_rows:,} × {self.accumulation:,} accumulated{padded}, {devices}"


def split_batch(recipe: Recipe, vocab: int, devices: Devices) -> Split:
    """Split into as few micro-batches as fit into the devices' memory, or into as many as the recipe says. Refuses a
    model that does not fit even with one row at a time."""
    mesh = recipe.mesh_over(devices.count)
    least = step_memory(recipe, vocab, devices, mesh, 1, 1)
    if least.total > devices.memory_bytes:
        raise RaygptError(_does_not_fit(recipe, vocab, devices, least))
    across = mesh["data"] * mesh["fsdp"]  # groups of devices, each with different rows
    rows_each = -(-recipe.rows // across)
    fixed = recipe.training.accumulation
    accumulation = fixed or _fewest(recipe, vocab, devices, mesh, rows_each)
    micro_each = -(-rows_each // accumulation)
    needed = step_memory(recipe, vocab, devices, mesh, micro_each, accumulation)
    return Split(recipe.rows, micro_each * across, accumulation, devices.count, needed)


def _fewest(recipe: Recipe, vocab: int, devices: Devices, mesh: Mapping[str, int], rows_each: int) -> int:
    """The fewest micro-batches that fit, each of as many rows; one row at a time if none do."""
    room = devices.memory_bytes * FILLED[devices.platform]

    def fits(accumulation: int) -> bool:
        rows = -(-rows_each // accumulation)
        return step_memory(recipe, vocab, devices, mesh, rows, accumulation).total <= room

    if fits(1):
        return 1
    # From two on, memory falls as they rise: a second needs room for the sum of gradients, more of them do not.
    low, high = min(2, rows_each), rows_each
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _does_not_fit(recipe: Recipe, vocab: int, devices: Devices, needed: Memory) -> str:
    each = "the device has" if devices.count == 1 else f"each of the {devices.count} devices has"
    sharded = {"data": 1, "fsdp": devices.count, "tensor": 1, "context": 1}
    fits_sharded = step_memory(recipe, vocab, devices, sharded, 1, 1).total <= devices.memory_bytes
    remedy = "cluster.mesh.fsdp: -1 to shard it over the devices" if fits_sharded else "smaller model.layers or width"
    state = needed.parameters + needed.optimizer + needed.gradients
    parts = f"{size(state)} for parameters, gradients and optimizer"
    return (
        f"model: it needs {size(needed.total)} on a device ({parts}), but {each} {size(devices.memory_bytes)}; "
        f"write {remedy}"
    )


def cpu_devices(recipe: Recipe, workers: int, beside: int, cores: int, memory: int) -> Devices:
    """The devices that so many CPU workers will find, `beside` of them on each machine with these cores and so much
    memory for workers: with JAX every core is a device, with PyTorch every worker."""
    each = max(1, cores // beside)
    number_bytes = NUMBER_BYTES[choose_precision(recipe.model.precision, "cpu")]
    if recipe.engine == "torch":
        return Devices(workers, memory * each // max(cores, each), number_bytes, keeps_scores=False)
    return Devices(workers * each, memory // max(cores, each), number_bytes, keeps_scores=True)


def worker_bytes(recipe: Recipe, vocab: int, devices: Devices, workers: int) -> int:
    """Memory that a worker needs on a CPU, its process included; refuses a model that does not fit."""
    return split_batch(recipe, vocab, devices).memory_bytes * devices.count // workers + PROCESS_BYTES
