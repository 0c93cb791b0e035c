"""Checkpoints of a run: `checkpoints/step-00000100/`, whole once `checkpoint.json` is in it.

The engine writes its files into the folder; the marker, written last, names every one of them with its size and
checksum, and says what the state belongs to. A folder without a marker, or one that does not match it, is no
checkpoint. Validation comes after saving, so the losses that decide which ones are kept lie beside them, in
`checkpoints/scores.json`.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.config import Run
from raygpt.errors import RaygptError

FOLDER, MARKER, SCORES = "checkpoints", "checkpoint.json", "scores.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    folder: str


def folder_of(run_folder: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return storage.join(run_folder, FOLDER, f"step-{step:08d}")


def commit(folder: str, step: int, facts: dict[str, Any]) -> None:
    """Declare a folder whole: from here on it is a checkpoint."""
    files = {name: [path.stat().st_size, _checksum(path)] for name, path in _files(Path(folder))}
    marker = {"step": step, **facts, "files": files}
    storage.write_bytes(storage.join(folder, MARKER), json.dumps(marker, indent=1).encode())


def newest(run_folder: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and a warning for each newer one that is damaged."""
    warnings: list[str] = []
    for step, folder in reversed(_committed(run_folder)):
        damage = _damage(folder)
        if damage is None:
            return Checkpoint(step, str(folder)), warnings
        warnings.append(f"checkpoint of step {step} is damaged ({damage}); the one before it is used")
    return None, warnings


def find(run_folder: str, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest whole one."""
    there = dict(_committed(run_folder))
    if step is None:
        checkpoint, _ = newest(run_folder)
        if checkpoint is None:
            raise RaygptError(f"{run_folder} has no whole checkpoint; name a run that has")
        return checkpoint
    if step not in there:
        have = ", ".join(map(str, there)) or "none"
        raise RaygptError(f"{run_folder} has no checkpoint of step {step}; there are: {have}")
    damage = _damage(there[step])
    if damage:
        raise RaygptError(f"{run_folder}: the checkpoint of step {step} is damaged ({damage}); name another step")
    return Checkpoint(step, str(there[step]))


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What its state belongs to."""
    read: dict[str, Any] = json.loads(storage.read_bytes(storage.join(checkpoint.folder, MARKER)))
    return read


def prune(run_folder: str, run: Run) -> None:
    """Delete all but those that the recipe keeps; the marker goes first, so that the rest is never taken for whole."""
    there = _committed(run_folder)
    steps = [step for step, _ in there]
    kept = set(steps[-run.keep :])
    kept |= {step for step in steps if run.keep_every and step % run.keep_every == 0}
    scored = {step: loss for step, loss in scores(run_folder).items() if loss is not None and step in steps}
    kept |= set(sorted(scored, key=lambda step: (scored[step], -step))[: run.keep_best])
    for step, folder in there:
        if step not in kept:
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def scores(run_folder: str) -> dict[int, float | None]:
    """Validation loss by step; None where there is nothing to validate on."""
    uri = storage.join(run_folder, FOLDER, SCORES)
    read = json.loads(storage.read_bytes(uri)) if storage.exists(uri) else {}
    return {int(step): loss for step, loss in read.items()}


def write_score(run_folder: str, step: int, loss: float | None) -> None:
    """Remember a step's validation loss."""
    known = {**scores(run_folder), step: loss}
    storage.write_bytes(storage.join(run_folder, FOLDER, SCORES), json.dumps(known).encode())


def _committed(run_folder: str) -> list[tuple[int, Path]]:
    folders = sorted(Path(run_folder, FOLDER).glob(f"step-*/{MARKER}"))
    return [(int(marker.parent.name.removeprefix("step-")), marker.parent) for marker in folders]


def _damage(folder: Path) -> str | None:
    """What is wrong with a committed checkpoint, or None."""
    try:
        expected = json.loads((folder / MARKER).read_bytes())["files"]
    except (ValueError, KeyError, TypeError):
        return f"{MARKER} cannot be read"
    for name, (size, checksum) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or _checksum(path) != checksum:
            return f"{name} was altered"
    return None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MARKER:
            yield path.relative_to(folder).as_posix(), path


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
