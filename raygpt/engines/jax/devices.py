"""The devices that JAX finds here, for callers that have no engine yet."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from raygpt.engines.jax.processes import DEVICE_COUNT_FLAG, REPLICA_THREADS, use_cores
from raygpt.engines.precision import choose_precision
from raygpt.host import cores

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32, "fp64": jnp.float64}


def dtype_of(precision: str) -> Any:
    """The dtype of a precision. JAX computes fp64 in fp32 unless it is switched on, as it is here."""
    if precision == "fp64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        jax.config.update("jax_enable_x64", True)
    return DTYPES[precision]


def accurate(dtype: Any) -> Any:
    """The dtype of parameters, norms and losses: fp32, or the arithmetic's if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def name_of(dtype: Any) -> str:
    """A dtype as recipes call it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def use_all_cores() -> None:
    """Make each core of a CPU a device, as in training, unless XLA_FLAGS says how many there are. Call it before JAX
    looks for devices."""
    if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        use_cores(cores(), REPLICA_THREADS)


def names() -> list[str]:
    """The name of each device; raises RuntimeError if a plugin's driver is missing."""
    return [device.device_kind for device in jax.devices()]


def is_accelerated() -> bool:
    """Whether there is more than a CPU."""
    return jax.default_backend() != "cpu"


def one() -> list[Any]:
    """One device, for benchmarks; for a CPU all cores, as in training."""
    devices = jax.local_devices()
    return devices[:1] if is_accelerated() else devices


def limit_memory(share: float) -> None:
    """Use no more than this share of the GPU's memory: others use it too. Before the GPU is first used."""
    if share < 1:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(share)


def free_bytes(share: float = 1.0) -> int | None:
    """Memory of the first device that this process may still take; None if unknown, as on a CPU. JAX knows its share
    since `limit_memory`."""
    known = jax.local_devices()[0].memory_stats() or {}
    return int(known["bytes_limit"] - known["bytes_in_use"]) if "bytes_limit" in known else None


def peak_bytes() -> int:
    """The most memory in use on the first device so far; 0 if unknown, as on a CPU."""
    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def precision_on(device: Any, wanted: str) -> str:
    """The precision of the arithmetic on a device: bf16, fp16, fp32 or fp64."""
    return choose_precision(wanted, device.platform, float(getattr(device, "compute_capability", "8.0")))
