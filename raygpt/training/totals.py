"""Every number that follows from a recipe and its corpus, whatever it runs on."""

from dataclasses import asdict, dataclass
from typing import Any

from raygpt.config import Recipe
from raygpt.formatting import ratio_text
from raygpt.models import describe


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
