"""Other files of a run: generated samples, what it ran on, and how it ended.

samples.jsonl  {"step", "text"} a line, one for each evaluation; {"step", "prompt", "text"} for each of training.prompts
about.json     engine, devices, processor, versions: those of the last start
plan.json      what `raygpt plan` says of the run on these devices, and the most memory that was in use
result.json    {"state", "why", "time"} of the last driver that ended by itself

Each is written atomically, on a disk or in an object store, by the process that has the run's lock.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from raygpt import __version__, storage
from raygpt.runs.metrics import complete_lines, content_of

SAMPLES, ABOUT, PLAN, RESULT = "samples.jsonl", "about.json", "plan.json", "result.json"
PACKAGES = ("ray", "jax", "torch", "numpy")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: Literal["finished", "stopped", "failed"]
    why: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Self:
        """The outcome of training that raised nothing, a Ctrl-C, or an error (its first line)."""
        if error is None:
            return cls("finished")
        if isinstance(error, KeyboardInterrupt):
            return cls("stopped", "interrupted")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        is_heading = len(lines) > 1 and lines[0].endswith(":")  # as in Ray's errors
        return cls("failed", " ".join(lines[: 1 + is_heading]) or type(error).__name__)


@dataclass(frozen=True)
class _About:
    """What about.json must have."""

    versions: dict[str, str]


@dataclass(frozen=True)
class _Total:
    total: float


@dataclass(frozen=True)
class _Plan:
    """What plan.json must have."""

    steps: int
    tokens: int
    step_s: _Total
    memory: _Total


def write_result(run_folder: str, outcome: Outcome) -> None:
    """Record how a run ended, for `raygpt runs`."""
    storage.write_json(storage.join(run_folder, RESULT), {**asdict(outcome), "time": round(time.time(), 3)})


def read_result(run_folder: str) -> dict[str, Any] | None:
    """{"state", "why", "time"}; None if no driver has recorded a result."""
    return _read(run_folder, RESULT, Outcome)


def write_about(run_folder: str, about: Mapping[str, str]) -> None:
    """Record the engine's description of itself, this machine, and the versions of libraries."""
    storage.write_json(storage.join(run_folder, ABOUT), {**about, **_machine(), "versions": _versions()})


def read_about(run_folder: str) -> dict[str, Any]:
    """What the run last ran on; empty if that was not recorded."""
    return _read(run_folder, ABOUT, _About) or {}


def write_plan(run_folder: str, plan: Mapping[str, Any]) -> None:
    """Record the plan of a run on the devices that it has."""
    storage.write_json(storage.join(run_folder, PLAN), dict(plan))


def write_peak(run_folder: str, peak_bytes: int) -> None:
    """Add the most memory that was in use on a device to the plan, if there is one."""
    plan = read_plan(run_folder)
    if plan is not None:
        write_plan(run_folder, {**plan, "peak_bytes": peak_bytes})


def read_plan(run_folder: str) -> dict[str, Any] | None:
    """The plan of the run's last start; None if there is none."""
    return _read(run_folder, PLAN, _Plan)


def keep_sample(run_folder: str, step: int, *texts: str, prompts: Sequence[str] = ()) -> None:
    """Add a step's sample, or one for each prompt. Drops samples of later steps, from before a restart."""
    kept = [sample for sample in read_samples(run_folder) if sample["step"] < step]
    lines = [json.dumps(sample) + "\n" for sample in [*kept, *samples_of(step, texts, prompts)]]
    storage.write_bytes(storage.join(run_folder, SAMPLES), "".join(lines).encode())


def samples_of(step: int, texts: Sequence[str], prompts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """{"step", "text"} of each text, with "prompt" if there are prompts."""
    fields: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts] or [{}]
    return [{"step": step, **prompt, "text": text} for prompt, text in zip(fields, texts, strict=True)]


def read_samples(run_folder: str) -> list[dict[str, Any]]:
    """{"step", "text"}, some with "prompt", in order of steps."""
    samples = (sample for _, sample in complete_lines(content_of(storage.join(run_folder, SAMPLES))))
    return [sample for sample in samples if isinstance(sample.get("text"), str)]


def _read(run_folder: str, name: str, form: type) -> dict[str, Any] | None:
    read: dict[str, Any] | None = storage.read_json(storage.join(run_folder, name), form=form)
    return read


def _machine() -> dict[str, str]:
    """This machine, without its name: a report may be shown to others."""
    return {"processor": _processor(), "cores": str(os.cpu_count()), "system": platform.platform(terse=True)}


def _processor() -> str:
    """The processor's name; on Linux from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"raygpt": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # an engine that is not installed
    return versions
