"""This process as one of several that compute a JAX program together."""

import os
from collections.abc import Sequence

from raygpt.storage import cache_folder

COUNT = "--xla_force_host_platform_device_count"
THREADS = 16  # of XLA's pool for each device of a CPU. A device that waits for another in an all-reduce holds a thread;
#               with one for each core, two all-reduces at once held them all, and the step never ended


def join(address: str, workers: int, rank: int, gpus: Sequence[int | str], cores: int) -> None:
    """Make this worker one of the processes. Everything is set before JAX looks for devices."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")  # without CUDA in JAX this fails instead of crawling
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # JAX takes three quarters otherwise
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
    use_cores(cores)
    if workers > 1:
        import jax

        jax.distributed.initialize(address, workers, rank)


def use_cores(cores: int) -> None:
    """Each core of a CPU is a device: XLA computes the small matrix products of small models on one core."""
    os.environ.setdefault("NPROC", str(THREADS * cores))
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {COUNT}={cores}".strip()  # the last counts
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # steps that wait in line would hold threads, too


def set_up(deterministic: bool = False) -> None:
    """What is compiled is kept on this machine, for the next run.

    `deterministic` leaves out, on GPUs, sums whose order is left to chance, and kernels chosen by their speed just now.
    """
    if deterministic:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_exclude_nondeterministic_ops=true"
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # small models compile in less than 1 s


def leave() -> None:
    """Part from the other processes."""
    import jax

    jax.distributed.shutdown()
