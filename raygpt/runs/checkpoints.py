"""Checkpoints of a run: `checkpoints/step-00000100/`, complete once it has the marker `checkpoint.json`.

Every process writes its part of the state to a temporary folder and moves it into place. The marker, written last,
lists every file with its size and checksum, and records engine, recipe, tokenizer and data. A folder without a marker,
or one that does not match it, is not a checkpoint. Validation comes after saving, so the validation losses, which
decide which checkpoints are kept, are in a separate file, `checkpoints/scores.json`.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.config import Run
from raygpt.errors import DamagedError, RaygptError, first_line

FOLDER, MARKER, VAL_LOSSES = "checkpoints", "checkpoint.json", "scores.json"
PAUSES_S = (0.5, 2, 8)  # before each retry of a transfer to or from an object store
_bookkeeping = threading.Lock()  # for val losses and pruning: two threads do these, after a save and after a validation


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    folder: str


def folder_of(run_folder: str, step: int) -> str:
    """The folder of a step's checkpoint."""
    return storage.join(run_folder, FOLDER, f"step-{step:08d}")


def publish(part: Path, folder: str) -> dict[str, Any]:
    """Move the files that this process wrote into the checkpoint's folder. Returns name -> [size, checksum]."""
    written = {path.relative_to(part).as_posix(): path for path in sorted(part.rglob("*")) if path.is_file()}
    described = {name: [path.stat().st_size, _checksum(path)] for name, path in written.items()}
    with ThreadPoolExecutor(8 if storage.is_remote(folder) else 1) as threads:
        list(threads.map(lambda name: _retried(storage.move_file, written[name], storage.join(folder, name)), written))
    shutil.rmtree(part, ignore_errors=True)
    return described


def _retried(move: Callable[..., None], *arguments: Any) -> None:
    """Retry: an object store may fail temporarily, or limit the rate of requests."""
    for pause in PAUSES_S:
        try:
            move(*arguments)
        except RaygptError:
            time.sleep(pause)
        else:
            return
    move(*arguments)


def commit(folder: str, step: int, facts: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the marker, which makes the folder a checkpoint. `files` is what the processes published."""
    marker = {"step": step, **facts, "files": dict(sorted(files.items()))}
    storage.write_json(storage.join(folder, MARKER), marker)


def make_room(run_folder: str, step: int) -> None:
    """Remove a damaged checkpoint from where a new one is about to be written, and what failed saves have left: the
    storage may be full of it. Call it only while no save is running."""
    _remove(folder_of(run_folder, step))
    _remove_uncommitted(run_folder)
    storage.make_folder(storage.join(run_folder, FOLDER))


def remove_unfinished(run_folder: str) -> None:
    """Remove what interrupted saves have left. Call it only while no save is running."""
    _remove_uncommitted(run_folder)
    storage.delete_folder(str(parts_folder(run_folder)))


def _remove_uncommitted(run_folder: str) -> None:
    committed = {step for step, _ in _committed(run_folder)}
    for step, folder in _all(run_folder):
        if step not in committed:
            storage.delete_folder(folder)


def parts_folder(run_folder: str) -> Path:
    """Where this node's processes write before they publish: beside the checkpoints, or in /tmp for an object store."""
    if not storage.is_remote(run_folder):
        return Path(run_folder, FOLDER, "parts")
    return Path(tempfile.gettempdir(), f"raygpt-parts-{storage.digest(run_folder)}")


def newest_intact(run_folder: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run, and a warning for each newer one that is damaged.

    A checkpoint in an object store is fetched to this node to verify it.
    """
    warnings: list[str] = []
    for step, folder in reversed(_committed(run_folder)):
        damage = _damage(folder)
        if damage is None:
            return Checkpoint(step, folder), warnings
        warnings.append(f"checkpoint of step {step} is damaged ({damage}); the one before it is used")
    return None, warnings


def find_newest(run_folder: str) -> Checkpoint | None:
    """The newest committed checkpoint with a readable marker; its files are not verified."""
    there = (Checkpoint(*one) for one in reversed(_committed(run_folder)))
    return next((checkpoint for checkpoint in there if _marker(checkpoint.folder)), None)


@contextlib.contextmanager
def fetched_to_node(checkpoint: Checkpoint) -> Iterator[str]:
    """A local folder with the checkpoint's files: its own, or a copy that is fetched once per node, and is kept at
    least until the block ends."""
    if storage.is_remote(checkpoint.folder):
        with _fetched(checkpoint.folder) as copy:
            yield str(copy)
    else:
        yield checkpoint.folder


@contextlib.contextmanager
def _fetched(folder: str) -> Iterator[Path]:
    """The local copy. Its name is a digest of the marker: a run that was deleted and trained again gets a new one."""
    marker = storage.read_bytes(storage.join(folder, MARKER))
    copies = storage.cache_folder() / FOLDER / storage.digest(folder.rpartition("/")[0])  # one copy per run
    copy = copies / storage.digest(marker.decode())
    storage.make_folder(str(copies))
    with (copies / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the node's other workers wait for the first one's download
        if not (copy / MARKER).is_file():
            for other in storage.folders(str(copies)):
                if other != copy.name:  # keep this one's files, left by an interrupted download
                    _evict(copies / other)
            expected = json.loads(marker)["files"]
            _download(folder, copy, expected)
            if _altered(copy, expected):  # perhaps damaged in transfer
                shutil.rmtree(copy)
                _download(folder, copy, expected)
            damage = _altered(copy, expected)
            if damage:
                shutil.rmtree(copy)
                raise DamagedError(f"{folder} is damaged ({damage}); name another step")
            storage.write_bytes(str(copy / MARKER), marker)
        reading = (copy / MARKER).open()
        fcntl.flock(reading, fcntl.LOCK_SH)
    with reading:
        yield copy


def _evict(copy: Path) -> None:
    """Delete a copy, unless a process reads it: such a process holds a lock on its marker."""
    with contextlib.suppress(FileNotFoundError), (copy / MARKER).open("r+") as marker:  # none: not wholly fetched
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        (copy / MARKER).unlink()  # first, so that none is left half deleted
    shutil.rmtree(copy, ignore_errors=True)


def _download(folder: str, copy: Path, names: Iterable[str]) -> None:
    """Download the files that are missing."""
    missing = [name for name in names if not (copy / name).exists()]
    with ThreadPoolExecutor(8) as threads:
        uris = (storage.join(folder, name) for name in missing)
        list(threads.map(_retried, [storage.download] * len(missing), uris, (copy / name for name in missing)))


def find(run_folder: str, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest complete one."""
    if step is None:
        checkpoint, _ = newest_intact(run_folder)
        if checkpoint is None:
            raise RaygptError(f"{run_folder} has no complete checkpoint; name a run that has")
        return checkpoint
    there = dict(_committed(run_folder))
    if step not in there:
        have = f"there are: {', '.join(map(str, there)) or 'none'}"
        if step in dict(_all(run_folder)):
            raise RaygptError(f"{run_folder}: the checkpoint of step {step} is unfinished; {have}")
        raise RaygptError(f"{run_folder} has no checkpoint of step {step}; {have}")
    damage = _damage(there[step])
    if damage:
        raise RaygptError(f"{run_folder}: the checkpoint of step {step} is damaged ({damage}); name another step")
    return Checkpoint(step, there[step])


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the marker records: engine, recipe, tokenizer, data."""
    marker = _marker(checkpoint.folder)
    if marker is None:
        raise DamagedError(f"{checkpoint.folder} is damaged ({MARKER} cannot be read); name another step")
    return marker


def prune(run_folder: str, run: Run, upto: int) -> None:
    """Delete all checkpoints but those that the recipe keeps; the marker first, so that none is left half deleted.

    Checkpoints after step `upto` are damaged ones that the run could not resume from; they are left for inspection.
    """
    with _bookkeeping:
        _prune(run_folder, run, upto)


def _prune(run_folder: str, run: Run, upto: int) -> None:
    there = [(step, folder) for step, folder in _committed(run_folder) if step <= upto]
    steps = [step for step, _ in there]
    kept = set(steps[-run.keep :])
    kept |= {step for step in steps if run.keep_every and step % run.keep_every == 0}
    kept |= set(best_first(steps, val_losses(run_folder))[: run.keep_best])
    for step, folder in there:
        if step not in kept:
            _remove(folder)


def _remove(folder: str) -> None:
    storage.delete(storage.join(folder, MARKER))
    storage.delete_folder(folder)


def val_losses(run_folder: str) -> dict[int, float | None]:
    """Validation loss by step; None if there is no validation text."""
    read = storage.read_json(storage.join(run_folder, FOLDER, VAL_LOSSES), form=dict[int, float | None]) or {}
    return {int(step): loss for step, loss in read.items()}


def is_evaluated(run_folder: str, step: int) -> bool:
    """Whether a step was evaluated. False if that cannot be read: evaluating again only costs time."""
    try:
        return step in val_losses(run_folder)
    except (OSError, RaygptError):
        return False


def best_first(steps: Iterable[int], losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a validation loss, sorted by it, lowest first; the newest first among equals."""
    known = {step: loss for step in steps if (loss := losses.get(step)) is not None and not math.isnan(loss)}
    return sorted(known, key=lambda step: (known[step], -step))


def write_val_loss(run_folder: str, step: int, loss: float | None) -> None:
    """Record a step's validation loss."""
    with _bookkeeping:
        known = {**val_losses(run_folder), step: loss}
        storage.write_json(storage.join(run_folder, FOLDER, VAL_LOSSES), known)


def folders(run_folder: str) -> dict[int, bool]:
    """The steps of all checkpoint folders, in order, and whether each is committed."""
    return {step: _is_committed(folder) for step, folder in _all(run_folder)}


def _all(run_folder: str) -> list[tuple[int, str]]:
    """Step and folder of all checkpoint folders, committed or not, in order."""
    home = storage.join(run_folder, FOLDER)
    names = (re.fullmatch(r"step-([0-9]+)", name) for name in storage.folders(home))
    return sorted((int(name[1]), storage.join(home, name[0])) for name in names if name)


def _committed(run_folder: str) -> list[tuple[int, str]]:
    return [(step, folder) for step, folder in _all(run_folder) if _is_committed(folder)]


def _is_committed(folder: str) -> bool:
    return storage.exists(storage.join(folder, MARKER))


def _damage(folder: str) -> str | None:
    """What is wrong with a committed checkpoint, or None."""
    marker = _marker(folder)
    if marker is None:
        return f"{MARKER} cannot be read"
    expected, there = marker["files"], storage.files(folder)
    for name, (size, _) in expected.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != size:
            return f"{name} was altered"
    if not storage.is_remote(folder):
        return _altered(Path(folder), expected)
    try:
        with _fetched(folder):
            return None
    except DamagedError as error:
        return str(error)


def _marker(folder: str) -> dict[str, Any] | None:
    """The content of a checkpoint's marker, or None if it is damaged."""
    try:
        read = storage.read_json(storage.join(folder, MARKER))
    except DamagedError:
        return None
    return read if isinstance(read, dict) and isinstance(read.get("files"), dict) else None


def _altered(folder: Path, expected: dict[str, Any]) -> str | None:
    """The first file whose checksum is wrong, if any."""
    for name, (_, checksum) in expected.items():
        try:
            if _checksum(folder / name) != checksum:
                return f"{name} was altered"
        except OSError as error:  # a bad sector
            return f"{name} cannot be read ({first_line(error)})"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
