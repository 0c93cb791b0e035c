"""The training loop, the same for every engine; it runs in every worker.

    restore or start, then for each step: take the batch that was read ahead, step; now and then log, save, evaluate.

The device is never made to wait: a thread reads batches and puts them on it while the one before is computed, another
waits for the metrics of the steps that are logged, and checkpoints are written behind.
"""

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from raygpt.corpus.feed import val_windows
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines import read_weights
from raygpt.engines.base import Engine
from raygpt.errors import RaygptError
from raygpt.evaluation import prompts, tasks
from raygpt.runs import checkpoints, records
from raygpt.runs.checkpoints import Checkpoint
from raygpt.training.mfu import mfu
from raygpt.training.profiling import Profile
from raygpt.training.saving import Saving
from raygpt.training.session import Event, Orders, Session
from raygpt.training.task import Task

AHEAD = 2  # batches on the device before they are needed
LOGGED_S = 60.0  # that a save waits for the metrics up to its step to be written
FARTHER = 2  # for so many times the steps that were timed their speed is relied on: some find batches read ahead


class InTraining(NamedTuple):
    """A model that is asked on the way."""

    tokenizer: Tokenizer
    reader: Engine
    state: Any


class StoppedError(Exception):
    """All workers are to end, and a validation does not hold them up."""


class Loop:
    """One run of a task on an engine."""

    def __init__(self, task: Task, engine: Engine, session: Session):
        self._task, self._engine, self._session = task, engine, session
        self._training, self._steps = task.recipe.training, task.recipe.steps
        self._save_every, self._eval_every = int(self._training.checkpoint_every), int(self._training.eval_every)
        self._about = engine.describe()
        self._log = Log(self._record)
        self._saving = Saving(task, engine, session, self._before_commit)
        self._spikes = 0.0  # that are known of
        self._is_wished = False  # a checkpoint, until one is begun

    def run(self) -> Any:
        """Train from where the run stands to the last step, or until it is stopped; the final state comes back."""
        state, first = self._begin()
        log, profile, asking = self._log, self._profile(), Asking(self._session, first)
        for step, batch in enumerate(self._batches(first, log), start=first + 1):
            self._task.faults.strike(step, self._session.rank)
            profile.before(step)
            state, metrics = self._engine.step(state, batch)
            self._tell_profile(profile.after(step, partial(self._engine.read, metrics)))
            self._session.beat(step)
            if step == first + 1:  # it is compiled here, which is no measure of speed
                self._spikes = self._engine.read(metrics)["spikes"]  # of a restored state: no news
                log.restart(step)
            orders, is_logged = Orders(), step % self._training.log_every == 0 or step == self._steps
            if is_logged:
                log.put(step, metrics)
            elif asking.is_due(step):
                self._engine.read(metrics)  # or the device would be far behind the step that is asked about
            if is_logged or asking.is_due(step):
                orders = asking.ask(step)
            is_stopped, is_end = orders.stop, orders.stop or step == self._steps
            self._is_wished = self._is_wished or orders.save
            if step % self._save_every == 0 or is_end or self._is_wished:
                self._save(state, step, metrics, is_end)
            if self._is_evaluated(step) and not is_stopped:  # one that is stopped makes up for it when it goes on
                log.flush()
                is_stopped = not self._evaluate_heeding(state, step, metrics)
                log.restart(step)
                asking.restart(step)
            self._saving.look()
            if is_end or is_stopped:
                log.flush()
                self._saving.finish(state, step, metrics)
                self._session.emit({"event": "stopped" if is_stopped else "finished", "step": step})
                break
        self._tell_profile(profile.close())
        self._session.close()
        return state

    def _profile(self) -> Profile:
        """Of the steps that are asked for, in one worker; mostly of none."""
        asked = self._task.profile if self._session.rank == 0 else None
        return Profile(*(asked or (0, 0)), self._task.run_folder, self._task.recipe.engine)

    def _tell_profile(self, file: str | None) -> None:
        if file:
            self._session.emit({"event": "profile", "file": file})

    def _is_evaluated(self, step: int) -> bool:
        return step % self._eval_every == 0 or step == self._steps

    def _begin(self) -> tuple[Any, int]:
        """The state and step to go on from: the newest whole checkpoint's, another run's, or those before step 1."""
        about = {**self._about, "workers": str(self._session.workers)}
        self._session.emit({"event": "start", **about})
        self._keep(lambda: records.write_about(self._task.run_folder, about), "what it runs on")
        self._session.rest()  # what is fetched takes as long as it takes; storage has time limits of its own
        checkpoint = self._newest()
        source = checkpoint or self._task.start_from
        step = source.step if source else 0
        is_due = self._is_evaluated(step) or checkpoint is None  # it is new, or was killed between save and score
        is_due = is_due and bool(self._session.decide(lambda: not checkpoints.is_scored(self._task.run_folder, step)))
        self._session.resume(step, is_validated=not is_due)
        if source:
            self._session.emit({"event": "resume", "step": step, "folder": source.folder, "fork": checkpoint is None})
        folder = checkpoints.on_this_node(source) if source else ""
        self._session.beat(step)
        state = self._restore(source, folder) if source else self._engine.start()
        self._session.beat(step)
        if is_due:
            self._evaluate(state, step)
        return state, step

    def _newest(self) -> Checkpoint | None:
        """The run's newest whole checkpoint, which rank 0 looks for: reading all of it to be sure takes a while."""

        def look() -> int:
            found, warnings = checkpoints.newest(self._task.run_folder)
            for warning in warnings:
                self._session.warn(warning)
            with contextlib.suppress(OSError, RaygptError):
                checkpoints.sweep(self._task.run_folder)
            return found.step if found else -1

        step = self._session.decide(look)
        return None if step < 0 else Checkpoint(step, checkpoints.folder_of(self._task.run_folder, step))

    def _restore(self, checkpoint: Checkpoint, folder: str) -> Any:
        """Its state, from its files in a folder; one that the other engine wrote comes by way of plain arrays."""
        writer = checkpoints.facts(checkpoint)["engine"]
        if writer == self._task.recipe.engine:
            return self._engine.restore(folder)
        model, vocab = self._task.recipe.model, self._task.tokenizer.vocab
        return self._engine.load(read_weights(writer, folder, model, vocab))

    def _before_commit(self, step: int, metrics: dict[str, float]) -> None:
        """Refuse a state that is no good, one that `stop` is about to stop at among them; and see to it that what was
        logged up to it is written first, since nobody will log that again."""
        self._check(step, metrics)
        if self._training.on_spike == "stop":
            self._check_spikes(step, metrics["spikes"])
        self._log.wait_for(step)

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

    def _check_spikes(self, step: int, found: float) -> None:
        """Say so, or end, where steps since the last that was logged were far off."""
        news, self._spikes = found - self._spikes, found
        if news <= 0 or self._training.on_spike not in ("warn", "stop"):
            return
        text = f"loss or gradient norm was {self._training.spike_sigmas:g} standard deviations above what is usual"
        if self._training.on_spike == "stop":
            raise RaygptError(
                f"{text}, at or before step {step}; the checkpoints before it are whole. Lower "
                "optimizer.learning_rate, or write training.on_spike: skip to leave such steps out"
            )
        self._session.warn(f"{text} in {news:.0f} of the steps up to {step}")

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
        self._check_spikes(step, read["spikes"])
        for count in ("skipped", "spikes"):
            if not read[count]:
                read.pop(count)
        event: Event = {"step": step, **read, "tokens": step * self._training.batch_tokens}
        steps_per_s = clock.lap(step)
        if steps_per_s:  # none for the first step, which is compiled
            speed = event["tokens_per_s"] = steps_per_s * self._training.batch_tokens
            share = mfu(speed, self._task.flops_per_token, self._about["device"], int(self._about["devices"]))
            event |= {} if share is None else {"mfu": share}
        self._session.record({**event, "data_wait_s": waited})

    def _save(self, state: Any, step: int, metrics: Any, is_end: bool = False) -> None:
        """Begin a checkpoint, if the one before lets us."""
        self._is_wished = not self._saving.begin(state, step, metrics, is_end) and self._is_wished

    def _evaluate_heeding(self, state: Any, step: int, metrics: Any) -> bool:
        """Evaluate, and save on the way where a node is about to go; False where all are to end, and it was left."""
        asking, parts = Asking(self._session), itertools.count(1)

        def heed() -> None:
            part = next(parts)
            orders = asking.ask(part) if asking.is_due(part) else Orders()
            if orders.save:
                self._is_wished = True
                self._save(state, step, metrics)
            if orders.stop:
                raise StoppedError

        try:
            self._evaluate(state, step, heed)
        except StoppedError:
            return False
        return True

    def _evaluate(self, state: Any, step: int, heed: Callable[[], None] = lambda: None) -> None:
        """Loss over the validation set, or the part that the recipe says; and samples of what the model writes.

        `heed` is called after every part, in all workers.
        """

        def go_on() -> None:
            self._session.beat(step)
            heed()

        losses = []
        context, rows = self._engine.context, self._engine.micro_rows
        for windows in val_windows(self._task.val, context, rows, self._training.eval_rows):
            losses.append(self._engine.score(state, windows))
            go_on()
        loss = float(np.concatenate(losses).mean(dtype=np.float64)) if losses else None
        scores = self._scores(state, go_on)
        if loss is not None or scores:
            self._session.record({"step": step, **({} if loss is None else {"val_loss": loss}), **scores})
        self._keep(lambda: self._remember(step, loss), f"the validation loss of step {step}")
        asked, texts = self._training.prompts, self._sample(state)
        for sample in records.samples_of(step, texts, asked):
            self._session.emit({"event": "sample", **sample})
        self._keep(
            lambda: records.keep_sample(self._task.run_folder, step, *texts, prompts=asked),
            f"the samples of step {step}",
        )
        self._session.beat(step)

    def _scores(self, state: Any, go_on: Callable[[], None]) -> dict[str, float]:
        """What the recipe's tasks come to: lambada_acc, lambada_perplexity and so on."""
        model = InTraining(self._task.tokenizer, self._engine, state)
        found: dict[str, float] = {}
        for name, items in self._task.questions.items():
            result = tasks.evaluate(model, name, items, lambda done, total: go_on())
            found |= {f"{name}_{key}": result[key] for key in tasks.TASKS[name].figures}
        return found

    def _remember(self, step: int, loss: float | None) -> None:
        """Beside the checkpoints, for the choice of those that are kept."""
        checkpoints.write_score(self._task.run_folder, step, loss)
        checkpoints.prune(self._task.run_folder, self._task.recipe.run, step)

    def _keep(self, write: Callable[[], None], what: str) -> None:
        """Rank 0 writes something down; a storage that fails just now is no reason to end a run."""
        if self._session.rank > 0:
            return
        try:
            write()
        except (OSError, RaygptError) as error:
            self._session.warn(f"{what} could not be kept ({error}); training goes on")

    def _sample(self, state: Any) -> list[str]:
        """What the model writes from each of the recipe's prompts, always with the same chance."""
        training = self._training
        return prompts.write(self._engine, state, self._task.tokenizer, training.prompts, training.seed)


class Clock:
    """Steps per second between two moments at which the device had done a step."""

    def __init__(self, step: int = 0) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin anew, after something that is not training."""
        self.step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Steps per second since the last lap."""
        now = time.perf_counter()
        speed = (step - self.step) / max(now - self._since, 1e-9)
        self.step, self._since = step, now
        return speed


class Asking:
    """When the workers ask what is wanted of them: all after the same steps, or the same parts of a validation."""

    def __init__(self, session: Session, done: int = 0):
        self._session, self._clock = session, Clock(done)
        self._next = done + 2  # the first is compiled

    def restart(self, done: int) -> None:
        """Begin to time anew, after something else."""
        self._clock.restart(done)

    def is_due(self, done: int) -> bool:
        return done == self._next

    def ask(self, done: int) -> Orders:
        """What is wanted; the speed since the last time says when to ask again."""
        timed = done - self._clock.step
        orders = self._session.orders(self._clock.lap(done))
        self._next = done + min(FARTHER * timed, orders.again)
        return orders


class Log:
    """A thread that waits for metrics, so that the loop does not: it runs ahead by two log events at most."""

    def __init__(self, record: Callable[[int, Any, float, Clock], None]):
        self.data_wait_s = 0.0
        self._record, self._clock = record, Clock()
        self._waiting: queue.Queue[tuple[int, Any, float]] = queue.Queue(1)
        self._unlogged: list[int] = []  # steps, in order
        self._error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, step: int, metrics: Any) -> None:
        """Log a step as soon as the device has done it; raises what went wrong with those before."""
        if self._error:
            raise self._error
        self._unlogged.append(step)
        self._waiting.put((step, metrics, self.data_wait_s))
        self.data_wait_s = 0.0

    def flush(self) -> None:
        """Until everything is logged; raises what went wrong."""
        self._waiting.join()
        if self._error:
            raise self._error

    def wait_for(self, step: int) -> None:
        """Until everything up to a step is logged, but not for ever."""
        until = time.perf_counter() + LOGGED_S
        while any(one <= step for one in [*self._unlogged]) and time.perf_counter() < until:
            time.sleep(0.01)

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
                self._unlogged.remove(step)
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
