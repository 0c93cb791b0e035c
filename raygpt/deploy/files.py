"""The files of a deployment, and what each block in them is for."""

import os
import shlex
from pathlib import Path

from raygpt import storage
from raygpt.deploy import image, rayjob, slurm
from raygpt.deploy.commented import notes
from raygpt.deploy.deployment import Deployment


def files(deployment: Deployment) -> dict[str, str]:
    """Name -> content."""
    if deployment.options.target == "slurm":
        return {"train.sbatch": slurm.script(deployment)}
    return {"rayjob.yaml": rayjob.text(deployment), "Dockerfile": image.dockerfile(deployment)}


def explain(deployment: Deployment) -> list[tuple[str, str]]:
    """(block, why) of everything that is not plain from its name."""
    if deployment.options.target == "slurm":
        lines = slurm.script(deployment).partition("set -u")[0].splitlines()[2:]
        return [(line.removeprefix("#SBATCH "), why) for why, line in _with_reason(lines)]
    return [
        (f"{manifest['kind']} {path}".strip(), why)
        for manifest in rayjob.manifests(deployment)
        for path, why in notes(manifest)
    ]


def _with_reason(lines: list[str]) -> list[tuple[str, str]]:
    """(comment, line below it); without a comment of its own a line has that of the one before."""
    found, why = [], ""
    for line in lines:
        if line.startswith("#SBATCH"):
            found.append((why, line))
        else:
            why = line.removeprefix("# ")
    return found


def write(deployment: Deployment, folder: str) -> list[str]:
    """Write the files into a folder; returns their paths."""
    written = []
    for name, content in files(deployment).items():
        written.append(str(Path(folder, name)))
        storage.write_bytes(written[-1], content.encode())
    return written


def next_steps(deployment: Deployment, folder: str) -> list[str]:
    """The commands that start the run, and those that look at it; a shell reads each as it is written."""
    options, where = deployment.options, Path(folder)
    if options.target == "slurm":
        return [shlex.join(["sbatch", str(where / "train.sbatch")])]
    space = ["-n", options.namespace] if options.namespace else []
    context = _shortest(image.CHECKOUT) if image.is_checkout() else "."
    build = ["docker", "build", "-f", str(where / "Dockerfile"), "-t", deployment.image, context]
    push = ["docker", "push", deployment.image]
    return [
        *([] if "@" in deployment.image else [f"{shlex.join(build)} && {shlex.join(push)}"]),  # a digest: built already
        shlex.join(["kubectl", "apply", "-f", str(where / "rayjob.yaml")]),
        shlex.join(["kubectl", "get", "rayjob", *space, deployment.name]),
    ]


def left_to_user(deployment: Deployment) -> list[str]:
    """What the files lack, since only the user knows it."""
    options, gpu = deployment.options, deployment.accelerator_type
    if options.target != "slurm":
        if options.image is not None:
            return []
        return [
            f"{deployment.image} is in no registry, so nodes of a cluster cannot pull it; name the image in a registry "
            "that they reach with --image, e.g. --image ghcr.io/me/raygpt:1"
        ]
    if deployment.accelerator == "gpu" and gpu:
        return [
            f"cluster.accelerator_type: the script does not ask slurm for {gpu}; add what it is called there, e.g. "
            f"#SBATCH --constraint={gpu.lower()}"
        ]
    return []


def _shortest(folder: Path) -> str:
    """A folder as one types it: relative to the current one where that is shorter."""
    return min(os.path.relpath(folder), str(folder), key=len)
