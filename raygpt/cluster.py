"""The Ray cluster that work runs on: the one that RAY_ADDRESS names, or a local one started for this process."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raygpt.errors import RaygptError
from raygpt.host import cores


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
                _present_token()
                os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # fills the dashboard's page for Train
                ray.init(address=address, runtime_env=_our_code(), **quiet)
            else:
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        if "AuthenticationError" in f"{error!r} {error.__cause__!r}":
            raise RaygptError(
                f"the Ray cluster at RAY_ADDRESS={address} wants its token; copy ~/.ray/auth_token from its head node "
                "to the same place here"
            ) from error
        raise RaygptError(
            f"no Ray cluster answers at RAY_ADDRESS={address}; start one with `ray start --head`, or unset RAY_ADDRESS "
            "to use this machine alone"
        ) from error


def _present_token() -> None:
    """A cluster that was started with a token wants to see it; a driver that is given an address does not show it."""
    from raygpt.training.ray.private import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _our_code() -> dict[str, Any]:
    """The runtime environment that brings this very raygpt to the nodes; a submitted job has brought its own."""
    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return {} if is_job else {"py_modules": [str(Path(__file__).parent)]}


def _quieten() -> None:
    """Ray's own lines go to its log files: a person wants the progress, the loss and what to do next."""

    from raygpt.training.ray import private

    warnings.filterwarnings("ignore", module=r"ray\.")
    logging.getLogger("ray").setLevel(logging.ERROR)
    private.worker.print_to_stdstream = _to_log  # what the cluster says of a process that died: see recovery.py
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _to_log(data: Any, ignore_prefix: bool) -> None:
    logging.getLogger("ray").info("%s", data.get("lines"))
