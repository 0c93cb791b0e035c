"""What to train, as it is sent to every worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from raygpt.config import Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed
from raygpt.corpus.store import TokenStream
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.evaluation.tasks import Item
from raygpt.models import describe
from raygpt.runs.checkpoints import Checkpoint
from raygpt.testing.faults import Faults


@dataclass(frozen=True, repr=False)
class RunSpec:
    """A recipe with its corpus and its run directory."""

    recipe: Recipe
    feed: Feed
    val: tuple[TokenStream, ...]
    run_folder: str
    start_from: Checkpoint | None = None  # another run's
    eval_items: Mapping[str, Sequence[Item]] = field(default_factory=dict)  # by task, for each evaluation
    profile: tuple[int, int] | None = None  # the first and the last step to trace
    until: int | None = None  # stop and save after this step; None trains to the last
    faults: Faults = field(default_factory=Faults)  # injected by tests

    def __repr__(self) -> str:
        """Short: Ray's dashboard shows it to everyone, and a recipe's runtime_env may hold secrets."""
        return f"RunSpec({self.run_folder!r})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.run_folder)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint records about its run."""
        return {
            "engine": self.recipe.engine,
            "recipe": self.recipe.to_dict(),
            "tokenizer": tokenizers.fingerprint(self.tokenizer),
            "data": [stream.index.fingerprint for stream in self.feed.streams],
        }

    @property
    def flops_per_token(self) -> int:
        return describe(self.recipe.model, self.tokenizer.vocab).flops_per_token
