"""The Ray cluster that work runs on: the one that RAY_ADDRESS names, or a local one started for this process."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from raygpt.errors import RaygptError


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def connected(cpus: int | None = None) -> Iterator[None]:
    """Inside the block Ray is there; a cluster that was started for it, with `cpus` to share out, ends with it."""
    import ray

    _quieten()
    if ray.is_initialized():
        yield
        return
    _connect(os.environ.get("RAY_ADDRESS"), cpus or cores())
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, cpus: int) -> None:
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        with warnings.catch_warnings(action="ignore"):
            if address:
                ray.init(address=address, **quiet)
            else:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except ConnectionError as error:
        raise RaygptError(
            f"no Ray cluster answers at RAY_ADDRESS={address}; start one with `ray start --head`, or unset RAY_ADDRESS "
            "to use this machine alone"
        ) from error


def _quieten() -> None:
    """Ray's own lines go to its log files: a person wants the progress, the loss and what to do next."""
    import ray.data  # noqa: F401  # sets up its logger

    warnings.filterwarnings("ignore", module=r"ray\.")
    logging.getLogger("ray").setLevel(logging.ERROR)
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)
