"""Measures in a process of its own, so that one case that fails leaves the others alone."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def measured(name: str, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The JSON that a Python program prints last; what it says is shown if it fails."""
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environment))
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-4000:]}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
