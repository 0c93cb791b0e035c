"""Model FLOPs utilisation (MFU): the achieved fraction of the hardware's peak."""

from raygpt.planning.devices import device_of


def peak_flops(device: str) -> float | None:
    """The bf16 peak of the device that is called so, or None if it is not in the table (a CPU has no useful peak)."""
    found = device_of(device)
    return found.peak if found else None


def mfu(tokens_per_s: float, flops_per_token: int, device: str, devices: int) -> float | None:
    """FLOPs per second that the model needs, divided by the devices' peak."""
    peak = peak_flops(device)
    return None if peak is None else tokens_per_s * flops_per_token / (peak * devices)
