"""Every import of a private part of Ray Train, with the reason for it; ray_private.py has those of Ray's core.

`tests/training/test_ray_private.py` looks each of them up in Ray, so a new version of Ray fails there by name.
"""

# The address at which our workers meet, as Ray's own backends choose it.
from ray.train._internal.utils import get_address_and_port

# Callbacks that start a process each, which is of no use without datasets, or on a cluster that ends with the run.
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback

# We create the controller ourselves (below): it needs the environment variables and the poll interval that Ray sets.
from ray.train.v2._internal.constants import (
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
    get_env_vars_to_propagate,
)

# To distinguish workers that could not start yet from workers that died.
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

# We poll workers more often than Ray does, and end a run from another thread.
from ray.train.v2._internal.execution.controller import TrainController

# Ray has no public way to set a failure policy: ours describes each fault, and gives up on one that repeats.
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure as is_preemption_failure

# Nor a scaling policy: ours saves a checkpoint before workers are added, and starts no more than fill the mesh.
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)

# Public, but its `_initialize_and_run_controller`, where controller and policies are made, is not.
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

__all__ = [
    "HEALTH_CHECK_INTERVAL_S_ENV_VAR",
    "WORKER_GROUP_START_TIMEOUT_S_ENV_VAR",
    "DataParallelTrainer",
    "DatasetsCallback",
    "DefaultFailurePolicy",
    "ElasticScalingPolicy",
    "FailureDecision",
    "FixedScalingPolicy",
    "NoopDecision",
    "PlacementGroupCleanerCallback",
    "PreemptionCallback",
    "ResizeDecision",
    "ScalingDecision",
    "TrainController",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "get_address_and_port",
    "get_env_vars_to_propagate",
    "is_preemption_failure",
]
