"""Evaluation during training: validation loss, task scores, and samples of generated text."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from raygpt.corpus.feed import val_windows
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines.base import Engine
from raygpt.evaluation import tasks
from raygpt.runs import checkpoints, records
from raygpt.training import samples
from raygpt.training.events import Sampled, Validated
from raygpt.training.session import Session, write_or_warn
from raygpt.training.spec import RunSpec


class InTraining(NamedTuple):
    """A model in training, as the tasks need it."""

    tokenizer: Tokenizer
    reader: Engine
    state: Any


class Evaluation:
    """Evaluates states of one run; all workers do the same."""

    def __init__(self, spec: RunSpec, engine: Engine, session: Session):
        self._spec, self._engine, self._session = spec, engine, session
        self._training = spec.recipe.training

    def run(self, state: Any, step: int, after_part: Callable[[], None] = lambda: None) -> None:
        """Evaluate a step's state and record the results. `after_part` is called after every part, in all workers."""

        def part_done() -> None:
            self._session.beat(step)
            after_part()

        loss = self._val_loss(state, part_done)
        scores = self._task_scores(state, part_done)
        texts = self._texts(state, part_done)
        # What is recorded counts as evaluated, so everything that a stop may end comes before.
        if loss is not None or scores:
            self._session.record(Validated(step, {**({} if loss is None else {"val_loss": loss}), **scores}))
        write_or_warn(self._session, f"the validation loss of step {step}", lambda: self._keep_loss(step, loss))
        self._keep_texts(step, texts)

    def _val_loss(self, state: Any, part_done: Callable[[], None]) -> float | None:
        """Mean over the validation set, or `eval_rows` of its rows, evenly spaced; None without a validation set."""
        losses = []
        context, rows = self._engine.context, self._engine.micro_rows
        for windows in val_windows(self._spec.val, context, rows, self._training.eval_rows):
            losses.append(self._engine.window_losses(state, windows))
            part_done()
        return float(np.concatenate(losses).mean(dtype=np.float64)) if losses else None

    def _task_scores(self, state: Any, part_done: Callable[[], None]) -> dict[str, float]:
        """Scores of the recipe's tasks by metric name: lambada_acc, lambada_perplexity and so on."""
        model = InTraining(self._spec.tokenizer, self._engine, state)
        found: dict[str, float] = {}
        for name, items in self._spec.eval_items.items():
            result = tasks.evaluate(model, name, items, lambda done, total: part_done())
            found |= {f"{name}_{key}": result[key] for key in tasks.TASKS[name].figures}
        return found

    def _keep_loss(self, step: int, loss: float | None) -> None:
        """Record the loss beside the checkpoints; it decides which of them are kept."""
        checkpoints.write_val_loss(self._spec.run_folder, step, loss)
        checkpoints.prune(self._spec.run_folder, self._spec.recipe.run, step)

    def _texts(self, state: Any, part_done: Callable[[], None]) -> list[str]:
        """A text generated from each of the recipe's prompts, always with the same seed."""
        training, tokenizer = self._training, self._spec.tokenizer
        return samples.write(self._engine, state, tokenizer, training.prompts, training.seed, part_done)

    def _keep_texts(self, step: int, texts: list[str]) -> None:
        recipe_prompts = self._training.prompts
        for sample in records.samples_of(step, texts, recipe_prompts):
            self._session.emit(Sampled(**sample))
        write_or_warn(
            self._session,
            f"the samples of step {step}",
            lambda: records.keep_sample(self._spec.run_folder, step, *texts, prompts=recipe_prompts),
        )
