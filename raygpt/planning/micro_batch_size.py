"""How a batch is split so that it fits the devices: by the plan on paper, and by every worker before it begins."""

from collections.abc import Mapping
from dataclasses import dataclass

from raygpt.config import Recipe
from raygpt.engines.base import Devices
from raygpt.engines.precision import NUMBER_BYTES, choose_precision
from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.planning.memory import Memory, step_memory
from raygpt.resources import PROCESS_BYTES

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
    model that does not fit even with one row at a time, and micro-batches of the recipe's that do not."""
    mesh = recipe.mesh_over(devices.count)
    least = step_memory(recipe, vocab, devices, mesh, 1, 1)
    if least.total > devices.memory_bytes:
        raise RaygptError(_does_not_fit(recipe, vocab, devices, least))
    fixed = recipe.training.accumulation
    split = split_into(fixed or _fewest(recipe, vocab, devices, mesh), recipe, vocab, devices, mesh)
    if split.memory_bytes <= devices.memory_bytes:
        return split
    needs = f"{split.micro_rows:,} rows at a time need {size(split.memory_bytes)} on a device, but {_each_has(devices)}"
    if fixed is None:
        raise RaygptError(f"model: {needs}; write smaller model.layers or width")
    raise RaygptError(
        f"training.accumulation: with {fixed}, {needs}; write {_fewest(recipe, vocab, devices, mesh)}, or null to have "
        "it computed"
    )


def rows_of_group(recipe: Recipe, mesh: Mapping[str, int]) -> int:
    """Rows of a batch for each group of devices that has rows of its own."""
    return -(-recipe.rows // (mesh["data"] * mesh["fsdp"]))


def split_into(accumulation: int, recipe: Recipe, vocab: int, devices: Devices, mesh: Mapping[str, int]) -> Split:
    """So many micro-batches, whether they fit or not."""
    rows = -(-rows_of_group(recipe, mesh) // accumulation)
    memory = step_memory(recipe, vocab, devices, mesh, rows, accumulation)
    return Split(recipe.rows, rows * mesh["data"] * mesh["fsdp"], accumulation, devices.count, memory)


def _fewest(recipe: Recipe, vocab: int, devices: Devices, mesh: Mapping[str, int]) -> int:
    """The fewest micro-batches that fit, each of as many rows; one row at a time if none do."""
    room = devices.memory_bytes * FILLED[devices.platform]

    def fits(accumulation: int) -> bool:
        return split_into(accumulation, recipe, vocab, devices, mesh).memory_bytes <= room

    if fits(1):
        return 1
    # From two on, memory falls as they rise: a second needs room for the sum of gradients, more of them do not.
    rows_each = rows_of_group(recipe, mesh)
    low, high = min(2, rows_each), rows_each
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _does_not_fit(recipe: Recipe, vocab: int, devices: Devices, needed: Memory) -> str:
    state = needed.parameters + needed.optimizer + needed.gradients
    parts = f"{size(state)} for parameters, gradients and optimizer"
    return (
        f"model: it needs {size(needed.total)} on a device ({parts}), but {_each_has(devices)}; "
        f"write {_sharded(recipe, vocab, devices) or 'smaller model.layers or width'}"
    )


def _each_has(devices: Devices) -> str:
    each = "the device has" if devices.count == 1 else f"each of the {devices.count} devices has"
    return f"{each} {size(devices.memory_bytes)}"


def _sharded(recipe: Recipe, vocab: int, devices: Devices) -> str | None:
    """A mesh with which the model fits, as keys to write: the one with the largest `fsdp`; None if there is none."""
    for fsdp in range(devices.count, 1, -1):
        mesh = {"data": devices.count // fsdp, "fsdp": fsdp, "tensor": 1, "context": 1}
        is_whole = devices.count % fsdp == 0
        if is_whole and step_memory(recipe, vocab, devices, mesh, 1, 1).total <= devices.memory_bytes:
            if fsdp == devices.count:
                return "cluster.mesh.fsdp: -1 to shard it over the devices"
            return f"cluster.mesh.data: -1 and cluster.mesh.fsdp: {fsdp} to shard it"
    return None


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
