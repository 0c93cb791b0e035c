"""A run directory, local or on s3, opened for reading. Every verb after `train` starts here.

    run = open_run("runs/tiny")
    run.recipe.model.width, run.metrics[-1], run.tokenizer.vocab
    with checkpoints.fetched_to_node(run.pick()) as folder: ...

Nothing here imports an engine or Ray.
"""

import itertools
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raygpt import storage
from raygpt.config import Recipe, Run
from raygpt.corpus import tokenizers
from raygpt.corpus.store import TRIALS
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.errors import RaygptError, StorageError
from raygpt.recipes import read_recipe
from raygpt.runs import checkpoints, metrics, records
from raygpt.runs.checkpoints import Checkpoint
from raygpt.runs.metrics import Line

RECIPE = "recipe.yaml"
LOCK = "hold.json"  # not "lock.json": a driver of an older version must find it
RUNS = Run().storage  # where runs are by default


@dataclass(frozen=True)
class OpenRun:
    """The contents of a run directory. Each is read once and cached: reopen a run that is still training."""

    folder: str

    @property
    def name(self) -> str:
        return self.folder.rstrip("/").rsplit("/", 1)[-1]

    @property
    def home(self) -> str:
        """The parent folder, with other runs and the token stores."""
        return self.folder.rstrip("/").rpartition("/")[0]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe as it was given, with epochs not converted."""
        return read_recipe(storage.join(self.folder, RECIPE))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.folder)

    @cached_property
    def metrics(self) -> list[Line]:
        """Every line that was logged, in order."""
        return metrics.read(self.folder)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """{"step", "text"} of every evaluation."""
        return records.read_samples(self.folder)

    @cached_property
    def about(self) -> dict[str, Any]:
        """Engine, devices and versions of the last start."""
        return records.read_about(self.folder)

    @cached_property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if it is given in epochs and has no checkpoint yet."""
        if self.recipe.training.steps is not None or not self.steps:
            return self.recipe.training.steps
        newest = Checkpoint(self.steps[-1], checkpoints.folder_of(self.folder, self.steps[-1]))
        steps: int = checkpoints.facts(newest)["recipe"]["training"]["steps"]
        return steps

    # Checkpoints

    @cached_property
    def steps(self) -> list[int]:
        """Steps whose checkpoint was committed, in order."""
        return [step for step, whole in self._folders.items() if whole]

    @cached_property
    def val_losses(self) -> dict[int, float]:
        """Validation loss of the steps that have one, with a checkpoint or without."""
        return {step: loss for step, loss in checkpoints.val_losses(self.folder).items() if loss is not None}

    def pick(self, step: int | None = None, best: bool = True) -> Checkpoint:
        """The checkpoint of a step; else the one with the lowest validation loss, or the newest if none has a loss."""
        if step is not None:
            return checkpoints.find(self.folder, step)
        candidates = checkpoints.best_first(self.steps, self.val_losses) if best else []
        for candidate in dict.fromkeys([*candidates, *reversed(self.steps)]):
            try:
                return checkpoints.find(self.folder, candidate)
            except StorageError:
                raise  # it may be intact
            except RaygptError:
                continue  # damaged
        unfinished = ", ".join(map(str, self._folders))
        begun = f" (unfinished or damaged: {unfinished})" if unfinished else ""
        raise RaygptError(f"{self.folder} has no complete checkpoint{begun}; train it further: raygpt train")

    @cached_property
    def _folders(self) -> dict[int, bool]:
        return checkpoints.folders(self.folder)


def has_taken_steps(folder: str) -> bool:
    """Whether a run has anything to lose: a checkpoint, complete or not, or the metrics of a step."""
    return bool(checkpoints.folders(folder)) or any("loss" in line for line in metrics.read(folder))


def forget_start(folder: str) -> None:
    """Delete what a start that took no step wrote about step 0: it may be another model's, and this is no restart."""
    for file in (metrics.METRICS, records.SAMPLES, storage.join(checkpoints.FOLDER, checkpoints.VAL_LOSSES)):
        storage.delete(storage.join(folder, file))


def free_name(folder: str) -> str:
    """The next name beside this one that neither a run nor a sweep has: tiny-2 for tiny, tiny-3 for tiny-2."""
    home, _, name = folder.rstrip("/").rpartition("/")
    numbered = re.fullmatch(r"(.+)-([0-9]{1,9})", name)
    stem, after = (numbered[1], int(numbered[2])) if numbered else (name, 1)
    names = (f"{stem}-{number}" for number in itertools.count(after + 1))
    return next(
        name for name in names if not any(storage.exists(storage.join(home, name, file)) for file in (RECIPE, TRIALS))
    )


def split_step(name: str) -> tuple[str, int | None]:
    """Run and step of RUN@STEP; of any other name, such as runs/me@home, no step."""
    run, at, step = name.rpartition("@")
    return (run, int(step)) if at and step.isdecimal() else (name, None)


def find_folder(name: str) -> str:
    """The absolute folder of a run: a path, an s3:// address, or the name of a run in ./runs, or of a sweep that is
    being trained there."""
    folder = storage.absolute(name).rstrip("/")
    in_runs = storage.absolute(storage.join(RUNS, name))
    return in_runs if "/" not in name and not _is_run(folder) and _is_run(in_runs) else folder


def _is_run(folder: str) -> bool:
    """Whether it is a run, or a sweep that is being trained, which has only a lock."""
    return any(storage.exists(storage.join(folder, file)) for file in (RECIPE, LOCK))


def open_run(folder: str) -> OpenRun:
    """The run in a folder, at an s3:// address or of a name; refuses anything else."""
    run = OpenRun(find_folder(folder))
    if not storage.exists(storage.join(run.folder, RECIPE)):
        raise RaygptError(f"{folder} is no run, it has no {RECIPE}; {_which_run(folder)}")
    return run


def _which_run(folder: str) -> str:
    """What to write instead of a folder that is no run: a run in it, or the run of which it is a checkpoint."""
    inside = [name for name in sorted(storage.folders(folder)) if storage.exists(storage.join(folder, name, RECIPE))]
    if inside:
        return f"name one of the runs in it, e.g. {storage.join(folder.rstrip('/'), inside[0])}"
    checkpoint = re.fullmatch(rf"(.+)/{checkpoints.FOLDER}/step-0*([0-9]+)/?", folder)
    if checkpoint and storage.exists(storage.join(checkpoint[1], RECIPE)):
        return f"it is a checkpoint: write {checkpoint[1]} --step {checkpoint[2]}"
    return f"name a folder that raygpt train made; `raygpt runs` lists those in {RUNS}/"
