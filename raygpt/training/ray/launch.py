"""Starts a run on Ray Train and waits for its result."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray

from raygpt import storage
from raygpt.cluster import connected
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.prepare import Watch
from raygpt.errors import RaygptError
from raygpt.runs import RECIPE, checkpoints, forget_start, has_taken_steps, metrics
from raygpt.runs.lock import locked
from raygpt.runs.metrics import Line
from raygpt.runs.records import Outcome, write_result
from raygpt.training import prepared, resume
from raygpt.training.events import Event, StepLogged, Stopped, StopRequested, Validated, Warned
from raygpt.training.prepared import Prepared
from raygpt.training.ray import runtime_env
from raygpt.training.ray.backend import backend_for
from raygpt.training.ray.mailbox import open_mailbox
from raygpt.training.ray.memory import request_memory, reserved
from raygpt.training.ray.scaling import choose_workers, ensure_room, ensure_shared, for_mesh, local_cpus
from raygpt.training.ray.trainer import Trainer, fit
from raygpt.training.ray.unattended import wait_for_nodes
from raygpt.training.ray.worker import work
from raygpt.training.stopping import clear_stop_request, stoppable

SMALLEST_VOCAB = 2  # a character and end-of-text


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    path: str
    metrics: dict[str, Any] = field(default_factory=dict)  # the last value of each
    checkpoint: str | None = None
    error: BaseException | None = None
    stopped: int | None = None  # the step after which it was stopped and saved
    by_signal: bool = False  # it was stopped by a signal, not by `raygpt stop`


def prepare_run(
    recipe: Recipe,
    watch: Watch = lambda progress: None,
    force: bool = False,
    say_waiting: Callable[[str], None] | None = None,
) -> Prepared:
    """Prepare a run, for the cluster that this process is connected to, if any. With `say_waiting`, wait for nodes that
    have not joined yet."""
    if not ray.is_initialized():
        return prepared.prepare_run(recipe, watch, force, spare_cpus=lambda: 0)
    workers = for_mesh(choose_workers(recipe.cluster, recipe.engine), recipe)
    # Before the corpus is prepared, which may take hours, and its vocabulary is known
    least = request_memory(workers, recipe, SMALLEST_VOCAB)
    if say_waiting:
        wait_for_nodes(least, say_waiting)
    ensure_room(least)
    ensure_shared(prepared.run_folder_of(recipe))
    run = prepared.prepare_run(recipe, watch, force, spare_cpus=workers.spare_cpus)
    try:
        ensure_room(request_memory(workers, run.recipe, run.totals.vocab))
    except RaygptError:
        run.corpus.close()
        raise
    return run


def on_cluster(recipe: Recipe) -> Any:
    """Inside the block there is a Ray cluster. A local one has CPUs for the workers plus as many as there are cores for
    Ray Data, so that neither waits for the other."""
    runtime_env.checked(recipe.cluster.runtime_env)
    return connected(cpus=local_cpus(recipe.cluster))


def train(
    run: Prepared,
    watch: Callable[[Event], None] = lambda event: None,
    profile: tuple[int, int] | None = None,
    unattended: bool = False,
    until: int | None = None,
) -> Result:
    """Train to the last step, or until stopped. `watch` gets every event as it comes; an error is in the result.

    `profile` is the first and the last step to trace; `until` a step to stop after. `unattended` waits for the
    lock of a driver that was killed, as a restarted job has to.
    """
    folder = run.totals.run_folder
    driver = DriverState(watch, metrics.latest(metrics.read(folder)))
    if run.is_finished:
        run.corpus.close()
        return Result(folder, driver.last, checkpoints.folder_of(folder, run.after))
    with on_cluster(run.recipe), contextlib.closing(run.corpus), locked(folder, unattended) as check_lock:
        clear_stop_request(folder)
        if not has_taken_steps(folder):
            forget_start(folder)
        storage.write_bytes(storage.join(folder, RECIPE), run.original.to_yaml().encode())
        tokenizers.save(run.corpus.tokenizer, folder)
        if changed := resume.changed_rate(folder, run.after, run.recipe):
            driver.warn(changed)
        workers = for_mesh(choose_workers(run.recipe.cluster, run.recipe.engine, driver.warn), run.recipe)
        workers, mailbox = request_memory(workers, run.recipe, run.totals.vocab), open_mailbox()
        with (
            reserved(workers),
            stoppable(folder, lambda: mailbox.request.remote("stop"), driver.add) as poll_stop,
            _recording_outcome(folder, driver),
        ):

            def poll() -> None:
                check_lock()
                poll_stop()

            trainer = Trainer(
                work,
                {"spec": run.spec(profile, until), "mailbox": mailbox},
                workers,
                folder,
                mailbox,
                backend=backend_for(run.recipe.engine, workers.accelerator, workers.cluster.gpu_share),
                hang_after=run.recipe.training.hang_after,
            )
            driver.error = fit(trainer, driver.add, poll)
    checkpoint = checkpoints.find_newest(folder)
    return Result(
        folder, driver.last, checkpoint.folder if checkpoint else None, driver.error, driver.stopped, driver.by_signal
    )


@dataclass
class DriverState:
    """What the driver knows of a run, from its events."""

    watch: Callable[[Event], None]
    last: Line  # the last value of each metric
    stopped: int | None = None  # the step after which it was stopped
    by_signal: bool = False
    error: BaseException | None = None

    def add(self, event: Event) -> None:
        """Handle an event of the workers, or a request to stop."""
        match event:
            case StopRequested():
                self.by_signal = event.by_signal
            case Stopped(step):
                self.stopped = step
            case StepLogged() | Validated():
                self.last |= event.line()
        self.show(event)

    def show(self, event: Event) -> None:
        """Pass an event to `watch`; a closed terminal must not keep the run from being saved."""
        with contextlib.suppress(OSError):
            self.watch(event)

    def warn(self, text: str) -> None:
        self.show(Warned(text))


@contextlib.contextmanager
def _recording_outcome(run_folder: str, driver: DriverState) -> Iterator[None]:
    """Record how the run ended, also if the block raises."""
    try:
        yield
    except BaseException as error:
        driver.error = error
        raise
    finally:
        is_stopped = driver.stopped is not None
        outcome = Outcome("stopped", f"after step {driver.stopped}") if is_stopped else Outcome.of(driver.error)
        with contextlib.suppress(OSError, RaygptError):
            write_result(run_folder, outcome)
