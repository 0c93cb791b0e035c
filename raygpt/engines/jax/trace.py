"""A trace of what JAX does, for Perfetto and for TensorBoard's profile plugin."""

from pathlib import Path

import jax


def start(folder: Path) -> None:
    """Begin to write down what the devices and the host do."""
    jax.profiler.start_trace(str(folder), create_perfetto_trace=True)


def stop(folder: Path) -> Path:
    """End it; the file that Perfetto opens comes back, beside it lies what TensorBoard reads."""
    jax.profiler.stop_trace()
    return next(folder.rglob("perfetto_trace.json.gz"))
