"""What every benchmark writes beside its figures: hardware, versions, date and the command that gave them."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("raygpt", "ray", "jax", "libtpu", "torch", "numpy", "pyarrow", "tiktoken", "tokenizers")


def show(figures: dict[str, Any], name: str | None) -> None:
    """Print a line for each figure; with a name, write them too."""
    table = Table("", "", box=None, show_header=False)
    for label, value in figures.items():
        table.add_row(label, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if name:
        print(save(name, figures))


def save(name: str, figures: dict[str, Any], **more: Any) -> Path:
    """Write benchmarks/results/NAME.json; `more` are further keys beside the figures."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**_circumstances(), **more, "figures": figures}, indent=2) + "\n")
    return path


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *shown(sys.argv)]),
        "hardware": ", ".join([f"{os.cpu_count()} × {_cpu()}", *_gpus()]),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def shown(arguments: list[str]) -> list[str]:
    """Paths of this machine do not matter to others: the last part is enough, also behind `key=` or `kind:`."""
    return [re.sub(r"^([\w.]+=)?(\w+:)?/.*?([^/]+)$", r"\1\2\3", word) for word in arguments]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    """The names of this machine's NVIDIA GPUs."""
    if not shutil.which("nvidia-smi"):
        return []
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
