"""Trains a run in this process or in a subprocess, on the devices that it finds: for machines without Ray."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from raygpt import storage
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.engines import engine_of
from raygpt.engines.base import Engine
from raygpt.errors import DivergedError, RaygptError
from raygpt.planning.micro_batch_size import split_batch
from raygpt.recipes import load_recipe
from raygpt.runs import RECIPE
from raygpt.testing.session import LocalSession
from raygpt.training import prepared
from raygpt.training.events import Event, Metrics
from raygpt.training.loop import Loop

DIVERGED = 3  # exit status


class TimedSession(LocalSession):
    """Notes when metrics come, as a run's driver does."""

    def record(self, metrics: Metrics) -> None:
        super().record(replace(metrics, time=time.time()))


@contextlib.contextmanager
def timed_alone() -> Iterator[None]:
    """While no other process of a benchmark is timed: others may compile meanwhile."""
    with (Path(tempfile.gettempdir()) / "raygpt-benchmark.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def train(recipe: Recipe, watch: Callable[[Event], None], until: int | None, alone: bool = False) -> RaygptError | None:
    """Train, or go on, to a step or to the end. Returns the error, if any.

    `alone`: processes that do so take turns; the step is compiled before, while another one trains.
    """
    run = prepared.prepare_run(recipe, lambda progress: None, False, spare_cpus=lambda: 0)
    folder = run.totals.run_folder
    storage.write_bytes(storage.join(folder, RECIPE), run.original.to_yaml().encode())
    tokenizers.save(run.corpus.tokenizer, folder)
    module = engine_of(recipe.engine)
    module.set_up(run.recipe)
    split = split_batch(run.recipe, run.totals.vocab, module.find_devices(run.recipe))
    engine, session = module.Engine(run.recipe, run.totals.vocab, accumulation=split.accumulation), TimedSession()
    if alone:
        _compile(engine, run.totals.rows, run.totals.context)
    try:
        with timed_alone() if alone else contextlib.nullcontext():
            Loop(run.spec(None, until), engine, session).run()
    except RaygptError as error:
        return error
    for event in session.events:
        watch(event)
    return None


def train_in_subprocess(recipe: Recipe, watch: Callable[[Event], None], until: int | None) -> RaygptError | None:
    """The same in a subprocess, so that several can run at once; `watch` is not called. Threads of one process cannot:
    JAX compiles cuDNN's attention by capturing a stream."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several share the GPU
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(recipe.to_yaml())
        file.flush()
        words = [sys.executable, __file__, file.name, *([] if until is None else [str(until)])]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return None
    why = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return DivergedError(why) if done.returncode == DIVERGED else RaygptError(f"{recipe.run.name}: {why}")


def _compile(engine: Engine, rows: int, context: int) -> None:
    windows = np.zeros((rows, context + 1), np.int32)
    state, metrics = engine.step(engine.start(), engine.put(windows))
    engine.read(metrics)
    engine.window_losses(state, windows[: engine.micro_rows])


def _main(path: str, until: int | None = None) -> None:
    if error := train(load_recipe(path), lambda event: None, until):
        print(error, file=sys.stderr)
        sys.exit(DIVERGED if isinstance(error, DivergedError) else 1)


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
