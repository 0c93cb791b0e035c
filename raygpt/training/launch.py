"""From a recipe to a run on Ray Train: corpus, plan, run directory, trainer, and what comes of it."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.v2.api.config import FailureConfig, RunConfig
from ray.train.v2.jax.config import JaxConfig

from raygpt import storage
from raygpt.cluster import connected, cores
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed
from raygpt.corpus.mixture import Mixture, growing_text, open_growing, open_mixture
from raygpt.corpus.prepare import Watch
from raygpt.corpus.store import STORES
from raygpt.engines import require
from raygpt.errors import RaygptError, first_line
from raygpt.evaluation import prompts
from raygpt.evaluation.tasks import Item, choose, read_items
from raygpt.runs import RECIPE, checkpoints, metrics
from raygpt.runs.checkpoints import Checkpoint
from raygpt.runs.hold import held
from raygpt.runs.records import Outcome, write_result
from raygpt.testing import faults
from raygpt.training import resume, tracking
from raygpt.training.backend import Processes
from raygpt.training.mailbox import open_mailbox
from raygpt.training.plan import Plan, in_steps, make_plan
from raygpt.training.recovery import Trainer, root_cause
from raygpt.training.scaling import Workers, choose_workers, ensure_room, ensure_shared
from raygpt.training.session import Event
from raygpt.training.stopping import forget_wish, stoppable
from raygpt.training.task import Task
from raygpt.training.worker import work

POLL_S = 0.2
RAYS_OWN = "checkpoint_manager_snapshot.json"  # refuses to start where a checkpoint that it names was pruned since


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    path: str
    metrics: dict[str, Any] = field(default_factory=dict)  # the last of each
    checkpoint: str | None = None
    error: BaseException | None = None
    stopped: int | None = None  # the step that it was stopped at, and saved


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe  # with every length in steps
    asked: Recipe  # as it was written: epochs stay epochs
    corpus: Mixture
    plan: Plan
    feed: Feed
    after: int  # the step that it goes on after; 0 for a new one
    start_from: Checkpoint | None
    questions: Mapping[str, Sequence[Item]]

    @property
    def is_finished(self) -> bool:
        return self.after >= self.plan.steps and checkpoints.is_scored(self.plan.run_folder, self.after)

    def task(self, profile: tuple[int, int] | None) -> Task:
        """What its workers do."""
        folder = self.plan.run_folder
        val, struck = tuple(store.val for store in self.corpus.stores), faults.from_environment(folder)
        return Task(self.recipe, self.feed, val, folder, self.start_from, self.questions, profile, struck)


def prepare_run(recipe: Recipe, watch: Watch = lambda progress: None, force: bool = False) -> Prepared:
    """Prepare the corpus, or begin to; work out every number; refuse what cannot be."""
    home = storage.absolute(recipe.run.storage)
    folder = storage.join(home, str(recipe.run.name))
    _refuse_what_is_missing(recipe, folder)
    if ray.is_initialized():
        ensure_shared(folder)
    after = resume.check(folder, recipe, force)
    questions = _questions(recipe)
    corpus = _open_corpus(recipe, storage.join(home, STORES), watch)
    try:
        context, seed = recipe.model.context, recipe.training.seed
        feed = corpus.feed(context=context, batch_rows=recipe.rows, order=recipe.data.order, seed=seed)
        feed.rows(0)  # a corpus that is too short, or not of its tokenizer, is refused here
        known = in_steps(recipe, corpus.windows(context))
        plan = make_plan(
            known,
            vocab=corpus.tokenizer.vocab,
            train_tokens=corpus.train_tokens,
            val_tokens=corpus.val_tokens,
            run_folder=folder,
        )
        prompts.encode(corpus.tokenizer, known.training.prompts, context)  # refuses what cannot be written on
        tokenizer = tokenizers.fingerprint(corpus.tokenizer)
        resume.check_text(folder, after, tokenizer, [stream.index.fingerprint for stream in feed.streams], force)
        if after >= plan.steps:  # its last checkpoint had better be whole
            found, _ = checkpoints.newest(folder)
            after = found.step if found else 0
        start_from = resume.fork(known, home, tokenizer, after)
    except BaseException:
        corpus.close()
        raise
    return Prepared(known, recipe, corpus, plan, feed, after, start_from, questions)


def _open_corpus(recipe: Recipe, stores: str, watch: Watch) -> Mixture:
    """Whole, or while it is tokenised where its order allows it and the workers leave a CPU to do so."""
    text = growing_text(recipe.data, stores)
    if text and (asked := recipe.training.in_epochs):
        raise RaygptError(
            f"{asked} needs the whole corpus, but data.order: sequential trains while it is still being tokenised; "
            "give training.steps, eval_every and checkpoint_every in steps, or write data.order: shuffled"
        )
    spare = choose_workers(recipe.cluster, recipe.engine).spare_cpus() if text and ray.is_initialized() else 0
    if text and spare >= 1:
        return open_growing(*text, watch, spare)
    return open_mixture(recipe.data, stores, watch)


def _questions(recipe: Recipe) -> dict[str, Sequence[Item]]:
    """The items of each task that is scored on the way: read once, here, where a missing file is found at once."""
    asked = recipe.training
    return {name: read_items(name, path, asked.eval_items) for name, path in choose(asked.eval_tasks).items()}


def _refuse_what_is_missing(recipe: Recipe, folder: str) -> None:
    tracking.require(recipe.track, folder)
    require(recipe.engine, recipe.model.implementation)


def on_cluster(recipe: Recipe) -> Any:
    """Inside the block there is a Ray cluster; a local one has CPUs for the workers, and as many as there are cores for
    Ray Data besides, so that neither waits for the other."""
    return connected(cpus=cores() + recipe.cluster.max_workers)


def train(
    run: Prepared, watch: Callable[[Event], None] = lambda event: None, profile: tuple[int, int] | None = None
) -> Result:
    """Run it to its end, or until it is stopped; `watch` sees every event as it comes. What fails is in the result.

    `profile` is the first and the last step to trace.
    """
    folder = run.plan.run_folder
    seen = Seen(watch, metrics.latest(metrics.read(folder)))
    if run.is_finished:
        run.corpus.close()
        return Result(folder, seen.last, checkpoints.folder_of(folder, run.after))
    with on_cluster(run.recipe), contextlib.closing(run.corpus), held(folder) as still_ours:
        forget_wish(folder)
        storage.write_bytes(storage.join(folder, RECIPE), run.asked.to_yaml().encode())
        tokenizers.save(run.corpus.tokenizer, folder)
        if changed := resume.changed_rate(folder, run.after, run.recipe):
            seen.warn(changed)
        mailbox, workers = open_mailbox(), choose_workers(run.recipe.cluster, run.recipe.engine, seen.warn)
        with stoppable(folder, mailbox, seen.show) as poll, _outcome_kept(folder, seen):

            def look() -> None:
                still_ours()
                poll()

            seen.error = fit(
                work,
                {"task": run.task(profile), "mailbox": mailbox},
                workers,
                folder,
                mailbox,
                seen.add,
                engine=run.recipe.engine,
                max_faults=run.recipe.cluster.max_faults,
                hang_after=run.recipe.training.hang_after,
                poll=look,
            )
    checkpoint = checkpoints.find_newest(folder)
    return Result(folder, seen.last, checkpoint.folder if checkpoint else None, seen.error, seen.stopped)


@dataclass
class Seen:
    """What a driver has seen of its run."""

    watch: Callable[[Event], None]
    last: Event  # the last value of each metric
    stopped: int | None = None  # the step after which it was stopped
    error: BaseException | None = None

    def add(self, event: Event) -> None:
        """Something that the workers say."""
        if event.get("event") == "stopped":
            self.stopped = event["step"]
        elif "event" not in event and "restart" not in event:
            self.last |= event
        self.show(event)

    def show(self, event: Event) -> None:
        """The terminal may be closed, and the run is to be saved all the same."""
        with contextlib.suppress(OSError):
            self.watch(event)

    def warn(self, text: str) -> None:
        self.show({"event": "warning", "text": text})


@contextlib.contextmanager
def _outcome_kept(run_folder: str, seen: Seen) -> Iterator[None]:
    """Writes down how the run ended, also where the block raises."""
    try:
        yield
    except BaseException as error:
        seen.error = error
        raise
    finally:
        is_stopped = seen.stopped is not None
        outcome = Outcome("stopped", f"after step {seen.stopped}") if is_stopped else Outcome.of(seen.error)
        with contextlib.suppress(OSError, RaygptError):
            write_result(run_folder, outcome)


def fit(
    function: Callable[..., None],
    config: dict[str, Any],
    workers: Workers,
    run_folder: str,
    mailbox: Any,
    watch: Callable[[Event], None],
    *,
    engine: str = "jax",
    max_faults: int = 0,
    hang_after: float | None = None,
    callbacks: Sequence[Any] = (),
    poll: Callable[[], None] = lambda: None,
) -> BaseException | None:
    """Run a function in every worker; `watch` sees the mailbox's events as they come. What went wrong, if anything."""
    if workers.is_elastic:  # Ray waits a minute for nodes that are gone; it is for them to come, not for code to start
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    ensure_room(workers, lambda text: watch({"event": "waiting", "text": text}))
    storage.delete(storage.join(run_folder, RAYS_OWN))
    home, _, name = run_folder.rpartition("/")
    filesystem, path = storage.filesystem(home) if storage.is_remote(home) else (None, home)
    trainer = Trainer(
        function,
        train_loop_config=config,
        backend_config=JaxConfig(use_tpu=True) if workers.accelerator == "tpu" else Processes(engine),
        scaling_config=workers.scaling(),
        run_config=RunConfig(
            name=name,
            storage_path=path,
            storage_filesystem=filesystem,
            worker_runtime_env=workers.runtime_env,
            callbacks=[*callbacks] or None,
            failure_config=FailureConfig(max_failures=max_faults),
        ),
        mailbox=mailbox,
        hang_after=hang_after,
    )
    verdicts: list[str] = []

    def pass_on() -> None:
        for event in ray.get(mailbox.take.remote()):
            if event.get("event") == "verdict":
                verdicts.append(event["text"])
            else:
                watch(event)
        poll()

    error = _fit(trainer, pass_on)
    return RaygptError(verdicts[0]) if verdicts else error


def _fit(trainer: Trainer, poll: Callable[[], None]) -> BaseException | None:
    """`fit` in a thread of its own, where its handler for Ctrl-C cannot be set; events are shown meanwhile.

    Where that raises (a second Ctrl-C, a run that another driver has taken over) the workers end: Ray may live on.
    """
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_S)
            poll()
        poll()
    except ray.exceptions.RayError as error:  # of the actors that carry events
        trainer.end()
        return RaygptError(
            f"Ray lost what this run is driven by ({first_line(error)}); the same command goes on with it"
        )
    except BaseException:
        trainer.end()
        raise
    return root_cause(failure[0]) if failure else None
