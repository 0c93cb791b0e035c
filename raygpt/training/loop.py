"""The training loop, the same for every engine; it runs in every worker.

Restore or initialise the state; then for each step take the prefetched batch and compute; if due, log, save, evaluate.

The device never waits: one thread reads batches and copies them to the device while the previous one is computed,
another waits for the metrics of logged steps, and checkpoints are written in the background.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from raygpt.engines import read_plain_state
from raygpt.engines.base import Engine
from raygpt.errors import RaygptError
from raygpt.runs import checkpoints, records
from raygpt.runs.checkpoints import Checkpoint
from raygpt.training.clock import Clock
from raygpt.training.divergence import DivergenceCheck
from raygpt.training.evaluation import Evaluation
from raygpt.training.events import Finished, ProfileWritten, Resumed, Started, StepLogged, Stopped
from raygpt.training.metrics_log import MetricsLog
from raygpt.training.mfu import mfu
from raygpt.training.polling import Polling
from raygpt.training.prefetch import prefetch
from raygpt.training.profiling import Profile
from raygpt.training.saving import Saving
from raygpt.training.session import Orders, Session, write_or_warn
from raygpt.training.spec import RunSpec

AHEAD = 2  # batches on the device before they are needed


class EvaluationStoppedError(Exception):
    """All workers were ordered to stop during an evaluation, which is cut short."""


class Loop:
    """Trains one run on one engine."""

    def __init__(self, spec: RunSpec, engine: Engine, session: Session):
        self._spec, self._engine, self._session = spec, engine, session
        self._training, self._steps = spec.recipe.training, spec.recipe.steps
        self._last = min(spec.until or self._steps, self._steps)  # the schedule is that of all steps
        self._save_every, self._eval_every = int(self._training.checkpoint_every), int(self._training.eval_every)
        self._about = engine.describe()
        self._divergence = DivergenceCheck(self._training, self._about["precision"], session.warn)
        self._log = MetricsLog(self._record)
        self._saving = Saving(spec, engine, session, self._before_commit)
        self._evaluation = Evaluation(spec, engine, session)
        self._profile = self._make_profile()
        self._is_save_ordered = False  # until a save has begun
        self._taken = 0  # the last step

    def run(self) -> Any:
        """Train from the newest checkpoint to the last step, or until stopped. Returns the final state."""
        state, first, is_due = self._begin()
        self._polling = Polling(self._session, first)
        if is_due and self._evaluate(state, first).stop:
            self._session.emit(Stopped(first))
        else:
            state = self._train(state, first)
        self._end_profile(self._profile.close)
        self._session.close()
        return state

    def _train(self, state: Any, first: int) -> Any:
        """All steps after `first`. Returns the final state."""
        self._divergence.begin(self._engine.spikes(state))
        for step, batch in enumerate(self._batches(first), start=first + 1):
            state, metrics = self._step(state, step, batch)
            if step == first + 1:
                self._engine.read(metrics)
                self._log.restart(step)  # the first step includes compilation
            if self._logs_at(step):
                self._log.put(step, metrics)
            orders = self._poll_if_due(step, metrics)
            self._save_if_due(state, step, metrics, orders)
            if self._evaluates_at(step) and not orders.stop:  # a stopped run evaluates when it is resumed
                orders = self._evaluate(state, step, metrics)
            self._saving.raise_error()
            if orders.stop or step == self._last:
                self._finish(state, step, metrics, orders)
                break
        return state

    # Which steps

    def _logs_at(self, step: int) -> bool:
        return step % self._training.log_every == 0 or step == self._last

    def _evaluates_at(self, step: int) -> bool:
        return step % self._eval_every == 0 or step == self._steps

    # The beginning

    def _begin(self) -> tuple[Any, int, bool]:
        """The first state, its step, and whether it is to be evaluated: from the newest complete checkpoint, another
        run's, or newly initialised."""
        about, folder = {**self._about, "workers": str(self._session.workers)}, self._spec.run_folder
        self._session.emit(Started(about))
        write_or_warn(self._session, "what it runs on", lambda: records.write_about(folder, about))
        self._session.rest()  # fetching may take any time; storage has its own time limits
        checkpoint = self._newest()
        source = checkpoint or self._spec.start_from
        step = source.step if source else 0
        is_due = self._evaluates_at(step) or checkpoint is None
        if is_due:  # unless it has been evaluated: a run may have been killed between saving and validating
            is_due = bool(self._session.decide(lambda: not checkpoints.is_evaluated(folder, step)))
        self._session.resume(step, is_validated=not is_due)
        if source:
            self._session.emit(Resumed(step, source.folder, is_fork=checkpoint is None))
        with checkpoints.fetched_to_node(source) if source else contextlib.nullcontext("") as fetched:
            self._session.beat(step)
            state = self._restore(source, fetched) if source else self._engine.start()
        self._session.beat(step)
        return state, step, is_due

    def _newest(self) -> Checkpoint | None:
        """The run's newest complete checkpoint. Only rank 0 searches: verifying the checksums reads all of it."""

        def find() -> int:
            found, warnings = checkpoints.newest_intact(self._spec.run_folder)
            for warning in warnings:
                self._session.warn(warning)
            with contextlib.suppress(OSError, RaygptError):
                checkpoints.remove_unfinished(self._spec.run_folder)
            return found.step if found else -1

        step = self._session.decide(find)
        return None if step < 0 else Checkpoint(step, checkpoints.folder_of(self._spec.run_folder, step))

    def _restore(self, checkpoint: Checkpoint, folder: str) -> Any:
        """The state of a checkpoint with its files in `folder`; the other engine's is converted by plain arrays."""
        writer = checkpoints.facts(checkpoint)["engine"]
        if writer == self._spec.recipe.engine:
            return self._engine.restore(folder)
        model, vocab = self._spec.recipe.model, self._spec.tokenizer.vocab
        return self._engine.load(read_plain_state(writer, folder, model, vocab))

    # A step

    def _batches(self, first: int) -> Iterator[Any]:
        """The batches from step `first` on, prefetched. Steps are numbered from 1: step n consumes batch n-1."""
        rows = self._engine.rows
        self._taken = first
        self._spec.feed.read_ahead(self._report_wait)
        read = (self._engine.put(self._spec.feed.rows(n, rows)) for n in range(first, self._last))
        for batch, waited in prefetch(read, AHEAD):
            self._log.data_wait_s += waited
            yield batch

    def _report_wait(self, text: str) -> None:
        """A fetch waits for an object store, however long that is away: the worker is not hung."""
        self._session.warn(text)
        self._session.beat(self._taken)

    def _step(self, state: Any, step: int, batch: Any) -> tuple[Any, Any]:
        """The new state, and metrics that are still on the device."""
        self._spec.faults.strike(step, self._session.rank)
        self._profile.before(step)
        state, metrics = self._engine.step(state, batch)
        self._end_profile(lambda: self._profile.after(step, partial(self._engine.read, metrics)))
        self._taken = step
        self._session.beat(step)
        return state, metrics

    def _make_profile(self) -> Profile:
        """The profiler of the requested steps, in one worker; usually there are none."""
        steps = self._spec.profile if self._session.rank == 0 else None
        return Profile(*(steps or (0, 0)), self._spec.run_folder, self._spec.recipe.engine)

    def _end_profile(self, end: Callable[[], str | None]) -> None:
        """`end` writes the profile if it is complete, or what there is of it at the run's end, and returns the file."""

        def write() -> None:
            if file := end():
                self._session.emit(ProfileWritten(file))

        write_or_warn(self._session, "the profile", write)

    # After a step

    def _record(self, step: int, metrics: Any, waited: float, clock: Clock) -> None:
        """Log a step once the device has finished it."""
        read = self._engine.read(metrics)
        self._divergence.check_logged(step, read)
        for count in ("skipped", "spikes"):
            if not read[count]:
                read.pop(count)
        values = {**read, "tokens": step * self._training.batch_tokens}
        steps_per_s = clock.lap(step)
        if steps_per_s:  # none for the first step, which includes compilation
            speed = values["tokens_per_s"] = steps_per_s * self._training.batch_tokens
            share = mfu(speed, self._spec.flops_per_token, self._about["device"], self._engine.device_count)
            values |= {} if share is None else {"mfu": share}
        self._session.record(StepLogged(step, {**values, "data_wait_s": waited}))

    def _poll_if_due(self, step: int, metrics: Any) -> Orders:
        """The orders for all workers. They poll after every logged step, and at least every few seconds."""
        if not self._logs_at(step):
            if not self._polling.is_due(step):
                return Orders()
            self._engine.read(metrics)  # otherwise the device would be far behind this step
        return self._polling.poll(step)

    def _save_if_due(self, state: Any, step: int, metrics: Any, orders: Orders) -> None:
        self._is_save_ordered = self._is_save_ordered or orders.save
        is_end = orders.stop or step == self._last
        if is_end or self._is_save_ordered or step % self._save_every == 0:
            self._save(state, step, metrics, is_end)

    def _save(self, state: Any, step: int, metrics: Any, is_end: bool = False) -> None:
        """Start a checkpoint, unless the previous one is still being written."""
        if self._saving.begin(state, step, metrics, is_end):
            self._is_save_ordered = False

    def _before_commit(self, step: int, metrics: dict[str, float]) -> None:
        """Refuse a diverged state, and first write the metrics up to it: a resumed run does not log them again."""
        self._divergence.check_saved(step, metrics)
        self._log.wait_for(step)

    def _evaluate(self, state: Any, step: int, metrics: Any = None) -> Orders:
        """Evaluate, polling after each part: save in between if ordered to, and return early, with the order, if all
        workers are to stop. Before the first step there are no metrics, and nothing new to save."""
        polling, parts = Polling(self._session), itertools.count(1)

        def after_part() -> None:
            part = next(parts)
            orders = polling.poll(part) if polling.is_due(part) else Orders()
            if orders.save:
                self._is_save_ordered = True
                if metrics is not None:
                    self._save(state, step, metrics)
            if orders.stop:
                raise EvaluationStoppedError

        self._log.flush()
        orders = Orders()
        try:
            self._evaluation.run(state, step, after_part)
        except EvaluationStoppedError:
            orders = Orders(stop=True)
        self._log.restart(step)
        self._polling.restart(step)
        return orders

    def _finish(self, state: Any, step: int, metrics: Any, orders: Orders) -> None:
        """Log and save everything."""
        self._log.flush()
        self._saving.finish(state, step, metrics)
        self._session.emit(Stopped(step) if orders.stop or step < self._steps else Finished(step))
