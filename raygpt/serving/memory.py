"""How many texts a replica generates at once: as many as the memory of its device has room for, up to a number."""

import math

from raygpt.engines.precision import NUMBER_BYTES
from raygpt.errors import RaygptError
from raygpt.models import Description

MOST = {"cpu": 8, "gpu": 32}  # slots by default: a step reads those that are idle too
SHARE = 0.5  # of the free memory; the rest is for activations, and for the next checkpoint with --follow


def slot_bytes(description: Description, precision: str) -> int:
    """Of one slot: its keys and values, and some rows of numbers for the whole vocabulary."""
    cache = 2 * math.prod(description.cache_shape(1)) * NUMBER_BYTES[precision]
    return cache + 8 * 4 * description.sizes["vocabulary"]


def count_slots(wanted: int | None, each: int, free: int, kind: str) -> int:
    """The number of slots of `each` bytes on a device of a kind (cpu, gpu) with so many bytes free; `wanted`, if it
    fits."""
    room = int(SHARE * free) // each
    if wanted is None and room > 0:
        return min(MOST[kind], room)
    if wanted is None or wanted > room:
        remedy = f"; write --slots {room} or less" if room > 0 else "; free some, or serve it on another device"
        raise RaygptError(
            f"{wanted or 1} slots need {(wanted or 1) * each / 1e9:.2f} GB for their keys and values, "
            f"and {max(0, SHARE * free) / 1e9:.2f} GB of the {kind.upper()}'s free memory are for them{remedy}"
        )
    return wanted
