"""Saves checkpoints in the background: the loop starts a save, a thread finishes it.

Every process writes its part of the state to a temporary folder, moves the files into the checkpoint's folder, and
reports their sizes and checksums. When all have reported, rank 0 commits. A failed save is a warning and leaves earlier
checkpoints untouched; only several failures in a row end the run.
"""

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raygpt.engines.base import Engine
from raygpt.errors import RaygptError, StorageError, TransientError, first_line
from raygpt.runs import checkpoints
from raygpt.training.events import CheckpointSaved
from raygpt.training.session import Session
from raygpt.training.spec import RunSpec

PATIENCE_S = 5.0  # how long a save, and with it training, waits for the previous one; then the save is skipped
HEARTBEAT_S = 5.0  # between two heartbeats while waiting for the last save
PARTS_POLL_S = 0.05  # between two polls for the parts that other workers have written
SAVE_TIMEOUT_S = 1800.0  # the longest that a save may take: a disk that stopped responding would block it for ever
RETRY_PAUSE_S = 5.0  # before the last save of a run is retried

Check = Callable[[int, dict[str, float]], None]


class Saving:
    """Saves the checkpoints of one run. `check` raises if a step's metrics show that its state has diverged."""

    def __init__(self, spec: RunSpec, engine: Engine, session: Session, check: Check):
        self._spec, self._engine, self._session, self._check = spec, engine, session, check
        self._limit = spec.recipe.run.failed_saves
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun, self._step = 0.0, -1  # when the last save began, and its step
        self._failed = 0  # failures in a row; rank 0 only
        self._newest = 0  # the last committed step; rank 0 only

    def begin(self, state: Any, step: int, metrics: Any, is_end: bool = False) -> bool:
        """Start a save; all processes at the same step. False if this step's save has begun already, the previous one
        is not finished, or the storage fails: `finish` retries for the last step."""
        if step == self._step or not self._session.decide(lambda: self._is_free(step, is_end) and self._has_room(step)):
            return False
        if self._thread:
            self._thread.join()  # rank 0's thread has ended, so this one is about to
        self._begun, self._step = time.monotonic(), step
        parts, rank = checkpoints.parts_folder(self._spec.run_folder), self._session.rank
        part = parts / f"step-{step:08d}-{rank}"
        error: BaseException | None = None
        try:
            for left in _left_by(rank, parts):
                shutil.rmtree(left, ignore_errors=True)
            self._engine.save(state, str(part))
        except Exception as raised:
            error = raised

        def work() -> None:
            self._publish(step, part, error)
            if self._session.rank == 0:
                self._conclude(step, metrics)

        self._thread = threading.Thread(target=work, name=f"save-{step}")  # no daemon: the process waits for it at exit
        self._thread.start()
        return True

    def raise_error(self) -> None:
        """Raise the error of a save thread, if any: divergence, or too many failures."""
        if self._error:
            raise self._error

    def finish(self, state: Any, step: int, metrics: Any) -> None:
        """Save the last step, retrying as often as saves may fail."""
        while self._session.decide(self._newest_after_waiting) != step:
            self._session.beat(step)
            if self._session.decide(lambda: self._has_failed(step) and self._pause()):
                self._step = -1
                self.begin(state, step, metrics)
        self.raise_error()

    def _newest_after_waiting(self) -> int:
        if self._thread:
            self._thread.join(HEARTBEAT_S)
        self.raise_error()
        return self._newest

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_failed(self, step: int) -> bool:
        """Rank 0: whether the save of a step has ended without a checkpoint."""
        return not self._is_busy() and self._newest != step

    def _pause(self) -> bool:
        if self._failed:
            time.sleep(RETRY_PAUSE_S)
        return True

    def _is_free(self, step: int, is_end: bool) -> bool:
        """Rank 0: whether the previous save is finished in all processes; waits for it a limited time."""
        if self._thread:
            self._thread.join(min(PATIENCE_S, (self._spec.recipe.training.hang_after or PATIENCE_S) / 2))
        self.raise_error()
        if self._is_busy() and not is_end:
            self._session.warn(f"the checkpoint of step {step} is skipped: the one before it is still being written")
        return not self._is_busy()

    def _has_room(self, step: int) -> bool:
        """Rank 0: prepare the checkpoint's folder; False if the storage fails."""
        self._session.expect(step)
        try:
            checkpoints.make_room(self._spec.run_folder, step)
        except (OSError, RaygptError) as error:
            self._fail(step, str(error))
            return False
        return True

    def _publish(self, step: int, part: Any, error: BaseException | None) -> None:
        """Finish this process's part and report it, or report the error."""
        try:
            if error:
                raise error
            self._engine.wait_for_save()
            self._spec.faults.strike(step, self._session.rank, "save")
            files = checkpoints.publish(part, checkpoints.folder_of(self._spec.run_folder, step))
            self._session.add_part(step, {"files": files})
        except Exception as raised:
            self._session.add_part(step, {"error": _reason(raised)})

    def _conclude(self, step: int, metrics: Any) -> None:
        """Rank 0: commit when all parts are written, unless the state has diverged."""
        try:
            parts = self._wait_for_all(step)
            errors = [part["error"] for part in parts.values() if "error" in part]
            if errors:
                raise StorageError(errors[0])
            self._check(step, self._engine.read(metrics))
            self._commit(step, {name: facts for part in parts.values() for name, facts in part["files"].items()})
        except StorageError as error:
            self._fail(step, str(error))
        except Exception as error:
            self._error = error

    def _wait_for_all(self, step: int) -> dict[int, dict[str, Any]]:
        while len(parts := self._session.parts_of(step)) < self._session.workers:
            if time.monotonic() - self._begun > SAVE_TIMEOUT_S:
                raise StorageError(f"not all workers have written their part after {SAVE_TIMEOUT_S / 60:.0f} minutes")
            time.sleep(PARTS_POLL_S)
        return parts

    def _commit(self, step: int, files: dict[str, Any]) -> None:
        folder = checkpoints.folder_of(self._spec.run_folder, step)
        self._session.flush()  # a resumed run does not log the metrics up to this step again
        try:
            checkpoints.commit(folder, step, self._spec.facts, files)
        except (OSError, RaygptError) as error:
            self._fail(step, str(error))
            return
        self._failed, self._newest = 0, step
        self._prune(step)
        self._session.saved(step, folder)
        took = time.monotonic() - self._begun
        self._session.emit(CheckpointSaved(step, folder, took))

    def _prune(self, step: int) -> None:
        try:
            checkpoints.prune(self._spec.run_folder, self._spec.recipe.run, step)
        except (OSError, RaygptError) as error:
            self._session.warn(f"older checkpoints could not be deleted ({error})")

    def _fail(self, step: int, reason: str) -> None:
        """Warn; raise after too many failures in a row, while the existing checkpoints are still recent."""
        self._failed += 1
        said = f"the checkpoint of step {step} could not be saved ({reason})"
        if self._failed >= self._limit:
            self._error = TransientError(
                f"{said}, {self._failed} times in a row; the ones before are intact. Make room in "
                "run.storage or fix it, then run the same command again"
            )
            return
        self._session.warn(f"{said}; training continues, and ends after {self._limit} in a row")


def _reason(error: BaseException) -> str:
    """Why a save has failed. Orbax adds the names of two of its temporary files to what the disk says."""
    text, no_space = first_line(error), os.strerror(errno.ENOSPC)
    return no_space if no_space in text else text


def _left_by(rank: int, parts: Path) -> list[Path]:
    """Files that a failed or killed save of this rank has left there, also under temporary names.

    Other ranks may be writing theirs at the same time.
    """
    ours = re.compile(rf"step-[0-9]+-{rank}(\..*)?")
    return [path for path in parts.glob("step-*") if ours.fullmatch(path.name)]
