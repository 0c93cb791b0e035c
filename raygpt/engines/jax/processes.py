"""Connects this process with the others that compute one JAX program."""

import contextlib
import fcntl
import functools
import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from raygpt.config import Recipe
from raygpt.storage import cache_folder

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Of XLA's pool on CPUs. A device that waits for another in an all-reduce holds a thread; with one for each core, two
# all-reduces at once held them all, and the step never ended.
THREADS_PER_DEVICE = 16
REPLICA_THREADS = 2  # for replicas of the model, which run at most two at once; with more, products wait for threads
MUON_EXTRA_THREADS = 3  # with Muon, which exchanges matrices of each of up to three shapes at once
GPU_MEMORY = 0.92  # of a GPU's memory, what XLA takes for all processes that share it
IS_SET_BY_USER = "NPROC" in os.environ


def join(address: str, workers: int, rank: int, gpus: Sequence[int | str], cores: int, gpu_share: float = 1.0) -> None:
    """Join the other processes, with so much of each GPU's memory. Everything is set before JAX looks for devices."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")  # without CUDA in JAX this fails instead of running slowly
        # JAX's default is three quarters
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{GPU_MEMORY * gpu_share:.3g}")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
    use_cores(cores)
    enable_compilation_cache()
    if workers > 1:
        _reach_directly(address)
        import jax

        jax.distributed.initialize(address, workers, rank)


def _reach_directly(address: str) -> None:
    """Exclude the other processes from an HTTP proxy: gRPC, by which they meet, would ask it for them, and wait."""
    excluded = next((os.environ[name] for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY") if name in os.environ), "")
    host = address.rpartition(":")[0].strip("[]")
    os.environ.update(no_grpc_proxy=",".join(filter(None, [excluded, host])))


def use_cores(cores: int, threads: int = THREADS_PER_DEVICE) -> None:
    """Each core of a CPU is a device: XLA computes the small matrix products of small models on one core."""
    _have_threads(threads * cores)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}={cores}".strip()  # the last flag counts
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # queued steps would occupy threads, too


def _have_threads(count: int) -> None:
    """Set the size of XLA's thread pool, which is created when JAX first looks for devices."""
    if not IS_SET_BY_USER:
        os.environ["NPROC"] = str(count)


def set_up(recipe: Recipe | None = None) -> None:
    """Set up JAX for the engine of a recipe, or for a trained model: compiled programs are cached.

    `training.deterministic` excludes, on GPUs, sums without a fixed order and kernels chosen by timing. Replicas of the
    model on CPUs never run more than `REPLICA_THREADS` collectives at once, with Muon `MUON_EXTRA_THREADS` more
    (test_step_counts.py).
    """
    devices = re.findall(rf"{DEVICE_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if recipe and recipe.cluster.mesh.is_data_alone and devices and os.environ.get("JAX_PLATFORMS") == "cpu":
        _have_threads(
            (REPLICA_THREADS + (MUON_EXTRA_THREADS if recipe.optimizer.kind == "muon" else 0)) * int(devices[-1])
        )
    if recipe and recipe.training.deterministic:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_exclude_nondeterministic_ops=true"
    enable_compilation_cache()


def enable_compilation_cache() -> None:
    """Cache compiled programs on this machine, for the next run; nothing is cached if the home cannot be written."""
    import jax

    try:
        _cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(_cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # small models compile in less than 1 s
    _cache_from_every_process()


def _cache_folder() -> Path:
    return cache_folder() / "compiled"


@functools.cache  # once per process: join and set_up both call it; on TPUs, where Ray connects processes, only set_up
def _cache_from_every_process() -> None:
    """JAX caches only what process 0 compiles. The other nodes, and on CPUs the other processes, whose programs differ
    slightly, would compile everything at each start, also after a fault, while the first process waits for them."""
    from jax._src import distributed

    compiler: Any = import_module("jax._src.compiler")
    write, state = getattr(compiler, "_cache_write", None), distributed.global_state
    if write is None:  # another version of JAX: only time is lost
        return

    def write_as_first(*arguments: Any) -> None:
        # A full disk must not end the run
        with contextlib.suppress(OSError), (_cache_folder() / "lock").open("w") as lock:
            # Several processes may have compiled the same program, and JAX writes in place
            fcntl.flock(lock, fcntl.LOCK_EX)
            rank, state.process_id = state.process_id, 0
            try:
                write(*arguments)
            finally:
                state.process_id = rank

    compiler._cache_write = write_as_first


def leave() -> None:
    """Disconnect from the other processes."""
    import jax

    jax.distributed.shutdown()
