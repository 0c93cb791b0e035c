"""The Ray cluster that work runs on: the one that RAY_ADDRESS names, or a local one started for this process."""

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from raygpt.errors import RaygptError, TransientError
from raygpt.host import cores
from raygpt.resources import can_grow

ANSWER_S = 10.0  # within which a cluster accepts a connection


@contextlib.contextmanager
def connected(cpus: int | None = None) -> Iterator[None]:
    """Inside the block Ray is connected; a cluster that was started here, with `cpus` CPUs, ends with the block."""
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


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's record of each node that is connected."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def has_autoscaler() -> bool:
    """Whether the cluster can grow by itself.

    Ray's monitor reports on every cluster. Autoscaler v2, which Kubernetes uses, only runs where it can scale.
    """
    from raygpt.ray_private import internal_kv_get, is_autoscaler_v2

    if is_autoscaler_v2(fetch_from_server=True):
        return True
    status = json.loads(internal_kv_get("__autoscaling_status") or "{}")
    return can_grow((status.get("autoscaler_report") or {}).get("node_type_mapping") or {})


def _connect(address: str | None, cpus: int) -> None:
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        with warnings.catch_warnings(action="ignore"):
            if address:
                _ensure_answer(address)
                _present_token()
                os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # fills the dashboard's page for Train
                ray.init(address=address, runtime_env=_our_code(), **quiet)
            else:
                _have_token()
                with _own_process_groups():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        if "AuthenticationError" in f"{error!r} {error.__cause__!r}":
            raise RaygptError(
                f"the Ray cluster at RAY_ADDRESS={address} wants its token; copy ~/.ray/auth_token from its head node "
                "to the same place here"
            ) from error
        raise TransientError(
            f"no Ray cluster answers at RAY_ADDRESS={address}; start one with `ray start --head`, or unset RAY_ADDRESS "
            "to use this machine alone"
        ) from error
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        if "Version mismatch" in text:
            raise RaygptError(f"{text}; install the versions of the cluster at RAY_ADDRESS={address}") from error
        raise TransientError(f"Ray cannot {f'connect to {address}' if address else 'start here'}: {text}") from error


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Ray's processes that are started inside the block get no signal that is meant for this process and its group: a
    closed terminal and `timeout` would end them before a run could be saved. They still end with this process."""
    from raygpt.ray_private import services

    if sys.platform != "linux":  # elsewhere Ray ends them by their group
        yield
        return
    starts: Any = services  # ConsolePopen is a class, which mypy does not let one replace
    popen = starts.ConsolePopen
    starts.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        starts.ConsolePopen = popen


def _have_token() -> None:
    """Set a token for a local cluster if the home directory, where Ray would write one, is read-only."""
    home = Path.home()
    known = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    folder = home / ".ray"
    if (
        not known
        and not os.access(folder if folder.exists() else home, os.W_OK)
        and not (folder / "auth_token").exists()
    ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _ensure_answer(address: str) -> None:
    """Raise ConnectionError if nothing listens at host:port: Ray would try for two minutes."""
    _, _, place = address.rpartition("://")
    host, colon, port = place.partition("/")[0].rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise ConnectionError(address) from error


def _present_token() -> None:
    """Load the cluster's auth token: a driver that connects by address does not send it by itself."""
    from raygpt.ray_private import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _our_code() -> dict[str, Any]:
    """The runtime environment that copies this raygpt to the nodes; a submitted job already has its own."""
    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return {} if is_job else {"py_modules": [str(Path(__file__).parent)]}


def _quieten() -> None:
    """Send Ray's messages to its log files, so that the console shows only raygpt's."""
    import ray.data  # noqa: F401  # installs its log handlers, which are silenced below

    from raygpt.ray_private import worker

    warnings.filterwarnings("ignore", module=r"ray\.")
    logging.getLogger("ray").setLevel(logging.ERROR)
    worker.print_to_stdstream = _to_log  # messages about dead processes: recovery.py reports those
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _to_log(data: Any, ignore_prefix: bool) -> None:
    logging.getLogger("ray").info("%s", data.get("lines"))
