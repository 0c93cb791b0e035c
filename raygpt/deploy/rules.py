"""Rules that no schema holds: those of KubeRay's operator, of GKE's TPU webhook and of Kubernetes itself, a line each.

They are the operator's for what a manifest of ours has. Its rules for Redis, TLS, the history server and deletion
policies are not here.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import yaml

from raygpt.deploy.names import NAME_LENGTH

Tree = dict[str, Any]
LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # of RFC 1035, as KubeRay wants names
MIN_RAY_FOR_TOKENS = (2, 52)
SECRET_NAME = r"SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL"
RESOURCES_BY_START = ("num-cpus", "num-gpus", "memory", "resources")
V2 = "RAY_enable_autoscaler_v2"


def problems(manifest: Tree) -> list[str]:
    """What is wrong with one object, a line each."""
    found = list(_secrets(manifest))
    if manifest.get("kind") == "RayJob":
        spec = manifest.get("spec") or {}
        found += [*_name(manifest), *_job(spec)]
        if cluster := spec.get("rayClusterSpec"):
            found += [*_cluster(cluster), *_tpus(cluster), *_pods(cluster)]
    return found


# The operator's, for the job


def _name(manifest: Tree) -> Iterator[str]:
    name = str((manifest.get("metadata") or {}).get("name", ""))
    if len(name) > NAME_LENGTH:
        most = f"{NAME_LENGTH} is the most, since the RayCluster's is longer"
        yield f"metadata.name: {name} has {len(name)} characters; {most}"
    if not re.fullmatch(LABEL, name):
        yield f"metadata.name: {name!r} must be a-z, 0-9 and -, and begin with a letter"


def _job(spec: Tree) -> Iterator[str]:
    shuts_down, selector = spec.get("shutdownAfterJobFinishes", False), spec.get("clusterSelector")
    mode, retries = spec.get("submissionMode", "K8sJobMode"), spec.get("backoffLimit") or 0
    if spec.get("suspend") and not shuts_down:
        yield "spec.suspend: only with shutdownAfterJobFinishes: true"
    if (ttl := spec.get("ttlSecondsAfterFinished") or 0) and not shuts_down:
        yield "spec.ttlSecondsAfterFinished: only with shutdownAfterJobFinishes: true"
    if ttl < 0:
        yield f"spec.ttlSecondsAfterFinished: {ttl} is negative"
    if retries < 0:
        yield f"spec.backoffLimit: {retries} is negative"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key, 1) <= 0:
            yield f"spec.{key}: {spec[key]} must be above 0"
    if not spec.get("rayClusterSpec") and not selector:
        yield "spec.rayClusterSpec: is missing"
    if selector and retries:
        yield "spec.backoffLimit: not with clusterSelector, whose cluster cannot be made again"
    if mode == "InteractiveMode" and retries:
        yield "spec.backoffLimit: not with submissionMode InteractiveMode"
    if mode == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if spec.get(key):
                yield f"spec.{key}: not with submissionMode SidecarMode"
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML") or "")
    except yaml.YAMLError:
        yield "spec.runtimeEnvYAML: is not YAML"


# The operator's, for the cluster


def _cluster(cluster: Tree) -> Iterator[str]:
    is_scaled = bool(cluster.get("enableInTreeAutoscaling"))
    options = cluster.get("autoscalerOptions") or {}
    is_v2 = is_scaled and options.get("version") == "v2"
    for where, group in _groups(cluster):
        yield from _group(where, group, is_v2)
        if where != "head":
            yield from _replicas(where, group, is_scaled, is_v2)
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield f"autoscalerOptions.idleTimeoutSeconds: {options['idleTimeoutSeconds']} is negative"
    by_variable = _environment(_containers(cluster.get("headGroupSpec") or {})).get(V2)
    if not is_scaled and by_variable in ("1", "true"):
        yield f"head: {V2} needs enableInTreeAutoscaling: true"
    if is_scaled and by_variable is not None and options.get("version"):
        yield f"head: {V2} and autoscalerOptions.version are both set; leave the variable out"
    yield from _authentication(cluster)


def _group(where: str, group: Tree, is_v2: bool) -> Iterator[str]:
    if not _containers(group):
        yield f"{where}: has no container"
    start = group.get("rayStartParams") or {}
    if group.get("resources") and any(start.get(key) for key in RESOURCES_BY_START):
        yield f"{where}: resources are in rayStartParams and in resources; leave one of them out"
    if "labels" in start:
        yield f"{where}: labels are not for rayStartParams; write them in the group's labels"
    policy = _pod(group).get("restartPolicy")
    if is_v2 and policy not in (None, "", "Never"):
        yield f"{where}: restartPolicy must be Never with autoscaler v2, not {policy}"


def _replicas(where: str, group: Tree, is_scaled: bool, is_v2: bool) -> Iterator[str]:
    low, high = group.get("minReplicas"), group.get("maxReplicas")
    if not is_scaled and (low is None or high is None):
        yield f"{where}: minReplicas and maxReplicas are needed without an autoscaler"
    for key, value in (("minReplicas", low), ("maxReplicas", high)):
        if value is not None and value < 0:
            yield f"{where}: {key} {value} is negative"
    if low is not None and high is not None and low > high:
        yield f"{where}: minReplicas {low} is above maxReplicas {high}"
    if is_scaled and group.get("suspend"):
        yield f"{where}: cannot be suspended with an autoscaler"
    if group.get("idleTimeoutSeconds") is not None and not is_v2:
        yield f"{where}: idleTimeoutSeconds needs autoscalerOptions.version: v2"
    if group.get("priority") and not is_v2:
        yield f"{where}: priority needs autoscalerOptions.version: v2"


def _authentication(cluster: Tree) -> Iterator[str]:
    options = cluster.get("authOptions") or {}
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth: is not for a RayJob"
    if options.get("mode") != "token":
        return
    version = str(cluster.get("rayVersion") or "")
    if not version:
        yield "rayVersion: is needed for authOptions.mode: token"
    elif not re.match(r"\d+\.\d+", version):
        yield f"rayVersion: {version} is no version"
    elif tuple(map(int, version.split(".")[:2])) < MIN_RAY_FOR_TOKENS:
        yield f"rayVersion: {version} has no token authentication; 2.52 is the first that has"


# The TPU webhook's


def _tpus(cluster: Tree) -> Iterator[str]:
    for group in cluster.get("workerGroupSpecs") or []:
        where, chips = _label(group), sum(_chips(container) for container in _containers(group))
        if not chips:
            continue
        hosts, topology = group.get("numOfHosts", 1), _selector(group).get("cloud.google.com/gke-tpu-topology", "")
        if not topology:
            yield f"{where}: nodeSelector cloud.google.com/gke-tpu-topology is missing"
        elif not re.fullmatch(r"\d+(x\d+)+", topology):
            yield f"{where}: topology {topology} is not e.g. 4x4"
        elif (expected := max(prod(map(int, topology.split("x"))) // chips, 1)) != hosts:
            yield f"{where}: numOfHosts {hosts} must be {expected}: {topology} chips, {chips} a host"
        if not _selector(group).get("cloud.google.com/gke-tpu-accelerator"):
            yield f"{where}: nodeSelector cloud.google.com/gke-tpu-accelerator is missing"


def _chips(container: Tree) -> int:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return int(asked.get("google.com/tpu", 0))


# Kubernetes' own


def _pods(cluster: Tree) -> Iterator[str]:
    for where, group in _groups(cluster):
        volumes = {volume.get("name") for volume in _pod(group).get("volumes") or []}
        for container in _containers(group):
            for mount in container.get("volumeMounts") or []:
                if mount.get("name") not in volumes:
                    yield f"{where}: volumeMounts names {mount.get('name')}, which is no volume of the pod"
            yield from _resources(where, container.get("resources") or {})


def _resources(where: str, resources: Tree) -> Iterator[str]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in sorted({*limits, *requests}):
        if "/" in name and limits.get(name) != requests.get(name, limits.get(name)):
            yield f"{where}: {name} must be the same in limits and requests"
        if name in ("cpu", "memory") and name not in limits:
            yield f"{where}: {name} has no limit, and Ray counts by limits"


def _secrets(tree: Any) -> Iterator[str]:
    """Variables that hold a secret in plain text, and objects that would."""
    if isinstance(tree, list):
        for item in tree:
            yield from _secrets(item)
    if not isinstance(tree, dict):
        return
    if tree.get("kind") == "Secret":
        yield "a Secret is not for a manifest; make it with kubectl create secret, and name it"
    name = tree.get("name")
    if isinstance(name, str) and tree.get("value") and re.search(SECRET_NAME, name.upper()):
        yield f"env: {name} is written in plain text; put it into a Secret and name that in envFrom"
    for value in tree.values():
        yield from _secrets(value)


# Parts of a manifest


def _groups(cluster: Tree) -> Iterator[tuple[str, Tree]]:
    yield "head", cluster.get("headGroupSpec") or {}
    for group in cluster.get("workerGroupSpecs") or []:
        yield _label(group), group


def _label(group: Tree) -> str:
    return f"worker group {group.get('groupName')}"


def _pod(group: Tree) -> Tree:
    pod: Tree = (group.get("template") or {}).get("spec") or {}
    return pod


def _containers(group: Tree) -> list[Tree]:
    containers: list[Tree] = _pod(group).get("containers") or []
    return containers


def _selector(group: Tree) -> Tree:
    selector: Tree = _pod(group).get("nodeSelector") or {}
    return selector


def _environment(containers: list[Tree]) -> Tree:
    first = containers[0] if containers else {}
    return {variable.get("name"): variable.get("value") for variable in first.get("env") or []}
