"""The training loop, the same for every engine; it runs in every worker.

    restore or start, then for each step: take the batch that was read ahead, step; now and then log, save, evaluate.

The device is never made to wait: a thread reads batches and puts them on it while the one before is computed, another
waits for the metrics of the steps that are logged, and checkpoints are written behind.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed
from raygpt.corpus.order import window_count
from raygpt.corpus.store import TokenStream
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines import read_weights
from raygpt.engines.base import Engine
from raygpt.errors import RaygptError
from raygpt.inference.sampling import sample
from raygpt.training import checkpoints
from raygpt.training.checkpoints import Checkpoint
from raygpt.training.metrics import mfu
from raygpt.training.session import Event, Session

AHEAD = 2  # batches on the device before they are needed
SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class Task:
    """What to train, as every worker gets it."""

    recipe: Recipe
    feed: Feed
    val: tuple[TokenStream, ...]
    run_folder: str
    start_from: Checkpoint | None = None  # another run's

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.run_folder)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint belongs to."""
        return {
            "engine": self.recipe.engine,
            "recipe": self.recipe.to_dict(),
            "tokenizer": tokenizers.fingerprint(self.tokenizer),
            "data": [stream.index.fingerprint for stream in self.feed.streams],
        }

    @property
    def flops_per_token(self) -> int:
        return self.recipe.model.flops_per_token(self.tokenizer.vocab)


class Loop:
    """One run of a task on an engine."""

    def __init__(self, task: Task, engine: Engine, session: Session):
        self._task, self._engine, self._session = task, engine, session
        self._training, self._steps = task.recipe.training, task.recipe.steps
        self._save_every, self._eval_every = int(self._training.checkpoint_every), int(self._training.eval_every)
        self._about = engine.describe()
        self._saving: tuple[int, Any] | None = None  # the step whose checkpoint is being written, and its metrics

    def run(self) -> Any:
        """Train from where the run stands to the last step; the final state comes back."""
        state, first = self._begin()
        log = Log(self._record)
        for step, batch in enumerate(self._batches(first, log), start=first + 1):
            state, metrics = self._engine.step(state, batch)
            last = step == self._steps
            if step == first + 1:  # it is compiled here, which is no measure of speed
                self._engine.read(metrics)
                log.restart(step)
            if step % self._training.log_every == 0 or last:
                log.put(step, metrics)
            if step % self._save_every == 0 or last:
                self._save(state, step, metrics)
            if self._is_evaluated(step):
                log.flush()
                self._evaluate(state, step)
                log.restart(step)
        self._finish_save()
        return state

    def _is_evaluated(self, step: int) -> bool:
        return step % self._eval_every == 0 or step == self._steps

    def _begin(self) -> tuple[Any, int]:
        """The state and step to go on from: the newest whole checkpoint's, another run's, or those before step 1."""
        self._session.emit({"event": "start", **self._about})
        checkpoint, warnings = checkpoints.newest(self._task.run_folder)
        for warning in warnings:
            self._session.emit({"event": "warning", "text": warning})
        source = checkpoint or self._task.start_from
        step = source.step if source else 0
        self._session.resume(step)
        if source:
            self._session.emit({"event": "resume", "step": step, "folder": source.folder, "fork": checkpoint is None})
        state = self._restore(source) if source else self._engine.start()
        is_due = self._is_evaluated(step) or checkpoint is None
        if is_due and step not in checkpoints.scores(self._task.run_folder):  # or it was killed between save and score
            self._evaluate(state, step)
        return state, step

    def _restore(self, checkpoint: Checkpoint) -> Any:
        """The state of a checkpoint; one that the other engine wrote comes by way of plain arrays."""
        writer = checkpoints.facts(checkpoint)["engine"]
        if writer == self._task.recipe.engine:
            return self._engine.restore(checkpoint.folder)
        model, vocab = self._task.recipe.model, self._task.tokenizer.vocab
        return self._engine.load(read_weights(writer, checkpoint.folder, model, vocab))

    def _save(self, state: Any, step: int, metrics: Any) -> None:
        """Begin to save; what was begun before is finished first."""
        self._finish_save()
        self._engine.save(state, checkpoints.folder_of(self._task.run_folder, step))
        self._saving = step, metrics

    def _finish_save(self) -> None:
        """Commit what is written, unless the step that it follows was not a number: then it is no good state."""
        if self._saving is None:
            return
        (step, metrics), self._saving = self._saving, None
        self._engine.wait_for_save()
        self._check(step, self._engine.read(metrics))
        folder = checkpoints.folder_of(self._task.run_folder, step)
        self._session.committed(folder, lambda: self._commit(folder, step))

    def _commit(self, folder: str, step: int) -> None:
        checkpoints.commit(folder, step, self._task.facts)
        checkpoints.prune(self._task.run_folder, self._task.recipe.run)
        self._session.emit({"event": "checkpoint", "step": step, "folder": folder})

    def _check(self, step: int, metrics: dict[str, float]) -> None:
        """Loss and gradient are numbers, or the run ends here, with the checkpoints that it has.

        In fp16 a gradient may overflow: such a step was left out, and changed nothing.
        """
        is_sound = math.isfinite(metrics["grad_norm"]) or metrics["skipped"]
        if self._training.on_nan == "skip" or (math.isfinite(metrics["loss"]) and is_sound):
            return
        raise RaygptError(
            f"the loss is not a number any more at step {step} (loss {metrics['loss']}, gradient norm "
            f"{metrics['grad_norm']}); the checkpoints before it are whole. Lower optimizer.learning_rate, lengthen "
            "schedule.warmup_steps, or write training.on_nan: skip to leave such steps out"
        )

    def _batches(self, first: int, log: "Log") -> Iterator[Any]:
        """The batch of every step from the first on, read ahead. Step n, counted from 1, consumes batch n-1."""
        rows = self._engine.rows
        read = (self._engine.put(self._task.feed.rows(n, rows)) for n in range(first, self._steps))
        for batch, waited in read_ahead(read, AHEAD):
            log.data_wait_s += waited
            yield batch

    def _record(self, step: int, metrics: Any, waited: float, clock: "Clock") -> None:
        """Log a step when the device has done it."""
        read = self._engine.read(metrics)
        self._check(step, read)
        if not read.get("skipped"):
            read.pop("skipped", None)
        event: Event = {"step": step, **read, "tokens": step * self._training.batch_tokens}
        steps_per_s = clock.lap(step)
        if steps_per_s:  # none for the first step, which is compiled
            speed = event["tokens_per_s"] = steps_per_s * self._training.batch_tokens
            share = mfu(speed, self._task.flops_per_token, self._about["device"], int(self._about["devices"]))
            event |= {} if share is None else {"mfu": share}
        self._session.record({**event, "data_wait_s": waited})

    def _evaluate(self, state: Any, step: int) -> None:
        """Loss over the validation set, or the part that the recipe says; and a sample of what the model writes."""
        losses = [
            self._engine.score(state, windows)
            for windows in val_windows(
                self._task.val, self._engine.context, self._engine.micro_rows, self._training.eval_rows
            )
        ]
        loss = float(np.concatenate(losses).mean(dtype=np.float64)) if losses else None
        if loss is not None:
            self._session.record({"step": step, "val_loss": loss})
        self._session.once(lambda: self._remember(step, loss))
        self._session.emit({"event": "sample", "step": step, "text": self._sample(state)})

    def _remember(self, step: int, loss: float | None) -> None:
        checkpoints.write_score(self._task.run_folder, step, loss)
        checkpoints.prune(self._task.run_folder, self._task.recipe.run)

    def _sample(self, state: Any) -> str:
        tokenizer = self._task.tokenizer
        prompt = np.array([[tokenizer.end_of_text]], dtype=np.int32)  # as a document begins
        drawn = sample(self._engine, state, prompt, SAMPLE_TOKENS, seed=self._training.seed)
        return tokenizer.decode(drawn[0].tolist())


class Clock:
    """Steps per second between two moments at which the device had done a step."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin anew, after something that is not training."""
        self._step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Steps per second since the last lap."""
        now = time.perf_counter()
        speed = (step - self._step) / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        return speed


class Log:
    """A thread that waits for metrics, so that the loop does not: it runs ahead by two log events at most."""

    def __init__(self, record: Callable[[int, Any, float, Clock], None]):
        self.data_wait_s = 0.0
        self._record, self._clock = record, Clock()
        self._waiting: queue.Queue[tuple[int, Any, float]] = queue.Queue(1)
        self._error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, step: int, metrics: Any) -> None:
        """Log a step as soon as the device has done it."""
        self._waiting.put((step, metrics, self.data_wait_s))
        self.data_wait_s = 0.0

    def flush(self) -> None:
        """Until everything is logged; raises what went wrong."""
        self._waiting.join()
        if self._error:
            raise self._error

    def restart(self, step: int) -> None:
        """Time that was not spent on training does not count."""
        self.data_wait_s = 0.0
        self._clock.restart(step)

    def _work(self) -> None:
        while True:
            step, metrics, waited = self._waiting.get()
            try:
                self._record(step, metrics, waited, self._clock)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._waiting.task_done()


def read_ahead(items: Iterator[Any], ahead: int) -> Iterator[tuple[Any, float]]:
    """The items, made by a thread up to `ahead` before they are asked for; with each, how long it was waited for."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                ready.put(("item", item))
            ready.put(("end", None))
        except BaseException as error:
            ready.put(("error", error))

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            started = time.perf_counter()
            kind, item = ready.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item, time.perf_counter() - started
    finally:
        stopped.set()
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()  # a thread that waits for room sees that it should stop


def val_windows(
    streams: Sequence[TokenStream], context: int, rows: int, limit: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """All validation windows, `context` apart, some rows at a time; or as many as `limit`, evenly spread over them.

    Always the same, in the same order.
    """
    counts = [window_count(len(stream), context) for stream in streams]
    total = sum(counts)
    chosen = np.arange(total) if limit is None or limit >= total else np.arange(limit) * total // limit
    for stream, count, first in zip(streams, counts, np.cumsum([0, *counts]), strict=False):
        starts = (chosen[(chosen >= first) & (chosen < first + count)] - first) * context
        for begin in range(0, len(starts), rows):
            yield stream.windows(starts[begin : begin + rows], context + 1)
