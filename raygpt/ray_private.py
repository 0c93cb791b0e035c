"""Every import of a private part of Ray's core, with the reason for it; training/ray/private.py has those of Ray Train.

Two modules because Ray Train takes a second to import, and `raygpt prepare` does not use it.
`tests/training/test_ray_private.py` looks each of them up in Ray, so a new version of Ray fails there by name.
"""

# services: `ConsolePopen` starts the processes of a local cluster; see cluster.py for why it is replaced.
# worker: the process's Ray node, if it started one, which tells whether a cluster is ours alone; and the function that
# prints a cluster's messages about dead processes, which would appear between our own lines.
from ray._private import services, worker

# A driver that connects by address does not present ~/.ray/auth_token by itself.
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

# A job's own id: Ray's public context has only that of the driver.
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

# Which workers have no process yet: Ray's public list of actors needs the dashboard, which a local cluster has not.
from ray._private.state import actors

# Whether an autoscaler can add nodes: autoscaler v2 has a flag, v1 writes a status.
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get as internal_kv_get

__all__ = [
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "actors",
    "internal_kv_get",
    "is_autoscaler_v2",
    "maybe_enable_token_auth_if_token_available",
    "services",
    "worker",
]
