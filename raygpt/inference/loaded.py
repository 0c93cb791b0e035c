"""Loads a run's model into this process: its best checkpoint, or another. Needs no Ray."""

from dataclasses import dataclass
from typing import Any

from raygpt.config import Model, Recipe
from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines import make_reader, read_parameters, require
from raygpt.engines.base import Arrays, Reader
from raygpt.errors import RaygptError
from raygpt.runs import OpenRun, checkpoints
from raygpt.runs.checkpoints import Checkpoint


@dataclass(frozen=True)
class CheckpointWeights:
    """The parameters of a checkpoint in this host's memory, with its run."""

    run: OpenRun
    checkpoint: Checkpoint
    engine: str  # the engine that wrote it
    parameters: Arrays

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def model(self) -> Model:
        return self.recipe.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.tokenizer

    @property
    def val_loss(self) -> float | None:
        """The loss measured during training."""
        return self.run.val_losses.get(self.checkpoint.step)


@dataclass(frozen=True)
class LoadedModel(CheckpointWeights):
    """Parameters on a device, with the reader that computes with them."""

    reader: Reader
    state: Any


def read(run: OpenRun, step: int | None = None, best: bool = True) -> CheckpointWeights:
    """A checkpoint's parameters: of a step, or the best, or the newest."""
    model = run.recipe.model
    picked = run.pick(step, best)
    facts = checkpoints.facts(picked)
    require(facts["engine"])
    if facts["tokenizer"] != tokenizers.fingerprint(run.tokenizer):
        raise RaygptError(f"{run.folder}: its tokenizer is not the one it was trained with; copy the run again")
    with checkpoints.fetched_to_node(picked) as folder:
        parameters = read_parameters(facts["engine"], folder, model, run.tokenizer.vocab)
    return CheckpointWeights(run, picked, facts["engine"], parameters)


def load(run: OpenRun, step: int | None = None, best: bool = True) -> LoadedModel:
    """Load a checkpoint onto this machine's device, with the engine that trained it."""
    found = read(run, step, best)
    reader = make_reader(found.engine, found.model, run.tokenizer.vocab)
    return LoadedModel(run, found.checkpoint, found.engine, found.parameters, reader, reader.load(found.parameters))
