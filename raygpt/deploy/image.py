"""The Dockerfile of an image that KubeRay can run: Python, Ray, raygpt and the engine of the recipe."""

import sys
from pathlib import Path

from raygpt import __version__
from raygpt.deploy.deployment import Deployment, ray_version

# KubeRay runs bash; the hook that saves before a head ends needs pgrep and pkill.
PACKAGES = "procps"
USER = 1000  # as in Ray's own images
CHECKOUT = Path(__file__).parents[2]


def is_checkout() -> bool:
    """Whether this raygpt is a checkout, which can be copied into an image, or was installed by pip."""
    return (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "constraints.txt").is_file()


def dockerfile(deployment: Deployment) -> str:
    """The Dockerfile; it is built in the checkout, if there is one."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    extras = ",".join(deployment.extras)
    if is_checkout():
        install = f"""\
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY raygpt raygpt
RUN pip install --no-cache-dir -c constraints.txt '.[{extras}]'"""
    else:
        install = f"RUN pip install --no-cache-dir 'raygpt[{extras}]=={__version__}' 'ray=={ray_version()}'"
    return f"""\
# docker build -f Dockerfile -t {deployment.image} {"CHECKOUT" if is_checkout() else "."}
# CUDA's libraries come with the wheels of JAX and PyTorch; the driver comes from the node.
FROM python:{python}-slim
# {PACKAGES}: the hook that saves before the head's pod ends looks for the driver's process.
RUN apt-get update && apt-get install -y --no-install-recommends {PACKAGES} && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/raygpt
{install}
# Nothing of a run belongs to root; a volume must be writable for this user.
RUN useradd --uid {USER} --create-home ray
USER ray
WORKDIR /home/ray
"""
