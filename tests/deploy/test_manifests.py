"""Manifests of `raygpt deploy`: valid by KubeRay's and Kubernetes' schemas and by the operator's rules."""

import copy
import json
import subprocess
import sys
import tomllib
from functools import reduce

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _node_type_from_group_spec
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ClusterResourceConstraint, ResourceRequestByCount
from ray.util.tpu import get_tpu_worker_resources
from schemas import check

from raygpt.deploy import files, rayjob, slurm
from raygpt.deploy.commented import Noted, notes, plain, to_yaml
from raygpt.deploy.deployment import CPUS, MEMORY_GIB, plan_deployment
from raygpt.deploy.image import CHECKOUT
from raygpt.deploy.local_files import local_files
from raygpt.deploy.names import seconds
from raygpt.deploy.options import Options, parse_selector
from raygpt.deploy.rules import problems
from raygpt.deploy.tpu import GKE_NAMES, slice_of
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe, shipped_recipes
from raygpt.training.ray.scaling import Workers

SLICE = {
    "cluster.accelerator": "tpu",
    "cluster.accelerator_type": "TPU-V6E",
    "cluster.topology": "4x4",
    "engine": "jax",
}
TARGETS = {
    "gpu": (Options("gke", gpus_per_node=2), {"cluster.workers": 4, "cluster.accelerator": "gpu"}),
    "spot and elastic": (
        Options("gke", spot=True, prepare_nodes=4, secrets=("s3", "hf"), service_account="trainer"),
        {"cluster.workers": "2..8", "cluster.accelerator": "gpu", "cluster.accelerator_type": "H100"},
    ),
    "one slice": (Options("gke", volume="shared", volume_size="1Ti"), {**SLICE, "cluster.workers": 4}),
    "several slices": (Options("gke", namespace="research"), {**SLICE, "cluster.workers": 12}),
}
# Recipes that a user might write, besides the shipped ones: by sizes, engines, meshes, sources, trackers and names.
WRITTEN = {
    "by depth": {"model.depth": 4},
    "llama": {"model.preset": "llama"},
    "qwen": {"model.preset": "qwen3"},
    "nanochat": {"model.preset": "nanochat"},
    "muon": {"optimizer.kind": "muon"},
    "fsdp": {"cluster.mesh": {"fsdp": -1}},
    "epochs": {"training.epochs": 2},
    "mixture": {"data.source": [{"source": "openwebtext", "weight": 2}, {"source": "hf:a/b", "weight": 1}]},
    "sequential": {"data.order": "sequential"},
    "trackers": {"track": {"tensorboard": True, "wandb": "project", "mlflow": "http://host:5000"}},
    "odd name": {"run.name": "3_Modern.1.5b-" + "x" * 60},
    "prompts": {"training.prompts": ["a: b\n- c", "#! {}"]},
}


def manifests(recipe, options, **changes):
    """What would be applied, as a parser reads it."""
    changes = {"run.storage": "s3://bucket/runs", "data.source": "stdlib", **changes}
    deployment = plan_deployment(load_recipe(recipe, changes), options)
    text = rayjob.text(deployment)
    read = list(yaml.safe_load_all(text))
    assert read == [plain(manifest) for manifest in rayjob.manifests(deployment)]
    return read


@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe_is_valid_on_every_target(shared_data, target):
    options, cluster = TARGETS[target]
    recipes = {name: (name, {}) for name in shipped_recipes()} | {
        name: ("tiny", more) for name, more in WRITTEN.items()
    }
    assert len(recipes) >= 20
    for name, (recipe, more) in recipes.items():
        for manifest in manifests(recipe, options, **{**cluster, **more}):
            assert check(manifest, shared_data / "kuberay") == [], name
            assert problems(manifest) == [], name


def test_the_recipe_in_the_manifest_is_the_run_that_was_asked_for(tmp_path):
    config, *_ = manifests("tiny", Options("gke"), **{"training.steps": 700, "cluster.workers": 3})
    (tmp_path / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
    read = load_recipe(tmp_path / "recipe.yaml")
    asked = load_recipe("tiny", {"training.steps": 700, "cluster.workers": 3})
    assert (read.training, read.model, read.run.name) == (asked.training, asked.model, "tiny")
    assert (read.cluster.accelerator, read.cluster.workers, read.run.storage) == ("gpu", 3, "s3://bucket/runs")


def test_a_mesh_may_divide_what_only_this_model_has():
    changes = {"model.preset": "gpt2", "cluster.workers": 6, "cluster.mesh": {"data": 1, "tensor": 6}}
    config, *_ = manifests("tiny", Options("gke"), **changes)
    assert "tensor: 6" in config["data"]["recipe.yaml"]


def test_a_group_has_the_pods_that_the_workers_need():
    *_, job = manifests("tiny", Options("gke", gpus_per_node=4), **{"cluster.workers": "2..8"})
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 2)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    *_, job = manifests("tiny", Options("gke"), **{**SLICE, "cluster.workers": 12})
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["numOfHosts"]) == (3, 4)


@pytest.mark.parametrize(
    ("options", "each", "expected"),
    [
        (Options("gke"), {}, "32Gi"),
        (Options("gke"), {"memory": 8 * 2**30}, "32Gi"),
        (Options("gke"), {"memory": 100e9}, "98Gi"),  # 93.1 GiB for the worker, and 4 GiB for Ray Data
        (Options("gke", gpus_per_node=2), {"memory": 100e9}, "191Gi"),
        (Options("gke", memory="98Gi"), {"memory": 100e9}, "98Gi"),
    ],
)
def test_a_pod_has_the_memory_that_its_workers_take(options, each, expected):
    changes = {"cluster.workers": 2, "cluster.resources_per_worker": each}
    *_, job = manifests("tiny", options, **changes)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == expected
    has, workers = _node_types(job)["workers"].resources["memory"], options.gpus_per_node or 1
    assert has >= each.get("memory", 0) * workers  # as Ray's autoscaler counts


@pytest.mark.parametrize(
    "options", [Options("gke", gpus_per_node=2), Options("eks", gpus_per_node=2, node_selector={"gpu": "h100"})]
)
def test_rays_autoscaler_adds_the_pods_that_an_elastic_run_asks_for(options, monkeypatch, tmp_path):
    config, *_, job = manifests("tiny", options, **{"cluster.workers": "2..8", "cluster.accelerator_type": "H100"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config["data"]["recipe.yaml"])
    monkeypatch.setattr("raygpt.training.ray.scaling._nodes", list)  # no cluster is running
    train = Workers(load_recipe(recipe).cluster, "gpu").scaling()
    bundle = ResourceRequestUtil.make(train._resources_per_worker_not_none)
    asked = ClusterResourceConstraint(resource_requests=[ResourceRequestByCount(request=bundle, count=8)])
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(False, _node_types(job), max_num_nodes=4, cluster_resource_constraints=[asked])
    )
    assert list(reply.infeasible_cluster_resource_constraints) == []
    assert {launch.instance_type: launch.count for launch in reply.to_launch} == {"workers": 4}
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    selected = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"} if options.target == "gke" else {"gpu": "h100"}
    assert group["template"]["spec"]["nodeSelector"] == selected


def _node_types(job):
    """The worker groups of a RayJob as Ray's autoscaler reads them."""
    found = {}
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        name, read = group["groupName"], _node_type_from_group_spec(group, is_head=False)
        found[name] = NodeTypeConfig(name, read["min_workers"], read["max_workers"], resources=read["resources"])
    return found


def test_slurm_is_left_the_type_of_the_gpu_for_ray_to_check():
    recipe = load_recipe("tiny", {"cluster.accelerator_type": "H100"})
    assert "accelerator_type: H100" in slurm.script(plan_deployment(recipe, Options("slurm")))


def test_nothing_secret_is_written_and_credentials_are_named():
    *_, job = manifests("tiny", Options("eks", secrets=("s3",)))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["envFrom"] == [{"secretRef": {"name": "s3"}}]
    secret = {"cluster.runtime_env": {"env_vars": {"AWS_SECRET_ACCESS_KEY": "abc"}}}
    with pytest.raises(RaygptError, match=r"cluster\.runtime_env: may hold secrets.+--secret NAME"):
        manifests("tiny", Options("gke"), **secret)


def test_a_spot_head_is_kept_off_spot_machines():
    *_, job = manifests("tiny", Options("aks", spot=True))
    cluster = job["spec"]["rayClusterSpec"]
    label = {"kubernetes.azure.com/scalesetpriority": "spot"}
    assert cluster["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"] == label
    affinity = cluster["headGroupSpec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": next(iter(label)), "operator": "NotIn", "values": ["spot"]}]


# TPU slices


@pytest.mark.parametrize(
    ("kind", "topology"),
    [(kind, t) for kind in ("TPU-V5LITEPOD", "TPU-V6E") for t in ("1x1", "2x2", "2x4", "4x4", "4x8", "16x16")]
    + [(kind, t) for kind in ("TPU-V4", "TPU-V5P", "TPU-V7X") for t in ("2x2x1", "2x2x2", "2x2x4", "4x4x8")],
)
def test_a_slice_has_the_hosts_that_ray_counts(kind, topology):
    found = slice_of(kind, topology)
    workers, resources = get_tpu_worker_resources(topology, kind, num_slices=1)
    assert (found.hosts, found.chips_per_host) == (workers, resources["TPU"])


def test_what_gke_has_no_slice_for_is_refused():
    with pytest.raises(RaygptError, match=r"accelerator_type: TPU-V9 is no TPU of GKE; write one of TPU-V4"):
        slice_of("TPU-V9", "4x4")
    for kind, topology in (("TPU-V6E", "4x4x4"), ("TPU-V4", "4x4"), ("TPU-V6E", "four"), ("TPU-V6E", None)):
        with pytest.raises(RaygptError, match=r"cluster\.topology: .+ is no slice of"):
            slice_of(kind, topology)
    for kind, topology in (("TPU-V6E", "2x3"), ("TPU-V5LITEPOD", "16x32"), ("TPU-V5P", "4x8x4"), ("TPU-V4", "6x6x6")):
        with pytest.raises(RaygptError, match=rf"there is no slice {topology} of {kind}; write "):
            slice_of(kind, topology)
    assert set(GKE_NAMES) >= {"TPU-V4", "TPU-V5P", "TPU-V6E"}


def test_a_dataset_of_a_revision_is_no_file_of_this_machine():
    recipe = load_recipe("tiny", {"data.source": "openwebtext@main", "data.val": "wikitext-103:validation@main"})
    assert local_files(recipe) == []


# What is refused before anything is written


@pytest.mark.parametrize(
    ("options", "changes", "line"),
    [
        (Options("nomad"), {}, "--target: nomad is none of kubernetes, gke, eks, aks, slurm"),
        (Options("gke"), {"run.storage": "runs"}, "run.storage: runs would be a folder of one pod"),
        (Options("gke", volume="v"), {"run.storage": "/data"}, "run.storage: /data is not on the volume"),
        (Options("gke"), {"data.source": "texts/"}, "data.source: texts/ is a file of this machine"),
        (
            Options("gke", volume="v"),
            {"data.source": "x.txt"},
            "copy it onto the volume and write data.source=/storage/x",
        ),
        (Options("gke", volume="v"), {"data.source": "/storage/../etc"}, "is a file of this machine"),
        (Options("gke"), {"data.tokenizer": "./mine"}, "data.tokenizer: ./mine is a file of this machine"),
        (Options("kubernetes", spot=True), {}, "--spot: --target kubernetes has no label for spot machines"),
        (Options("eks"), SLICE, "cluster.accelerator: tpu is not for --target eks"),
        (Options("gke"), {**SLICE, "cluster.workers": 6}, "does not fill slices of 4x4 TPU-V6E, which have 4 hosts"),
        (Options("gke"), {**SLICE, "cluster.workers": "4..8"}, "is elastic, and TPU slices are not"),
        (Options("gke", gpus_per_node=8), {"cluster.workers": 12}, "cluster.workers: 12 does not fill nodes of 8 GPUs"),
        (Options("gke", gpus_per_node=4), {"cluster.workers": "5..7"}, "write e.g. cluster.workers: 8"),
        (Options("gke"), {"cluster.workers": "1..3", "cluster.mesh.fsdp": 4}, "no number in 1..3 fills cluster.mesh"),
        (Options("slurm", spot=True), {}, "name their partition in the script"),
        (Options("gke"), {"cluster.accelerator_type": "P4"}, "no node label is known for P4"),
        (Options("gke"), {"cluster.resources_per_worker": {"x": 1}}, "x is no resource of a node there"),
        (
            Options("gke", gpus_per_node=3),
            {"cluster.resources_per_worker": {"GPU": 2}},
            "3 is no multiple of the 2 GPUs",
        ),
        (Options("gke", volume="A_b"), {}, "--volume: 'A_b' is no name of Kubernetes"),
        (
            Options("gke", memory="lots"),
            {},
            "--memory: 'lots' is no amount of memory or space; write e.g. --memory 64Gi",
        ),
        (Options("gke", memory="64m"), {}, "--memory: '64m' is no amount of memory or space; write e.g. --memory 64Gi"),
        (Options("gke", memory="64"), {}, "--memory: 64 is less than 1Gi; write e.g. --memory 64Gi"),
        (Options("slurm", memory="1"), {}, "--memory: 1 is less than 1Gi"),
        (Options("gke", memory="1023Mi"), {}, "--memory: 1023Mi is less than 1Gi"),
        (Options("gke", volume="v", volume_size="500M"), {}, "--volume-size: 500M is less than 1Gi; write e.g."),
        (Options("gke", volume_size="1Ti"), {}, "--volume-size: there is no --volume to make"),
        (Options("slurm", time="soon"), {}, "--time: 'soon' is no time of slurm"),
        (Options("slurm"), SLICE, "cluster.accelerator: tpu is not for --target slurm"),
        (Options("gke", image="not an image!"), {}, "--image: 'not an image!' is no name of an image; write REGISTRY/"),
        (Options("gke", image=""), {}, "--image: '' is no name of an image"),
        (Options("gke", image="ghcr.io/Me/raygpt"), {}, "--image: 'ghcr.io/Me/raygpt' is no name of an image"),
        (Options("gke", node_selector={"bad key": "v"}), {}, "--node-selector: 'bad key' is no key of a label"),
        (Options("gke", node_selector={"a/b/c": "v"}), {}, "--node-selector: 'a/b/c' is no key of a label"),
        (Options("gke", node_selector={"key": "va lue"}), {}, "--node-selector: 'va lue' is no value of a label"),
        (Options("gke", retries=10**20), {}, "--retries: 100000000000000000000 are too many; write 1000 or fewer"),
        (Options("gke", prepare_nodes=2**31), {}, "--prepare-nodes: 2147483648 are too many"),
        (
            Options("gke", secrets=("s3", "a..b")),
            {},
            "--secret: 'a..b' is no name of Kubernetes, which are 1 to 253 of",
        ),
        (Options("gke", volume="a.b.c.-d"), {}, "--volume: 'a.b.c.-d' is no name of Kubernetes"),
        (Options("gke", namespace="a.b"), {}, "--namespace: 'a.b' is no namespace of Kubernetes"),
        (Options("gke", time="1:00:00"), {}, "--time: is for slurm, and --target is gke; leave it out"),
        (Options("slurm", time="1"), {}, "--time: 1 is too short: a job is asked to save 120 s before its end"),
        (Options("slurm", time="4:59"), {}, "write 5 (minutes) or more"),
        (Options("slurm", memory="lots"), {}, "--memory: 'lots' is no amount of memory or space"),
        (Options("gke", gpus_per_node=8), {"cluster.accelerator": "cpu"}, "--gpus-per-node: with cluster.accelerator"),
        (Options("gke", gpus_per_node=4), {**SLICE, "cluster.workers": 4}, "accelerator: tpu there are none; leave it"),
        (
            Options("gke", cpus=4),
            {"cluster.resources_per_worker": {"CPU": 16}},
            "--cpus: 4 are too few: the workers of a pod take 16 (cluster.resources_per_worker), and Ray Data needs "
            "one; write --cpus 17",
        ),
        (
            Options("gke", memory="96Gi"),
            {"cluster.resources_per_worker": {"memory": 100e9}},
            "--memory: 96Gi is too little: the workers of a pod take 94Gi (cluster.resources_per_worker), and Ray Data "
            "needs 4Gi; write --memory 98Gi",
        ),
        (
            Options("gke", memory="64Gi", gpus_per_node=2),
            {"cluster.workers": 2, "cluster.resources_per_worker": {"memory": 32 * 2**30}},
            "the workers of a pod take 64Gi",
        ),
        (
            Options("eks"),
            {"cluster.accelerator_type": "H100"},
            "no node label is known for H100 with --target eks; write --node-selector KEY=VALUE as well",
        ),
        (Options("aks"), {"cluster.accelerator_type": "H100"}, "no node label is known for H100 with --target aks"),
        (Options("gke", gpus_per_node=2), {"cluster.workers": "3..7"}, "write e.g. cluster.workers: 4..6"),
        (Options("gke", gpus_per_node=4), {"cluster.workers": "1..3"}, "write e.g. cluster.workers: 4"),
        *(
            (
                Options("slurm", **{name: value}),
                {},
                f"--{option}: is for Kubernetes, and --target is slurm; leave it out",
            )
            for option, name, value in (
                ("image", "image", "me/raygpt:1"),
                ("namespace", "namespace", "research"),
                ("node-selector", "node_selector", {"a": "b"}),
                ("retries", "retries", 0),
                ("volume", "volume", "shared"),
                ("secret", "secrets", ("s3",)),
                ("service-account", "service_account", "trainer"),
                ("prepare-nodes", "prepare_nodes", 2),
            )
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, changes, line):
    with pytest.raises(RaygptError) as refused:
        manifests("tiny", options, **changes)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "image",
    [
        *("raygpt", "me/raygpt:1", "ghcr.io/me/ray-gpt__x:V1.2", "localhost:5000/raygpt", "Host.io:80/a/b.c"),
        f"[::1]:5000/a@sha256:{'0a' * 32}",
    ],
)
def test_every_pod_has_the_image_that_was_named(image):
    *_, job = manifests("tiny", Options("gke", image=image, prepare_nodes=1))
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [_images(group) for group in groups] == [[image]] * 3


def _images(group):
    return [container["image"] for container in group["template"]["spec"]["containers"]]


def test_names_that_kubernetes_takes_are_in_the_manifest():
    labels = {"pool": "H100", "example.com/pool_1.x": "", "a" * 63: "b" * 63}
    options = Options("eks", volume="a.b-c.d", namespace="a-b", secrets=("x" * 253,), retries=0, node_selector=labels)
    *_, job = manifests("tiny", options, **{"cluster.accelerator_type": "H100"})
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == labels
    assert pod["volumes"] == [{"name": "storage", "persistentVolumeClaim": {"claimName": "a.b-c.d"}}]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "x" * 253}}]
    assert job["metadata"]["namespace"] == "a-b"
    assert job["spec"]["backoffLimit"] == 0


def test_a_run_with_a_long_name_has_one_of_47_characters():
    name = "run-3-modern-1-5b-" + "x" * 29
    config, budget, job = manifests("tiny", Options("gke"), **{"run.name": "3_Modern.1.5b-" + "x" * 60})
    assert len(name) == 47  # KubeRay refuses 48
    assert (job["metadata"]["name"], job["metadata"]["labels"]["raygpt-run"]) == (name, name)
    assert (config["metadata"]["name"], budget["metadata"]["name"]) == (f"{name}-recipe", f"{name}-head")


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("6:30", 390), ("24:00:00", 86_400), ("1-12", 129_600), ("1-0:30", 88_200), ("0-0:6:1", 361)],
)
def test_a_time_of_slurm_is_read_as_slurm_does(time, expected):
    assert seconds("--time", time) == expected
    script = slurm.script(plan_deployment(load_recipe("tiny"), Options("slurm", time=time)))
    assert f"\n#SBATCH --time={time}\n" in script


def test_a_selector_is_key_and_value():
    assert parse_selector(["pool=h100", "a/b="]) == {"pool": "h100", "a/b": ""}
    with pytest.raises(RaygptError, match="--node-selector: 'pool' is not KEY=VALUE"):
        parse_selector(["pool"])


# Rules that no schema holds: a manifest that breaks one is refused with its line

CLUSTER = "spec.rayClusterSpec"
HEAD, WORKERS = f"{CLUSTER}.headGroupSpec", f"{CLUSTER}.workerGroupSpecs.0"
POD, CONTAINER = f"{WORKERS}.template.spec", f"{WORKERS}.template.spec.containers.0"
MISSING = object()
MUTATIONS = [
    ("metadata.name", "x" * 48, "metadata.name: xxxxx"),
    ("metadata.name", "Modern", "metadata.name: 'Modern' must be a-z, 0-9 and -, and begin with a letter"),
    ("metadata.name", "3b", "metadata.name: '3b' must be"),
    ("spec.shutdownAfterJobFinishes", False, "spec.ttlSecondsAfterFinished: only with shutdownAfterJobFinishes: true"),
    ("spec.ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished: -1 is negative"),
    ("spec.backoffLimit", -1, "spec.backoffLimit: -1 is negative"),
    ("spec.activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: 0 must be above 0"),
    ("spec.preRunningDeadlineSeconds", 0, "spec.preRunningDeadlineSeconds: 0 must be above 0"),
    ("spec.rayClusterSpec", MISSING, "spec.rayClusterSpec: is missing"),
    ("spec.clusterSelector", {"ray.io/cluster": "x"}, "spec.backoffLimit: not with clusterSelector"),
    ("spec.submissionMode", "InteractiveMode", "spec.backoffLimit: not with submissionMode InteractiveMode"),
    ("spec.submissionMode", "SidecarMode", "spec.submitterConfig: not with submissionMode SidecarMode"),
    ("spec.runtimeEnvYAML", "{", "spec.runtimeEnvYAML: is not YAML"),
    (f"{CLUSTER}.rayVersion", MISSING, "rayVersion: is needed for authOptions.mode: token"),
    (f"{CLUSTER}.rayVersion", "2.51.1", "rayVersion: 2.51.1 has no token authentication"),
    (f"{CLUSTER}.rayVersion", "nightly", "rayVersion: nightly is no version"),
    (
        f"{CLUSTER}.authOptions",
        {"mode": "token", "enableK8sTokenAuth": True},
        "enableK8sTokenAuth: is not for a RayJob",
    ),
    (
        f"{CLUSTER}.autoscalerOptions",
        {"idleTimeoutSeconds": -5},
        "autoscalerOptions.idleTimeoutSeconds: -5 is negative",
    ),
    (f"{HEAD}.template.spec.containers", [], "head: has no container"),
    (f"{HEAD}.resources", {"CPU": "1"}, "head: resources are in rayStartParams and in resources"),
    (f"{WORKERS}.rayStartParams", {"labels": "a=b"}, "worker group slices: labels are not for rayStartParams"),
    (f"{WORKERS}.minReplicas", MISSING, "worker group slices: minReplicas and maxReplicas are needed"),
    (f"{WORKERS}.minReplicas", 4, "worker group slices: minReplicas 4 is above maxReplicas 3"),
    (f"{WORKERS}.maxReplicas", -1, "worker group slices: maxReplicas -1 is negative"),
    (f"{WORKERS}.idleTimeoutSeconds", 60, "idleTimeoutSeconds needs autoscalerOptions.version: v2"),
    (f"{WORKERS}.numOfHosts", 3, "worker group slices: numOfHosts 3 must be 4: 4x4 chips, 4 a host"),
    (f"{POD}.nodeSelector.cloud~google~com/gke-tpu-topology", MISSING, "gke-tpu-topology is missing"),
    (f"{POD}.nodeSelector.cloud~google~com/gke-tpu-topology", "v6e-16", "topology v6e-16 is not e.g. 4x4"),
    (f"{POD}.nodeSelector.cloud~google~com/gke-tpu-accelerator", MISSING, "gke-tpu-accelerator is missing"),
    (f"{CONTAINER}.resources.limits.google~com/tpu", "8", "google.com/tpu must be the same in limits and requests"),
    (f"{CONTAINER}.volumeMounts", [{"name": "data", "mountPath": "/x"}], "volumeMounts names data, which is no volume"),
    (f"{CONTAINER}.env", [{"name": "HF_TOKEN", "value": "hf_x"}], "env: HF_TOKEN is written in plain text"),
    (
        f"{HEAD}.template.spec.containers.0.env",
        [{"name": "RAY_enable_autoscaler_v2", "value": "1"}],
        "needs enableInTree",
    ),
    ("kind", "Secret", "a Secret is not for a manifest"),
]


def change(manifest, path, value):
    """A copy with another value at a.b.0.c; ~ stands for a dot in a key."""
    changed = copy.deepcopy(manifest)
    *parents, last = (int(key) if key.isdigit() else key.replace("~", ".") for key in path.split("."))
    parent = reduce(lambda tree, key: tree[key], parents, changed)
    if value is MISSING:
        del parent[last]
    else:
        parent[last] = value
    return changed


@pytest.fixture(scope="module")
def slices():
    *_, job = manifests("tiny", Options("gke"), **{**SLICE, "cluster.workers": 12})
    return job


@pytest.mark.parametrize(("path", "value", "line"), MUTATIONS)
def test_a_manifest_that_breaks_a_rule_is_refused_with_its_line(slices, path, value, line):
    assert problems(slices) == []
    assert any(line in problem for problem in problems(change(slices, path, value)))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("spec.retries", 5, "'retries' was unexpected"),
        (f"{WORKERS}.replica", 5, "'replica' was unexpected"),
        (f"{WORKERS}.groupName", MISSING, "'groupName' is a required property"),
        (f"{CONTAINER}.lifecycle.preStop.run", "x", "'run' was unexpected"),
        (f"{CONTAINER}.livenessProbe.timeoutSeconds", "ten", "'ten' is not of type 'integer'"),
        (f"{CONTAINER}.resources.limits.cpu", "two", "does not match"),
        (f"{CLUSTER}.authOptions.mode", "password", "is not one of ['disabled', 'token']"),
    ],
)
def test_the_schemas_refuse_what_the_api_server_would_drop(slices, shared_data, path, value, complaint):
    assert check(slices, shared_data / "kuberay") == []
    assert any(complaint in problem for problem in check(change(slices, path, value), shared_data / "kuberay"))


def test_autoscaler_v2_allows_no_restarts_of_containers():
    *_, job = manifests("tiny", Options("gke"), **{"cluster.workers": "1..4"})
    changed = change(job, f"{WORKERS}.template.spec.restartPolicy", "Always")
    assert problems(changed) == ["worker group workers: restartPolicy must be Never with autoscaler v2, not Always"]


# Text


def test_notes_are_comments_above_their_key():
    tree = {"a": Noted("why a", 1), "b": [{"c": Noted("why c", "x: y")}], "d": {"e": "one\ntwo\n"}, "f": ["g\nh\n"]}
    text = to_yaml(tree)
    assert (
        text == "# why a\na: 1\nb:\n  # why c\n  - c: 'x: y'\nd:\n  e: |\n    one\n    two\nf:\n  - |\n    g\n    h\n"
    )
    assert yaml.safe_load(text) == plain(tree)
    assert list(notes(tree)) == [("a", "why a"), ("b[0].c", "why c")]


def test_a_manifest_says_how_to_start_its_job_again():
    deployment = plan_deployment(load_recipe("tiny", {"run.storage": "s3://b/r"}), Options("gke", namespace="research"))
    first, second, *_ = rayjob.text(deployment).splitlines()
    assert first == "# The run tiny, made by raygpt deploy; `kubectl apply -f` of this file starts it."
    assert (
        second
        == "# A job that has ended stays: `kubectl delete rayjob -n research tiny` first, then `kubectl apply` again."
    )


def test_every_line_of_a_manifest_fits_a_screen():
    for options, cluster in TARGETS.values():
        deployment = plan_deployment(load_recipe("tiny", {"run.storage": "s3://b/r", **cluster}), options)
        assert max(map(len, rayjob.text(deployment).splitlines())) <= 160


def test_deploying_imports_neither_ray_nor_an_engine():
    code = (
        "import sys; from raygpt.deploy import files; from raygpt.deploy.deployment import plan_deployment\n"
        "from raygpt.deploy.options import Options\n"
        "from raygpt.recipes import load_recipe\n"
        "files.files(plan_deployment(load_recipe('tiny', ['run.storage=s3://b/r']), Options('gke')))\n"
        "heavy = {'ray', 'jax', 'torch', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The verb


def test_deploy_writes_the_files_and_says_what_to_type(raygpt, tmp_path):
    status, out, _ = raygpt("deploy", "tiny", "run.storage=s3://b/r", "--target", "gke", "--image", "me/raygpt:1")
    assert status == 0
    assert "kubectl apply -f deploy-tiny/rayjob.yaml" in out
    assert "docker build -f deploy-tiny/Dockerfile -t me/raygpt:1" in out
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all((tmp_path / "deploy-tiny/rayjob.yaml").read_text())]
    assert kinds == ["ConfigMap", "PodDisruptionBudget", "RayJob"]
    image = (tmp_path / "deploy-tiny/Dockerfile").read_text()
    assert "[cuda,dashboard,gpt2,hf]" in image
    assert "\nUSER ray\n" in image


def test_an_image_that_no_cluster_can_pull_is_noted(raygpt):
    words = ("deploy", "tiny", "run.storage=s3://b/r")
    note = "note: raygpt:latest is in no registry, so nodes of a cluster cannot pull it; name the image in a registry"
    assert raygpt(*words)[2].startswith(note)
    assert "--image" in raygpt(*words, "--dry-run")[2]
    assert raygpt(*words, "--image", "me/raygpt:1")[2] == ""
    assert raygpt(*words, "--target", "slurm")[2] == ""


def test_an_image_with_a_digest_is_not_built(raygpt):
    image = f"me/raygpt@sha256:{'0' * 64}"
    out = raygpt("deploy", "tiny", "run.storage=s3://b/r", "--image", image)[1]
    assert "kubectl apply" in out
    assert "docker" not in out


def test_the_folder_to_build_in_is_written_as_one_types_it(monkeypatch):
    deployment = plan_deployment(load_recipe("tiny", {"run.storage": "s3://b/r"}), Options("gke", image="me/raygpt:1"))
    monkeypatch.setattr("raygpt.deploy.image.is_checkout", lambda: True)
    monkeypatch.chdir(CHECKOUT)
    assert " -t me/raygpt:1 . && " in files.next_steps(deployment, "deploy-tiny")[0]
    monkeypatch.chdir("/")
    assert f" -t me/raygpt:1 {str(CHECKOUT).removeprefix('/')} && " in files.next_steps(deployment, "deploy-tiny")[0]


def test_a_folder_with_spaces_is_quoted_in_what_to_type(raygpt, tmp_path):
    words = ("deploy", "tiny", "run.storage=s3://b/r", "--out", "my dir")
    assert "\n  sbatch 'my dir/train.sbatch'\n" in raygpt(*words, "--target", "slurm")[1]
    out = raygpt(*words, "--image", "me/raygpt:1", "--namespace", "research")[1]
    assert "docker build -f 'my dir/Dockerfile' -t me/raygpt:1 " in out
    assert "\n  kubectl apply -f 'my dir/rayjob.yaml'\n  kubectl get rayjob -n research tiny\n" in out
    assert (tmp_path / "my dir" / "rayjob.yaml").is_file()


def test_help_says_what_a_pod_has_by_default(raygpt, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = raygpt("deploy", "--help")[1]
    for having in (CPUS, {kind: f"{size}Gi" for kind, size in MEMORY_GIB.items()}):
        assert f"{having['gpu']} with a GPU, {having['tpu']} with a TPU, {having['cpu']} with neither" in shown


def test_a_dry_run_explains_each_block_and_writes_nothing(raygpt, tmp_path):
    status, out, _ = raygpt("deploy", "tiny", "run.storage=s3://b/r", "--dry-run", "--json")
    blocks = {block["block"]: block["why"] for block in json.loads(out)}
    assert status == 0
    assert blocks["RayJob spec.backoffLimit"] == "Each retry makes a new cluster, which resumes the run."
    assert list(tmp_path.iterdir()) == []
    assert "RayJob spec.backoffLimit" in raygpt("deploy", "tiny", "run.storage=s3://b/r", "--dry-run")[1]


def test_the_image_has_what_the_recipe_needs():
    def extras(name="tiny", **changes):
        recipe = load_recipe(name, {"run.storage": "s3://b/r", **changes})
        return plan_deployment(recipe, Options("gke")).extras

    assert extras(engine="torch") == ["dashboard", "gpt2", "hf", "torch"]
    own = extras("gpt2-124m", engine="torch", **{"model.implementation": "huggingface"})
    assert own == ["dashboard", "gpt2", "hf", "torch", "transformers"]
    assert set(own) <= set(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert extras(**{**SLICE, "cluster.workers": 4}) == ["dashboard", "gpt2", "hf", "tpu"]
    assert extras(**{"track.wandb": "p", "cluster.accelerator": "cpu"}) == ["dashboard", "gpt2", "hf", "wandb"]


def test_files_of_slurm_are_one_script():
    made = files.files(plan_deployment(load_recipe("tiny", {"cluster.workers": "2..4"}), Options("slurm")))
    assert list(made) == ["train.sbatch"]
    assert "#SBATCH --nodes=2-4\n" in made["train.sbatch"]
    assert "--mem" not in made["train.sbatch"]
    assert subprocess.run(["bash", "-n"], input=made["train.sbatch"], text=True).returncode == 0


@pytest.mark.parametrize(
    ("memory", "mebibytes"), [("64Gi", 65_536), ("1.5G", 1431), ("1Gi", 1024), ("1073741824", 1024)]
)
def test_memory_is_asked_of_slurm(memory, mebibytes):
    script = slurm.script(plan_deployment(load_recipe("tiny"), Options("slurm", memory=memory)))
    assert f"\n#SBATCH --mem={mebibytes}M\n" in script


def test_a_gpu_that_the_script_cannot_ask_slurm_for_is_noted(raygpt):
    status, _, err = raygpt("deploy", "tiny", "cluster.accelerator_type=H100", "--target", "slurm")
    assert status == 0
    assert err.startswith(
        "note: cluster.accelerator_type: the script does not ask slurm for H100; add what it is called"
    )


def test_a_warm_up_that_follows_fewer_steps_is_noted(raygpt):
    words = ("gpt2-tiny", "run.storage=s3://b/r", "training.steps=6", "schedule.warmup_steps=5")
    shorter = ("modern-124m", "run.storage=s3://b/r", "training.steps=12")
    assert "warmup_steps" not in raygpt("deploy", *words, "--dry-run")[2]
    assert "note: schedule.warmup_steps:" in raygpt("deploy", *shorter, "--dry-run")[2]


def test_a_file_where_the_folder_should_be_is_refused_in_one_line(tmp_path):
    deployment = plan_deployment(load_recipe("tiny", {"run.storage": "s3://b/r"}), Options("gke"))
    (tmp_path / "file").touch()
    with pytest.raises(RaygptError, match="file cannot be made: a file is where a folder should be"):
        files.write(deployment, str(tmp_path / "file"))
