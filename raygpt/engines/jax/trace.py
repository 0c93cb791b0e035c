"""A trace of what JAX does, for Perfetto and for TensorBoard's profile plugin."""

from pathlib import Path

import jax


def start(folder: Path) -> None:
    """Start to record what the devices and the host do."""
    jax.profiler.start_trace(str(folder), create_perfetto_trace=True)


def stop(folder: Path) -> Path:
    """Stop recording. Returns the file that Perfetto opens; what TensorBoard reads is beside it."""
    jax.profiler.stop_trace()
    return next(folder.rglob("perfetto_trace.json.gz"))
