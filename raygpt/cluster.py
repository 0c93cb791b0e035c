"""The Ray cluster that work runs on: the one that RAY_ADDRESS names, or a local one started for this process."""

import contextlib
import json
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


def is_our_own() -> bool:
    """Whether this process started the Ray cluster that it is on, and no other node has joined: it ends with us."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head()) and len(ray.nodes()) == 1  # type: ignore[no-untyped-call]


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
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _our_code() -> dict[str, Any]:
    """The runtime environment that brings this very raygpt to the nodes; a submitted job has brought its own."""
    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    return {} if is_job else {"py_modules": [str(Path(__file__).parent)]}


def has_autoscaler() -> bool:
    """Whether the cluster can grow by itself.

    Ray's monitor reports on every cluster. Where it only watches, it calls a node's type by the node's id. The second
    autoscaler, which Kubernetes uses, only runs where there is something to scale.
    """
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):
        return True
    status = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
    kinds: dict[str, str] = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(kind != f"node_{node}" for node, kind in kinds.items())


def _quieten() -> None:
    """Ray's own lines go to its log files: a person wants the progress, the loss and what to do next."""
    import ray._private.worker
    import ray.data  # sets up its logger

    warnings.filterwarnings("ignore", module=r"ray\.")
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.worker.print_to_stdstream = _to_log  # what the cluster says of a process that died: see recovery.py
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _to_log(data: Any, ignore_prefix: bool) -> None:
    logging.getLogger("ray").info("%s", data.get("lines"))
