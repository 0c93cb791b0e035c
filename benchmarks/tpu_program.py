"""A training step compiled for TPUs that are not here, up to the moment when its buffers have places in memory.

With `libtpu` from PyPI this is the compiler of the chips. Memory and exchanges are known after its first tenth; what is
left is generating code, a minute of a core for each program. So the compiler runs in a process of its own, writes what
it has found to a folder, and is ended there, unless the whole program is wanted: it fails where the chips would fail.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.5
FILE = "*jit_step*.{}.txt"
ASSIGNED, HLO = FILE.format("after_optimizations-buffer-assignment"), FILE.format("after_optimizations")
LAST = FILE.format("after_optimizations_after_buffer_assignment")  # written behind the two others


@dataclass(frozen=True)
class Case:
    """A recipe with settings, and the devices that its step is compiled for, as `raygpt plan --on` names them."""

    on: str
    recipe: str
    settings: Mapping[str, Any]
    accumulation: int = 1


@dataclass(frozen=True)
class Program:
    """Bytes of one chip, and the program's text."""

    state: int
    temporary: int
    text: str
    seconds: float

    @property
    def total(self) -> int:
        return self.state + self.temporary


def program_of(case: Case, whole: bool = False) -> Program:
    """Compile a step; `whole` also generates its code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, errors = Path(name), Path(name) / "errors"
        described = json.dumps([case.on, case.recipe, dict(case.settings), case.accumulation, name])
        with errors.open("w") as file:
            compiler = subprocess.Popen([sys.executable, __file__, described], stdout=file, stderr=file)
        while compiler.poll() is None and (whole or not _is_written(folder)):
            time.sleep(POLL_S)
        failed = compiler.poll() not in (None, 0)
        compiler.kill()
        compiler.wait()
        if failed or not _is_written(folder):
            raise RuntimeError(f"{case}: {errors.read_text()[-2000:]}")
        state, temporary = assigned(_text(folder, ASSIGNED))
        return Program(state, temporary, _text(folder, HLO), time.monotonic() - began)


def assigned(text: str) -> tuple[int, int]:
    """Bytes of the arguments and of all else in a chip's main memory (other memories have a colour)."""
    allocations = re.findall(r"(?m)^allocation \d+: size (\d+), (?!color)(.*)$", text)
    state = sum(int(size) for size, rest in allocations if "parameter " in rest)
    return state, sum(int(size) for size, rest in allocations if "preallocated-temp" in rest)


def _is_written(folder: Path) -> bool:
    """Whether the last file is there and does not grow any more."""
    found = list(folder.glob(LAST))
    if not found:
        return False
    size = found[0].stat().st_size
    time.sleep(2 * POLL_S)
    return found[0].stat().st_size == size > 0


def _text(folder: Path, pattern: str) -> str:
    return next(folder.glob(pattern)).read_text()


def _compile(on: str, name: str, settings: dict[str, Any], accumulation: int, folder: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # for what is computed here; the TPUs are only compiled for
    from raygpt.engines.jax.compiled import tpu_devices
    from raygpt.engines.jax.engine import JaxEngine
    from raygpt.recipes import load_recipe

    slices, _, chips = on.rpartition("*")
    devices = tpu_devices(chips, int(slices or 1))
    engine = JaxEngine(load_recipe(name, settings), VOCAB, devices=devices, accumulation=accumulation)
    engine.lower_step().compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})


VOCAB = 50257  # of GPT-2's tokenizer

if __name__ == "__main__":
    _compile(*json.loads(sys.argv[1]))
