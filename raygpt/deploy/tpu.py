"""TPU slices: chips, hosts, and the names that GKE's nodes have for them."""

import re
from dataclasses import dataclass
from math import prod

from raygpt.errors import RaygptError

# Ray's name of a TPU -> GKE's label cloud.google.com/gke-tpu-accelerator, for several hosts.
GKE_NAMES = {
    "TPU-V4": "tpu-v4-podslice",
    "TPU-V5P": "tpu-v5p-slice",
    "TPU-V5LITEPOD": "tpu-v5-lite-podslice",
    "TPU-V6E": "tpu-v6e-slice",
    "TPU-V7X": "tpu7x",
}
SMALL_HOSTS = {"TPU-V5LITEPOD", "TPU-V6E"}  # have hosts of 1, 4 or 8 chips for slices of one host; the others have 4
ONE_HOST = {"1x1": 1, "2x2": 4, "2x4": 8}
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # all slices of v5e and v6e
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # of v4, v5p and later; the sides of larger ones are multiples of 4


@dataclass(frozen=True)
class Slice:
    """One TPU slice."""

    accelerator_type: str
    topology: str

    @property
    def chips(self) -> int:
        return prod(int(size) for size in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        return ONE_HOST.get(self.topology, 4) if self.accelerator_type in SMALL_HOSTS else 4

    @property
    def hosts(self) -> int:
        return max(self.chips // self.chips_per_host, 1)

    @property
    def gke_name(self) -> str:
        return GKE_NAMES[self.accelerator_type]


def slice_of(accelerator_type: str | None, topology: str | None) -> Slice:
    """The slice that a recipe names; refuses what GKE does not have."""
    known = {name.upper(): name for name in GKE_NAMES}
    name = known.get(str(accelerator_type).upper())
    if name is None:
        raise RaygptError(
            f"cluster.accelerator_type: {accelerator_type} is no TPU of GKE; write one of {', '.join(GKE_NAMES)}"
        )
    dimensions = 2 if name in SMALL_HOSTS else 3
    example = "4x4" if dimensions == 2 else "2x2x4"
    if not re.fullmatch("x".join([r"[1-9]\d*"] * dimensions), str(topology)):
        raise RaygptError(f"cluster.topology: {topology} is no slice of {name}; write e.g. cluster.topology: {example}")
    if not _exists(str(topology), dimensions):
        raise RaygptError(f"cluster.topology: there is no slice {topology} of {name}; write {topologies_of(name)}")
    return Slice(name, str(topology))


def topologies_of(accelerator_type: str) -> str:
    """All slices of a TPU, in words."""
    if accelerator_type in SMALL_HOSTS:
        return ", ".join(FLAT)
    return f"{', '.join(SMALL_CUBES)} or sides that are multiples of 4, the longest last"


def _exists(topology: str, dimensions: int) -> bool:
    if dimensions == 2 or topology in SMALL_CUBES:
        return topology in (FLAT if dimensions == 2 else SMALL_CUBES)
    sides = [int(side) for side in topology.split("x")]
    return sides == sorted(sides) and all(side % 4 == 0 for side in sides)
