"""`training`: how long, in what batches, and what happens on the way."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from raygpt.config.parts import SEEDS, Integer, May, Number, Part, refuse_credentials, shown


def _count_or_epoch(every: object, info: ValidationInfo) -> object:
    """'100' -> 100, and 'epoch' stays."""
    if every == "epoch":
        return every
    if not re.fullmatch(r"0*[1-9][0-9]{0,17}", str(every)):
        raise ValueError(
            f"training.{info.field_name}: {shown(every)} is neither a number of steps nor epoch; "
            f"write e.g. training.{info.field_name}: 100"
        )
    return int(str(every))


Every = Annotated[int | Literal["epoch"], BeforeValidator(_count_or_epoch), "int or epoch"]

TASKS = ("hellaswag", "lambada")
STEPS = 2**31  # engines count them in int32
TOKENS = 2**31  # of a batch, whose rows are listed


def _listed(value: object) -> object:
    """A single text is a list of one."""
    return [value] if isinstance(value, str) else value


def _task_names(names: object) -> object:
    """Refuse unknown tasks."""
    names = _listed(names)
    seen = set()
    for name in names if isinstance(names, list | tuple) else []:
        task, equals, path = str(name).partition("=")
        refuse_credentials("training.eval_tasks", path)
        if task not in TASKS or (equals and not path):
            raise ValueError(
                f"training.eval_tasks: {shown(name)} is no task; write {' or '.join(TASKS)}, or e.g. lambada=FILE.jsonl"
            )
        if task in seen:
            raise ValueError(f"training.eval_tasks: {task} is there twice; leave one out")
        seen.add(task)
    return names


def _some_text(prompts: object) -> object:
    """Refuse empty prompts."""
    prompts = _listed(prompts)
    if isinstance(prompts, list | tuple) and "" in prompts:
        raise ValueError(
            "training.prompts: one of them is empty; write some text, or none at all to begin as a document does"
        )
    return prompts


class Training(Part):
    """Length, batches, evaluation and checkpoints."""

    steps: Annotated[Integer, Field(gt=0, lt=STEPS)] | None = Field(
        1000, description="Total optimizer steps; null if epochs is given."
    )
    epochs: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="Total passes over the corpus; null if steps is given."
    )
    batch_tokens: Integer = Field(
        4096, gt=0, lt=TOKENS, description="Tokens per step, over all workers; a multiple of model.context."
    )
    seed: Integer = Field(1337, ge=0, lt=SEEDS, description="Decides initial weights, dropout and data order.")
    log_every: Annotated[Integer, May.CHANGE] = Field(10, gt=0, description="Steps between lines of the log.")
    eval_every: Annotated[Every, May.CHANGE] = Field(
        100, description="Steps between validations, or epoch: once per epoch."
    )
    eval_rows: Annotated[Annotated[Integer, Field(gt=0)] | None, May.CHANGE] = Field(
        None, description="Windows to validate on, evenly spaced and always the same; null takes all."
    )
    eval_tasks: Annotated[tuple[str, ...], BeforeValidator(_task_names), "list of text", May.CHANGE] = Field(
        (), description="Tasks of each validation: hellaswag, lambada; or e.g. lambada=FILE.jsonl for its items."
    )
    eval_items: Annotated[Annotated[Integer, Field(gt=0)] | None, May.CHANGE] = Field(
        None, description="Use only the first items of each task; null takes all."
    )
    prompts: Annotated[tuple[str, ...], BeforeValidator(_some_text), "list of text", May.CHANGE] = Field(
        (), description="Texts to continue at each validation; without any, a new document is generated."
    )
    checkpoint_every: Annotated[Every, May.CHANGE] = Field(
        100, description="Steps between checkpoints, or epoch: once per epoch."
    )
    on_nan: Annotated[Literal["stop", "skip"], May.CHANGE] = Field(
        "stop", description="When a loss is not a number: end the run, or skip and count the step."
    )
    deterministic: Annotated[bool, May.CHANGE] = Field(
        False, description="Bit-identical results on the same GPUs, at some cost in speed; CPUs always are."
    )
    on_spike: Annotated[Literal["ignore", "warn", "skip", "stop"], May.CHANGE] = Field(
        "ignore", description="When loss or gradient norm is far above the usual: warn, skip the step, or end the run."
    )
    spike_sigmas: Annotated[Number, May.CHANGE] = Field(
        6.0, gt=0, description="How far above: in standard deviations over about the last 100 steps."
    )
    hang_after: Annotated[Annotated[Number, Field(gt=0)] | None, May.CHANGE] = Field(
        900, description="Seconds without a step, compiling included, after which a worker counts as hung."
    )
    compile: Annotated[Literal["auto", "scanned", "unrolled", "off"], May.CHANGE] = Field(
        "auto", description="The layers as one loop (compiles fast), one after another (runs fast), or not at all."
    )
    accumulation: Annotated[Annotated[Integer, Field(gt=0)] | None, May.CHANGE] = Field(
        None, description="Micro-batches that a batch is computed in, one after another; null: as memory requires."
    )
    remat: Annotated[Literal["none", "products", "blocks"], May.CHANGE] = Field(
        "none", description="What is recomputed to save memory: nothing, all but matrix products, whole blocks."
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_stand_for_steps(cls, value: object) -> object:
        if isinstance(value, Mapping) and value.get("epochs") is not None and "steps" not in value:
            return {**value, "steps": None}
        return value

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        if self.eval_items is not None and not self.eval_tasks:
            raise ValueError("training.eval_items: does nothing without eval_tasks; write e.g. eval_tasks: lambada")
        if self.on_spike == "ignore" and self.spike_sigmas != Training.model_fields["spike_sigmas"].default:
            raise ValueError("training.spike_sigmas: does nothing while on_spike is ignore; write e.g. on_spike: warn")
        return self

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError(
                "training.steps: null leaves the run without a length; "
                "write e.g. training.steps: 1000, or training.epochs: 5"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"training.epochs: {self.epochs:g} is a second length beside training.steps {self.steps}; "
                "write training.steps: null, or leave training.epochs out"
            )
        return self

    @property
    def in_epochs(self) -> str | None:
        """The key that is given in epochs, if any, as in the recipe: it needs the complete corpus."""
        every = [
            f"training.{key}: epoch" for key in ("eval_every", "checkpoint_every") if getattr(self, key) == "epoch"
        ]
        return next(iter([f"training.epochs: {self.epochs:g}"] if self.epochs else every), None)
