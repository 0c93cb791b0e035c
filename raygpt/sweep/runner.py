"""Trains many runs on one cluster, as many at once as it has room for. Each is an ordinary run directory.

What is finished is not trained again and what was interrupted resumes, so a driver that was killed is simply started
again. A thread for each run calls what `raygpt train` calls. Ray Tune would add a process for each trial and a second
record of what is done, and none of its searches and schedulers knows that rates fall.
"""

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from raygpt import storage
from raygpt.cluster import alive_nodes
from raygpt.config import Recipe
from raygpt.corpus.mixture import Mixture
from raygpt.corpus.prepare import Watch as WatchPreparing
from raygpt.errors import DivergedError, RaygptError, StoppedError
from raygpt.runs import checkpoints, free_name
from raygpt.runs.lock import locked
from raygpt.training import prepared, resume
from raygpt.training.events import Event, Warned
from raygpt.training.prepared import run_folder_of
from raygpt.training.stopping import STOP_FILE, STOP_POLL_S, clear_stop_request, stoppable

POLL_S = 0.2
Watch = Callable[["Leg", Event], None]
Train = Callable[[Recipe, Callable[[Event], None], int | None], BaseException | None]  # returns the error, if any


@dataclass(frozen=True)
class Leg:
    """A run to train, to its end or to a step before it."""

    recipe: Recipe  # with its length in steps, the run's name and where it goes
    until: int | None = None

    @property
    def folder(self) -> str:
        return run_folder_of(self.recipe)

    @property
    def last(self) -> int:
        return self.until or self.recipe.steps

    @property
    def is_done(self) -> bool:
        """Whether it is trained so far; at its end, also evaluated."""
        newest = checkpoints.find_newest(self.folder)
        if newest is None or newest.step < self.last:
            return False
        return self.until is not None or checkpoints.is_evaluated(self.folder, self.last)

    @property
    def loss(self) -> float:
        """The validation loss at the end; infinite if it is not a number."""
        loss = checkpoints.val_losses(self.folder)[self.last]
        if loss is None:
            raise RaygptError("data.val: holds out too little text to compare validation losses; write e.g. 0.05")
        return loss if math.isfinite(loss) else math.inf


def _train_on_ray(recipe: Recipe, watch: Callable[[Event], None], until: int | None) -> BaseException | None:
    """As `raygpt train` does it, to a step or to the end."""
    from raygpt.training.ray import launch  # here: a plan of a sweep needs no Ray

    return launch.train(launch.prepare_run(recipe), watch, until=until).error


@dataclass
class Runner:
    """Trains the runs of one folder, whose lock it has."""

    folder: str
    at_once: int
    watch: Watch
    _poll: Callable[[], None]
    _stopping: threading.Event
    train_one: Train = _train_on_ray
    diverged: set[str] = field(default_factory=set)  # names of runs
    _error: BaseException | None = None
    _asked: float = 0.0  # when the runs were last asked to stop

    def train(self, legs: Sequence[Leg]) -> None:
        """Train them all, in this order as far as there is room. Raises the first error other than divergence, once
        the others are saved."""
        waiting, running = deque(leg for leg in legs if not self._is_done(leg)), list[_Thread]()
        while running or (waiting and not self._stopping.is_set()):
            while waiting and len(running) < self.at_once and not self._stopping.is_set():
                leg = waiting.popleft()
                running.append(_Thread(leg, functools.partial(self.watch, leg), self.train_one))
            for thread in list(running):
                thread.join(POLL_S / len(running))
                if not thread.is_alive():
                    running.remove(thread)
                    self._conclude(thread.leg, thread.error)
            self._poll()
            if self._stopping.is_set():
                self._stop(running)
        if self._error:
            raise self._error
        if self._stopping.is_set():
            raise StoppedError(f"{self.folder} is stopped, and its runs are saved; the same command goes on")

    def _is_done(self, leg: Leg) -> bool:
        if changed := resume.changes(leg.folder, leg.recipe):
            raise RaygptError(
                f"{leg.folder} is a run of another recipe ({changed}); write run.name={free_name(self.folder)} to "
                "begin a new folder of runs"
            )
        return str(leg.recipe.run.name) in self.diverged or leg.is_done

    def _conclude(self, leg: Leg, error: BaseException | None) -> None:
        if isinstance(error, DivergedError):
            self.diverged.add(str(leg.recipe.run.name))
        elif error or not leg.is_done:  # not done without an error: by `raygpt stop`
            self._error = self._error or error
            self._stopping.set()

    def _stop(self, running: Sequence["_Thread"]) -> None:
        """Ask the runs to save and end; again and again, as a run that is just starting deletes earlier requests."""
        if time.monotonic() - self._asked > STOP_POLL_S:
            self._asked = time.monotonic()
            for thread in running:
                storage.write_bytes(storage.join(thread.leg.folder, STOP_FILE), b"")


class _Thread(threading.Thread):
    """Trains one leg."""

    def __init__(self, leg: Leg, watch: Callable[[Event], None], train: Train):
        super().__init__(name=f"train-{leg.recipe.run.name}", daemon=True)
        self.leg, self._watch, self._train = leg, watch, train
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.error = self._train(self.leg.recipe, self._watch, self.leg.until)
        except BaseException as error:
            self.error = error


def prepare_corpus(recipe: Recipe, watch: WatchPreparing) -> Mixture:
    """The whole corpus, which all runs read, prepared if necessary."""
    return prepared.prepare_run(recipe, watch, False, spare_cpus=lambda: 0).corpus


@contextmanager
def runner(folder: str, recipe: Recipe, watch: Watch, say: Callable[[Event], None]) -> Iterator[Runner]:
    """Inside the block this process is the only driver of the folder; Ctrl-C and `raygpt stop` save and end it."""
    stopping = threading.Event()
    with locked(folder) as check_lock:
        clear_stop_request(folder)
        with stoppable(folder, stopping.set, say) as check_stop:

            def poll() -> None:
                check_lock()
                check_stop()

            yield Runner(folder, room_for(recipe, say), watch, poll, stopping)


def room_for(recipe: Recipe, say: Callable[[Event], None] = lambda event: None) -> int:
    """How many such runs the cluster has room for at once. A CPU worker computes on all cores of its node: there, one
    run for as many nodes as it has workers."""
    from raygpt.training.ray.scaling import choose_workers, for_mesh

    workers = for_mesh(choose_workers(recipe.cluster, recipe.engine, lambda text: say(Warned(text))), recipe)
    wanted = workers.cluster.max_workers
    if workers.accelerator == "cpu":
        return max(1, len(alive_nodes()) // wanted)
    return max(1, workers.room() // wanted)
