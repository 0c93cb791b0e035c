"""The PyTorch engine. This file does not import torch, so that its absence is a one-line error."""

import importlib.util

from raygpt.errors import RaygptError


def require_torch(implementation: str = "raygpt") -> None:
    """Raise if a package that this `model.implementation` needs is missing."""
    needed = {"torch": "'raygpt[torch]'", "safetensors": "'raygpt[torch]'"}
    if implementation == "huggingface":
        needed["transformers"] = "'raygpt[transformers]'"
    for package, remedy in needed.items():
        if importlib.util.find_spec(package) is None:
            raise RaygptError(f"engine: torch needs {package}, which is not installed: pip install {remedy}")
