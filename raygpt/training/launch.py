"""From a recipe to a run on Ray Train: corpus, plan, run directory, trainer, and what comes of it.

With session.py the only module that knows Ray Train.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from raygpt import storage
from raygpt.cluster import connected, cores
from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed, rows_of_worker, windows_dataset
from raygpt.corpus.mixture import Mixture, open_mixture
from raygpt.corpus.prepare import Watch
from raygpt.errors import RaygptError
from raygpt.training import checkpoints, resume
from raygpt.training.backend import JaxProcesses
from raygpt.training.loop import Loop, Task
from raygpt.training.plan import Plan, host_memory, make_plan
from raygpt.training.session import Event, Mailbox, RaySession, last_metrics

if TYPE_CHECKING:
    from ray.data import DataIterator

STORES = "stores"  # beside the runs: prepared tokens, which runs share
POLL_S = 0.2


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    path: str
    metrics: dict[str, Any] = field(default_factory=dict)  # the last of each
    checkpoint: str | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe
    corpus: Mixture
    plan: Plan
    feed: Feed
    after: int  # the step that it goes on after; 0 for a new one

    @property
    def is_finished(self) -> bool:
        return self.after >= self.plan.steps


def prepare_run(recipe: Recipe, watch: Watch = lambda progress: None, force: bool = False) -> Prepared:
    """Prepare the corpus, work out every number, and write recipe and tokenizer into the run directory."""
    home = storage.absolute(recipe.run.storage)
    folder = storage.join(home, str(recipe.run.name))
    _refuse_what_is_missing(recipe)
    after = resume.check(folder, recipe, force)
    corpus = open_mixture(recipe.data, storage.join(home, STORES), watch)
    plan = make_plan(
        recipe,
        vocab=corpus.tokenizer.vocab,
        train_tokens=corpus.train_tokens,
        val_tokens=corpus.val_tokens,
        run_folder=folder,
        memory_bytes=host_memory() // recipe.cluster.max_workers,
    )
    feed = corpus.feed(
        context=recipe.model.context, batch_rows=plan.rows, order=recipe.data.order, seed=recipe.training.seed
    )
    feed.rows(0)  # a corpus that is too short, or not of its tokenizer, is refused here
    storage.write_bytes(storage.join(folder, resume.RECIPE), recipe.to_yaml().encode())
    tokenizers.save(corpus.tokenizer, folder)
    return Prepared(recipe, corpus, plan, feed, after)


def _refuse_what_is_missing(recipe: Recipe) -> None:
    """What recipes can say and this version cannot do yet."""
    if recipe.engine == "torch":
        raise RaygptError("engine: torch is not built yet; write engine: jax")
    if recipe.cluster.accelerator in ("gpu", "tpu"):
        raise RaygptError(f"cluster.accelerator: {recipe.cluster.accelerator} is not built yet; write cpu or auto")
    if recipe.cluster.min_workers != recipe.cluster.max_workers:
        raise RaygptError(
            f"cluster.workers: {recipe.cluster.workers}: elastic runs are not built yet; write one number"
        )
    if storage.is_remote(recipe.run.storage):
        raise RaygptError("run.storage: runs on s3 are not built yet (token stores are); write a folder")


def train(run: Prepared, watch: Callable[[Event], None] = lambda event: None) -> Result:
    """Run it to its end; `watch` sees every event as it comes. What fails is in the result."""
    workers = run.recipe.cluster.max_workers
    last = last_metrics(run.plan.run_folder)
    if run.is_finished:
        return Result(run.plan.run_folder, last, checkpoints.folder_of(run.plan.run_folder, run.after))
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # Ray's 2 s are felt at a run's start and end
    with connected(cpus=cores() + workers):  # the workers' own, and as many as there are cores for Ray Data
        mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()

        def poll() -> None:
            for event in ray.get(mailbox.take.remote()):
                last.update(event if "event" not in event else {})
                watch(event)

        error = _fit(_trainer(run, workers, mailbox), poll)
    checkpoint, _ = checkpoints.newest(run.plan.run_folder)
    return Result(run.plan.run_folder, last, checkpoint.folder if checkpoint else None, error)


def _trainer(run: Prepared, workers: int, mailbox: Any) -> DataParallelTrainer:
    task = Task(
        recipe=run.recipe,
        feed=run.feed,
        val=tuple(store.val for store in run.corpus.stores),
        run_folder=run.plan.run_folder,
        accumulation=run.plan.accumulation,
        score_rows=run.plan.micro_rows,
    )
    return DataParallelTrainer(
        _work,
        train_loop_config={"task": task, "mailbox": mailbox},
        backend_config=JaxProcesses(devices_per_worker=max(1, cores() // workers)),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=str(run.recipe.run.name), storage_path=storage.absolute(run.recipe.run.storage)),
    )


def _work(config: dict[str, Any]) -> None:
    """What every worker runs."""
    from raygpt.engines.jax.engine import JaxEngine

    task: Task = config["task"]
    engine = JaxEngine(task.recipe, task.tokenizer.vocab, accumulation=task.accumulation)
    Loop(task, engine, RaySession(task.run_folder, config["mailbox"])).run()


def _fit(trainer: DataParallelTrainer, poll: Callable[[], None]) -> BaseException | None:
    """`fit` in a thread of its own, where its handler for Ctrl-C cannot be set; events are shown meanwhile."""
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        poll()
    poll()
    return _told(failure[0]) if failure else None


def _told(error: BaseException) -> BaseException:
    """The worker's own RaygptError, out of what Ray wraps around it."""
    failures = getattr(error, "worker_failures", {})
    for failure in failures.values():
        cause: BaseException = getattr(failure, "cause", None) or failure
        return RaygptError(str(cause).splitlines()[0]) if isinstance(cause, RaygptError) else cause
    return error


class RowsByRank(DataConfig):
    """Gives every rank a dataset of the rows that it needs, through `ray.train.get_dataset_shard`.

    Ray's own split deals blocks to whichever worker is hungry: in no order, and never the same row to two workers,
    as a tensor or context axis wants it.
    """

    def __init__(
        self, feed: Feed, batches: range, rows_of: Callable[[int, int, int], Sequence[int]] = rows_of_worker
    ) -> None:
        super().__init__()
        self._feed, self._batches, self._rows_of = feed, batches, rows_of

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, "DataIterator"]]:
        return [
            {name: self._iterator(rank, world_size, worker_node_ids) for name in datasets} for rank in range(world_size)
        ]

    def _iterator(self, rank: int, world_size: int, node_ids: list[str] | None) -> "DataIterator":
        rows = self._rows_of(self._feed.batch_rows, rank, world_size)
        dataset = windows_dataset(self._feed, self._batches, rows)
        return dataset.streaming_split(1, locality_hints=[node_ids[rank]] if node_ids else None)[0]
