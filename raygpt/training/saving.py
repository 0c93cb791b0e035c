"""Checkpoints are written behind the training: the loop begins a save, a thread finishes it.

Every process writes its part of the state aside, publishes the files into the checkpoint's folder, and tells rank 0
their sizes and checksums. When all have told, rank 0 commits. A save that fails costs a warning, and the checkpoints
before it are as they were; only several in a row end the run.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raygpt.engines.base import Engine
from raygpt.errors import RaygptError, StorageError, first_line
from raygpt.runs import checkpoints
from raygpt.training.events import CheckpointSaved
from raygpt.training.session import Session
from raygpt.training.task import Task

PATIENCE_S = 5.0  # that a save waits for the one before it, and training with it; then it is left out
BEAT_S = 5.0  # between two signs of life while the last save is waited for
ASKED_S = 0.05
LONGEST_S = 1800.0  # that a save may take; a disk that does not answer any more would hold it for ever
RETRIED_S = 5.0  # before the last save of a run is tried again

Check = Callable[[int, dict[str, float]], None]


class Saving:
    """The checkpoints of one run. `check` raises where a step's metrics show that its state is no good."""

    def __init__(self, task: Task, engine: Engine, session: Session, check: Check):
        self._task, self._engine, self._session, self._check = task, engine, session, check
        self._limit = task.recipe.run.failed_saves
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun, self._step = 0.0, -1  # when the last save was, and of which step
        self._failed = 0  # in a row; of rank 0
        self._newest = 0  # the last step that was committed; of rank 0

    def begin(self, state: Any, step: int, metrics: Any, is_end: bool = False) -> bool:
        """Begin to save; all processes at the same step. False where that was begun before, the one before is not
        finished yet, or the storage refuses: `finish` sees to it that the end is saved all the same."""
        if step == self._step or not self._session.decide(lambda: self._is_free(step, is_end) and self._has_room(step)):
            return False
        if self._thread:
            self._thread.join()  # rank 0's has ended, so that this one only has its last lines to do
        self._begun, self._step = time.monotonic(), step
        parts, rank = checkpoints.parts_of(self._task.run_folder), self._session.rank
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

        self._thread = threading.Thread(target=work, name=f"save-{step}")  # no daemon: an exit waits for it
        self._thread.start()
        return True

    def look(self) -> None:
        """Raise what a thread found: a loss that is not a number, or too many failures."""
        if self._error:
            raise self._error

    def finish(self, state: Any, step: int, metrics: Any) -> None:
        """Until this step, the last, is saved; it is tried again as often as saves may fail."""
        while self._session.decide(lambda: self._newest_after_waiting()) != step:
            self._session.beat(step)
            if self._session.decide(lambda: not self._is_busy() and self._pause()):
                self._step = -1  # what was begun has failed
                self.begin(state, step, metrics)
        self.look()

    def _newest_after_waiting(self) -> int:
        if self._thread:
            self._thread.join(BEAT_S)
        self.look()
        return self._newest

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _pause(self) -> bool:
        if self._failed:
            time.sleep(RETRIED_S)
        return True

    def _is_free(self, step: int, is_end: bool) -> bool:
        """Rank 0: whether the save before is finished, everywhere; it is waited for, but not for ever."""
        if self._thread:
            self._thread.join(min(PATIENCE_S, (self._task.recipe.training.hang_after or PATIENCE_S) / 2))
        self.look()
        if self._is_busy() and not is_end:
            self._session.warn(f"the checkpoint of step {step} is left out: the one before it is still being written")
        return not self._is_busy()

    def _has_room(self, step: int) -> bool:
        """Rank 0: make a place for a checkpoint, if the storage lets us."""
        self._session.expect(step)
        try:
            checkpoints.make_room(self._task.run_folder, step)
        except (OSError, RaygptError) as error:
            self._fail(step, str(error))
            return False
        return True

    def _publish(self, step: int, part: Any, error: BaseException | None) -> None:
        """Finish this process's part, and say so, or say what went wrong."""
        try:
            if error:
                raise error
            self._engine.wait_for_save()
            self._task.faults.strike(step, self._session.rank, "save")
            files = checkpoints.publish(part, checkpoints.folder_of(self._task.run_folder, step))
            self._session.add_part(step, {"files": files})
        except Exception as raised:
            self._session.add_part(step, {"error": first_line(raised)})

    def _conclude(self, step: int, metrics: Any) -> None:
        """Rank 0: commit when all parts are there, unless the state is no good."""
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
            if time.monotonic() - self._begun > LONGEST_S:
                raise StorageError(f"not all workers have written their part after {LONGEST_S / 60:.0f} minutes")
            time.sleep(ASKED_S)
        return parts

    def _commit(self, step: int, files: dict[str, Any]) -> None:
        folder = checkpoints.folder_of(self._task.run_folder, step)
        self._session.flush()  # or the metrics up to this step could be lost, which nobody will log again
        try:
            checkpoints.commit(folder, step, self._task.facts, files)
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
            checkpoints.prune(self._task.run_folder, self._task.recipe.run, step)
        except (OSError, RaygptError) as error:
            self._session.warn(f"older checkpoints could not be deleted ({error})")

    def _fail(self, step: int, reason: str) -> None:
        """Warn; too many in a row end the run, while the checkpoints that there are still are of use."""
        self._failed += 1
        said = f"the checkpoint of step {step} could not be saved ({reason})"
        if self._failed >= self._limit:
            self._error = RaygptError(
                f"{said}, and so it was {self._failed} times in a row; the ones before are whole. Make room in "
                "run.storage or mend it, then run the same command again"
            )
            return
        self._session.warn(f"{said}; training goes on, and ends after {self._limit} in a row")


def _left_by(rank: int, parts: Path) -> list[Path]:
    """What a save of this rank that failed or was killed has left there, also under a name for the time of writing.

    Other ranks may be writing theirs just now.
    """
    ours = re.compile(rf"step-[0-9]+-{rank}(\..*)?")
    return [path for path in parts.glob("step-*") if ours.fullmatch(path.name)]
