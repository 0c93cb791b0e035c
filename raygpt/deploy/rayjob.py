"""A RayJob of KubeRay from a deployment: the recipe as a ConfigMap, a volume claim if one is to be made, a disruption
budget for the head, and the job itself.

A retry goes on: the entrypoint is the same command each time, and `raygpt train` resumes the run that it finds.
"""

import shlex
from typing import Any

from raygpt.deploy.commented import Noted, plain, to_yaml
from raygpt.deploy.deployment import DATA_GIB, MOUNT, Deployment, ray_version
from raygpt.deploy.image import USER
from raygpt.deploy.rules import problems
from raygpt.errors import RaygptError

RECIPE_FOLDER, RECIPE_FILE = "/etc/raygpt", "recipe.yaml"
HEALTH_PORT = 52365  # of Ray's agent on every node
NOTICE_S = 25  # GKE gives a pod of a spot machine about as long; others give more
GRACE_S = NOTICE_S + 10  # for the hook itself, which takes 3 s to start, and for Ray to end
DRIVER = f"^python -m raygpt train {RECIPE_FOLDER}/{RECIPE_FILE}"  # the process itself, not the shell around it
HEAD_GRACE_S = 120  # a checkpoint of a large model is committed within that
CPU_NODE_CPUS = 8  # of a node that tokenises, in as many processes
Tree = dict[str, Any]


def entrypoint() -> str:
    """What the RayJob runs, the first time and at each retry."""
    return shlex.join(["python", "-m", "raygpt", "train", f"{RECIPE_FOLDER}/{RECIPE_FILE}", "--kuberay"])


def manifests(deployment: Deployment) -> list[Tree]:
    """Every object, in the order in which it is applied; with notes."""
    found = [_recipe(deployment), *_claim(deployment), _budget(deployment), _rayjob(deployment)]
    for manifest in found:
        for problem in problems(plain(manifest)):
            raise RaygptError(f"{manifest['kind']}: {problem}")
    return found


def text(deployment: Deployment) -> str:
    """The file for `kubectl apply -f`."""
    namespace = deployment.options.namespace
    delete = f"kubectl delete rayjob{f' -n {namespace}' if namespace else ''} {deployment.name}"
    # Not `kubectl replace --force`, which would delete a volume claim of this file, too.
    head = (
        f"# The run {deployment.recipe.run.name}, made by raygpt deploy; `kubectl apply -f` of this file starts it.\n"
        f"# A job that has ended stays: `{delete}` first, then `kubectl apply` again.\n"
    )
    return head + "---\n".join(to_yaml(manifest) for manifest in manifests(deployment))


def _metadata(deployment: Deployment, name: str) -> Tree:
    namespace = deployment.options.namespace
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {"raygpt-run": deployment.name},
    }


def _recipe(deployment: Deployment) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(deployment, f"{deployment.name}-recipe"),
        "data": Noted(
            "The recipe with every key written out, so that another version's defaults change nothing.",
            {RECIPE_FILE: deployment.recipe.to_yaml()},
        ),
    }


def _claim(deployment: Deployment) -> list[Tree]:
    options = deployment.options
    if not (options.volume and options.volume_size):
        return []
    spec = {
        "accessModes": Noted("All pods write their part of a checkpoint, on several nodes.", ["ReadWriteMany"]),
        "resources": {"requests": {"storage": options.volume_size}},
    }
    metadata = _metadata(deployment, options.volume)
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}]


def _budget(deployment: Deployment) -> Tree:
    selector = {"matchLabels": {"raygpt-run": deployment.name, "ray.io/node-type": "head"}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment, f"{deployment.name}-head"),
        "spec": Noted(
            "The driver lives on the head: an upgrade of nodes waits until the run has ended.",
            {"maxUnavailable": 0, "selector": selector},
        ),
    }


def _rayjob(deployment: Deployment) -> Tree:
    spec: Tree = {
        "entrypoint": Noted(
            "Resumes the run if it has a checkpoint. Not retried: what `raygpt stop` ended, and what would fail again.",
            entrypoint(),
        ),
        "submissionMode": "K8sJobMode",
        "backoffLimit": Noted("Each retry makes a new cluster, which resumes the run.", deployment.retries),
        "submitterConfig": Noted(
            "A head that is replaced loses its jobs: the submitter submits again.", {"backoffLimit": deployment.retries}
        ),
        "shutdownAfterJobFinishes": Noted("Frees the accelerators when the run has ended.", True),
        "ttlSecondsAfterFinished": 60,
        "rayClusterSpec": _cluster(deployment),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(deployment, deployment.name),
        "spec": spec,
    }


def _cluster(deployment: Deployment) -> Tree:
    groups = [_workers(deployment)]
    if deployment.options.prepare_nodes:
        groups.append(_prepare_nodes(deployment))
    return {
        "rayVersion": ray_version(),
        "authOptions": Noted(
            "Only who has the token, a Secret that KubeRay makes, can run code on this cluster.", {"mode": "token"}
        ),
        **_autoscaler(deployment),
        "headGroupSpec": _head(deployment),
        "workerGroupSpecs": groups,
    }


def _autoscaler(deployment: Deployment) -> Tree:
    if not deployment.has_autoscaler:
        return {}
    return {
        "enableInTreeAutoscaling": Noted(
            "Adds workers up to maxReplicas where there are nodes, and CPU nodes while text is tokenised.", True
        ),
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": Noted("Longer than workers take to start again after a fault.", 300),
        },
    }


def _head(deployment: Deployment) -> Tree:
    container = {
        **_container(deployment, "ray-head", {"cpu": "2", "memory": "8Gi"}),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
        ],
        "lifecycle": Noted(
            "Before the pod ends, the driver saves and ends; the operator then retries.",
            _before_end(f"pkill -TERM -f '{DRIVER}'\nwhile pgrep -f '{DRIVER}' >/dev/null; do sleep 1; done\n"),
        ),
    }
    container["env"] = Noted(
        "The driver looks every second for machines that are taken away; a job that is stopped may take time to save.",
        [*container["env"], {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(HEAD_GRACE_S - 10)}],
    )
    mounted = {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True}
    container["volumeMounts"] = [mounted, *container.get("volumeMounts", [])]
    pod = _pod(deployment, container)
    recipe = {"name": "recipe", "configMap": {"name": f"{deployment.name}-recipe"}}
    pod["volumes"] = [recipe, *pod.get("volumes", [])]
    pod["terminationGracePeriodSeconds"] = HEAD_GRACE_S
    if deployment.options.spot:
        pod["affinity"] = Noted(
            "Not on a spot machine: with the head the run's driver is lost.", _not_on(deployment.cloud.spot)
        )
    metadata: Tree = {
        "labels": {"raygpt-run": deployment.name},
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    }
    return {
        "rayStartParams": Noted("No worker on the head, whose pod is small.", {"num-cpus": "0"}),
        "template": {"metadata": metadata, "spec": pod},
    }


def _workers(deployment: Deployment) -> Tree:
    limits = {"cpu": str(deployment.cpus_per_pod), "memory": deployment.memory_per_pod}
    if deployment.slice:
        limits["google.com/tpu"] = str(deployment.slice.chips_per_host)
    elif deployment.accelerator == "gpu":
        limits["nvidia.com/gpu"] = str(deployment.gpus_per_node)
    pod = _pod(deployment, _worker_container(deployment, limits))
    if selector := _node_selector(deployment):
        pod["nodeSelector"] = selector
    if tolerations := _tolerations(deployment):
        pod["tolerations"] = tolerations
    if deployment.slice:
        pod["securityContext"] = Noted("libtpu opens the devices of the host.", {"runAsUser": 0})
    replicas = {
        "replicas": deployment.min_replicas,
        "minReplicas": deployment.min_replicas,
        "maxReplicas": deployment.max_replicas,
    }
    count = Noted(_why_replicas(deployment), replicas.pop("replicas"))
    group: Tree = {"groupName": "slices" if deployment.slice else "workers", "replicas": count, **replicas}
    if deployment.slice:
        group["numOfHosts"] = Noted(
            f"{deployment.slice.topology} is {deployment.slice.chips} chips, {deployment.slice.chips_per_host} a host; "
            "the TPU webhook refuses another number.",
            deployment.hosts,
        )
    metadata = {"labels": {"raygpt-run": deployment.name}}
    return {**group, "rayStartParams": {}, "template": {"metadata": metadata, "spec": pod}}


def _why_replicas(deployment: Deployment) -> str:
    workers = f"cluster.workers: {deployment.recipe.cluster.workers}"
    if deployment.slice:
        return f"{workers}, one a host, {deployment.hosts} a slice."
    if deployment.is_elastic:
        return f"{workers}: the run starts with the fewest, and grows and shrinks with the nodes."
    return f"{workers}, {deployment.workers_per_pod} in a pod."


def _prepare_nodes(deployment: Deployment) -> Tree:
    limits = {"cpu": str(CPU_NODE_CPUS), "memory": f"{CPU_NODE_CPUS * DATA_GIB}Gi"}
    pod = _pod(deployment, _container(deployment, "ray-worker", limits))
    return {
        "groupName": Noted("CPU-only nodes that tokenise; they leave when that is done.", "prepare"),
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": deployment.options.prepare_nodes,
        "rayStartParams": {},
        "template": {"metadata": {"labels": {"raygpt-run": deployment.name}}, "spec": pod},
    }


def _worker_container(deployment: Deployment, limits: Tree) -> Tree:
    drain = [*("ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends")]
    drain += ["--deadline-remaining-seconds", str(NOTICE_S)]
    return {
        **_container(deployment, "ray-worker", limits),
        "lifecycle": Noted(
            "Before the pod ends (a spot machine is taken away, a node is drained), the run saves.",
            _before_end(f"{shlex.join(drain)} &&\nsleep {NOTICE_S - 5}\n"),
        ),
    }


def _container(deployment: Deployment, name: str, limits: Tree) -> Tree:
    options = deployment.options
    container: Tree = {
        "name": name,
        "image": deployment.image,
        "resources": {"limits": limits, "requests": dict(limits)},
        "env": [{"name": "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "value": "1"}],
    }
    if options.secrets:
        container["envFrom"] = Noted(
            "Credentials by reference: AWS_ACCESS_KEY_ID, HF_TOKEN, WANDB_API_KEY and the like.",
            [{"secretRef": {"name": secret}} for secret in options.secrets],
        )
    if options.volume:
        container["volumeMounts"] = [{"name": "storage", "mountPath": MOUNT}]
    container["readinessProbe"] = _probe(failures=3)
    container["livenessProbe"] = Noted(
        "Two minutes: training may take every core for a while, and that is no fault.", _probe(failures=12)
    )
    return container


def _probe(failures: int) -> Tree:
    return {
        "httpGet": {"path": "/api/healthz", "port": HEALTH_PORT},
        "initialDelaySeconds": 30,
        "periodSeconds": 10,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def _before_end(command: str) -> Tree:
    return {"preStop": {"exec": {"command": ["bash", "-c", command]}}}


def _pod(deployment: Deployment, container: Tree) -> Tree:
    options = deployment.options
    pod: Tree = {"containers": [container], "terminationGracePeriodSeconds": GRACE_S}
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.volume:
        pod["volumes"] = [{"name": "storage", "persistentVolumeClaim": {"claimName": options.volume}}]
        pod["securityContext"] = Noted("The image's user may write to the volume.", {"fsGroup": USER})
    if deployment.has_autoscaler:
        pod["restartPolicy"] = Noted("Autoscaler v2 replaces pods; it does not restart containers.", "Never")
    return pod


def _node_selector(deployment: Deployment) -> Tree:
    cloud = deployment.cloud
    selector: Tree = {}
    if deployment.slice:
        selector["cloud.google.com/gke-tpu-accelerator"] = deployment.slice.gke_name
        selector["cloud.google.com/gke-tpu-topology"] = deployment.slice.topology
    elif deployment.accelerator == "gpu":
        selector |= cloud.gpu_selector(deployment.accelerator_type)
    if deployment.options.spot and cloud.spot:
        selector |= dict([cloud.spot])
    return selector | deployment.options.node_selector


def _tolerations(deployment: Deployment) -> list[Tree]:
    found: list[Tree] = []
    resource = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}.get(deployment.accelerator)
    if resource:
        found.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    if deployment.options.spot and deployment.cloud.spot:
        key, value = deployment.cloud.spot
        found.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return found


def _not_on(label: tuple[str, str] | None) -> Tree:
    key, value = label or ("", "")
    terms = [{"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
