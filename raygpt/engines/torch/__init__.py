"""The PyTorch engine. This file imports no torch, so that its absence can be said in one line."""

import importlib.util

from raygpt.errors import RaygptError


def require_torch(implementation: str = "raygpt") -> None:
    """Refuse, with the remedy, where a package is missing that this `model.implementation` needs."""
    needed = {"torch": "'raygpt[torch]'", "safetensors": "'raygpt[torch]'"}
    if implementation == "huggingface":
        needed["transformers"] = "transformers"
    for package, remedy in needed.items():
        if importlib.util.find_spec(package) is None:
            raise RaygptError(f"engine: torch needs {package}, which is not installed: pip install {remedy}")
