"""KubeRay's and Kubernetes' own schemas, with unknown fields forbidden: the API server would drop them silently."""

import lzma
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = "1.37"


@cache
def rayjob_validator(folder: Path) -> Any:
    """A validator for RayJobs, from KubeRay's custom resource definition."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra dev")
    file = folder / "ray.io_rayjobs.yaml.xz"
    if not file.is_file():
        pytest.skip("needs kuberay/ in RAYGPT_TEST_DATA, a folder with KubeRay's schemas")
    with lzma.open(file) as stream:
        definition = yaml.load(stream, yaml.CSafeLoader)
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in definition["spec"]["versions"]}
    return jsonschema.Draft7Validator(_strict(versions["v1"]))


def _strict(schema: Any) -> Any:
    """The schema with every object closed to fields that it does not name."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        strict["additionalProperties"] = False
    return strict


def check(manifest: dict[str, Any], kuberay: Path) -> list[str]:
    """What the schemas say against an object: KubeRay's for a RayJob and Kubernetes' for its pods, Kubernetes' for
    others."""
    if manifest["kind"] != "RayJob":
        return _core(manifest)
    found = [f"{error.json_path}: {error.message}" for error in rayjob_validator(kuberay).iter_errors(manifest)]
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        found += _core(pod)
    return found


def _core(manifest: dict[str, Any]) -> list[str]:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra dev")
    try:
        kubernetes.validate(manifest, KUBERNETES, strict=True)
    except kubernetes.ValidationError as error:
        return [str(error.message)]
    return []
