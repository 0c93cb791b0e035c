"""What raygpt uses of Ray's private parts is where it was, with the arguments that it had: by Ray alone."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import raygpt

CONTROLLER = "ray.train.v2._internal.execution.controller:TrainController"
FAILURES = "ray.train.v2._internal.execution.failure_handling"
POLICIES = "ray.train.v2._internal.execution.scaling_policy"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer"

TRACED = "_ray_trace_ctx"  # that Ray adds to a class's methods when it makes an actor of it, as earlier tests do
# Where it is, and its parameters; None for what is not called by us
USED = {
    "ray._private.services:ConsolePopen": None,
    "ray._private.runtime_env.constants:RAY_JOB_CONFIG_JSON_ENV_VAR": None,
    "ray._private.state:actors": "actor_id job_id actor_state_name",
    f"{CONTROLLER}": "train_fn_ref train_run_context scaling_policy failure_policy callbacks validation_config",
    f"{CONTROLLER}.run": "self",
    f"{CONTROLLER}.abort": "self",
    f"{CONTROLLER}.get_result": "self",
    f"{TRAINER}._initialize_and_run_controller": "self controller_init_kwargs",
    f"{TRAINER}": (
        "train_loop_per_worker train_loop_config backend_config scaling_config run_config datasets dataset_config "
        "resume_from_checkpoint metadata validation_config"
    ),
    f"{FAILURES}:DefaultFailurePolicy": "failure_config",
    f"{FAILURES}:DefaultFailurePolicy.make_decision": "self training_failed_error",
    f"{FAILURES}:FailureDecision": None,
    f"{FAILURES}:FailureDecision.RETRY": None,
    f"{FAILURES}:FailureDecision.RAISE": None,
    f"{FAILURES}.default:_is_preemption_failure": "training_failed_error",
    f"{POLICIES}:FixedScalingPolicy": "scaling_config",
    f"{POLICIES}:FixedScalingPolicy._send_resource_request": "self",
    f"{POLICIES}:FixedScalingPolicy._maybe_send_resource_request": "self",
    f"{POLICIES}:FixedScalingPolicy._cancel_resource_request": "self",
    f"{POLICIES}:ElasticScalingPolicy": "scaling_config",
    f"{POLICIES}:ElasticScalingPolicy.make_decision_for_running_worker_group": (
        "self worker_group_state worker_group_status"
    ),
    f"{POLICIES}:ElasticScalingPolicy.make_decision_for_non_running_worker_group": "self",
    f"{POLICIES}:ElasticScalingPolicy._count_possible_workers": "self reserved_resources",
    f"{POLICIES}:NoopDecision": "",
    f"{POLICIES}:ResizeDecision": "num_workers resources_per_worker",
    f"{POLICIES}:ScalingDecision": None,
    "ray.train.v2._internal.callbacks.datasets:DatasetsCallback": None,
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback": None,
    "ray.train.v2._internal.callbacks.preemption_callback:PreemptionCallback": None,
    "ray.train.v2._internal.constants:HEALTH_CHECK_INTERVAL_S_ENV_VAR": None,
    "ray.train.v2._internal.constants:WORKER_GROUP_START_TIMEOUT_S_ENV_VAR": None,
    "ray.train.v2._internal.constants:get_env_vars_to_propagate": "",
    "ray.train.v2._internal.exceptions:WorkerGroupStartupTimeoutError": None,
    "ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError": None,
    "ray.train._internal.utils:get_address_and_port": "",
    "ray.autoscaler.v2.utils:is_autoscaler_v2": "fetch_from_server gcs_client",
    "ray.experimental.internal_kv:_internal_kv_get": "key namespace",
    "ray._private.authentication.authentication_token_setup:maybe_enable_token_auth_if_token_available": (
        "warn_if_disabled"
    ),
    "ray._private.worker:print_to_stdstream": "data ignore_prefix",
    "ray._private.worker:_global_node": None,
    "ray._private.node:Node.is_head": "self",
    "ray.dashboard.modules.dashboard_sdk:SubmissionClient._do_request": "self method endpoint data json_data kwargs",
}


@pytest.mark.parametrize("name", USED)
def test_it_is_there_with_these_parameters(name):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if USED[name] is not None:
        parameters = [name for name in inspect.signature(found).parameters if name != TRACED]
        assert parameters == USED[name].split()


@pytest.mark.parametrize("name", ["_worker_group_callbacks_to_propagate", "_health_check_interval_s"])
def test_a_controller_has_this_attribute(name):
    controller = importlib.import_module(CONTROLLER.partition(":")[0]).TrainController
    assert f"self.{name} = " in inspect.getsource(controller.__init__)


ROOT = Path(raygpt.__file__).parent
# Of Ray's core and of Ray Train; not imported: they cannot be where something is gone
PRIVATE = (ROOT / "ray_private.py", ROOT / "training" / "ray" / "private.py")


def imports(path):
    """Every module that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def is_private(name):
    return name.startswith("ray.") and ("._" in name or ".internal_kv" in name or name.startswith("ray.autoscaler"))


def test_each_import_is_among_those_looked_up():
    known = {used.replace(":", ".") for used in USED} | {used.partition(":")[0] for used in USED}
    assert {name for path in PRIVATE for name in imports(path)} <= known


def test_rays_private_parts_are_imported_in_two_modules():
    assert {path for path in ROOT.rglob("*.py") if any(map(is_private, imports(path)))} == {*PRIVATE}


def test_connecting_to_a_cluster_does_not_import_ray_train():
    code = "import sys, raygpt.cluster, raygpt.ray_private\nsys.exit('ray.train' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_training_imports_ray_in_its_folder_for_ray_alone():
    modules = sorted((ROOT / "training").glob("*.py"))
    assert not [path.name for path in modules if any(is_of_ray(name) for name in imports(path))]
    names = [f"raygpt.training.{path.stem}" for path in modules if path.stem != "__init__"]
    code = f"import sys, {', '.join(names)}\nsys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def is_of_ray(name):
    return name.split(".")[0] == "ray" or name.startswith("raygpt.training.ray")
