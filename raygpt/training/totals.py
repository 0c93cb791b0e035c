"""Every number that follows from a recipe and its corpus, whatever it runs on."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from raygpt.config import Recipe
from raygpt.config.training import STEPS
from raygpt.errors import RaygptError
from raygpt.formatting import ratio_text
from raygpt.models import describe
from raygpt.recipes.explain import explain_first


@dataclass(frozen=True)
class Totals:
    """The numbers of a run that do not depend on the hardware."""

    parameters: int
    vocab: int
    train_tokens: int | None  # None while the corpus is still being tokenised
    val_tokens: int
    steps: int
    rows: int  # of a batch
    context: int
    flops_per_token: int
    run_folder: str

    @property
    def batch_tokens(self) -> int:
        return self.rows * self.context

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def epochs(self) -> float | None:
        return self.tokens / self.train_tokens if self.train_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """All of them as JSON values."""
        return {**asdict(self), "batch_tokens": self.batch_tokens, "tokens": self.tokens, "epochs": self.epochs}

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each number, for the console."""
        to_train_on = (
            "tokenised while it trains" if self.train_tokens is None else f"{self.train_tokens:,} tokens to train on"
        )
        epochs = "" if self.epochs is None else f"{self.epochs:.2f} epochs, "
        return [
            ("parameters", f"{self.parameters:,} with {self.vocab:,} tokens in the vocabulary"),
            ("corpus", f"{to_train_on}, {self.val_tokens:,} to validate"),
            (
                "training",
                f"{self.steps:,} steps × {self.rows:,} rows × {self.context:,} tokens = {self.tokens:,} tokens, "
                f"{epochs}{ratio_text(self.tokens / self.parameters)} tokens per parameter",
            ),
            (
                "compute",
                f"{self.flops_per_token / 1e6:,.1f} MFLOPs per token, "
                f"{self.flops_per_token * self.tokens:.2e} FLOPs in all",
            ),
            ("run", self.run_folder),
        ]


def in_steps(recipe: Recipe, windows: int) -> Recipe:
    """The recipe with epochs converted to steps; an epoch is as many steps as it takes to see all windows."""
    training = recipe.training
    if not windows:
        raise RaygptError(
            f"data.source: has fewer tokens than a window of {recipe.model.context + 1}; set model.context lower, or "
            "use more text"
        )
    epoch = -(-windows // recipe.rows)
    steps = training.steps if training.epochs is None else _steps_in(training.epochs, epoch)
    lengths = {"steps": steps, "epochs": None}
    lengths |= {key: epoch for key in ("eval_every", "checkpoint_every") if getattr(training, key) == "epoch"}
    try:
        return Recipe.model_validate(dict(recipe) | {"training": training.model_copy(update=lengths)})
    except ValidationError as error:  # a warm-up longer than the run
        raise RaygptError(explain_first(error)) from None


def _steps_in(epochs: float, epoch: int) -> int:
    if epochs * epoch > STEPS - 1:
        raise RaygptError(
            f"training.epochs: {epochs:g} of {epoch:,} steps are more than {STEPS - 1:,} steps; write fewer"
        )
    return math.ceil(epochs * epoch)


def compute_totals(recipe: Recipe, *, vocab: int, train_tokens: int | None, val_tokens: int, run_folder: str) -> Totals:
    """The totals of a recipe with its corpus."""
    description = describe(recipe.model, vocab)
    return Totals(
        parameters=description.count,
        vocab=vocab,
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        steps=recipe.steps,
        rows=recipe.rows,
        context=recipe.model.context,
        flops_per_token=description.flops_per_token,
        run_folder=run_folder,
    )
