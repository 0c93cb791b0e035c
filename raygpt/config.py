"""Recipe and its parts: one validated object, made once by `recipes.load_recipe` and passed down.

A recipe is YAML in parts (`model`, `data`, `optimizer`, …), each a frozen pydantic model below. Keys are
written dotted in overrides and in errors: `training.steps`.
"""

import re
from collections.abc import Mapping
from math import gcd, prod
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from raygpt.errors import RaygptError

# Layers, heads, width of the four published GPT-2 sizes; all have a context of 1024.
PRESETS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}

MIN_BPE = 258  # 256 bytes, end of text and one merge
SEEDS = 2**32  # the range that NumPy, JAX and PyTorch all take


def _not_bool(value: object) -> object:
    """Python counts True as 1, a recipe does not: as text it is refused like any other word."""
    return str(value) if isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool)]
Beta = Annotated[Real, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A group of keys. Unknown keys are errors; a part without keys (`training:`) is all defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, value: object) -> object:
        return {} if value is None else value


# Validators raise ValueError with the whole line, key included; `load_recipe` turns it into a RaygptError.


class Model(Part):
    """GPT-2's shape. The defaults are the tiny model's."""

    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] | None = Field(
        None, description="A published size: layers, heads, width and context (1024) that are not set here."
    )
    layers: Whole = Field(4, gt=0, description="Transformer blocks.")
    heads: Whole = Field(4, gt=0, description="Attention heads; must divide width.")
    width: Whole = Field(128, gt=0, description="Size of the residual stream.")
    context: Whole = Field(128, gt=0, description="Tokens that the model sees at once.")
    dropout: Real = Field(0.0, ge=0, lt=1, description="Share of activations dropped in training.")
    bias: bool = Field(True, description="Biases in linear layers and norms.")
    tied_head: bool = Field(True, description="The output head is the token embedding, transposed.")
    init: Literal["gpt2", "xavier"] = Field(
        "gpt2", description="gpt2: normal 0.02, residual projections / sqrt(2·layers); xavier: uniform."
    )
    norm_epsilon: Real = Field(1e-5, gt=0, description="Added to the variance in each norm.")
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = Field(
        "auto", description="Of the arithmetic; parameters stay fp32. auto: the best that the device has."
    )
    implementation: Literal["raygpt", "huggingface"] = Field(
        "raygpt", description="Whose GPT-2: raygpt's own, or that of transformers, which needs engine torch."
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_from_preset(cls, value: object) -> object:
        if not isinstance(value, Mapping) or str(value.get("preset")) not in PRESETS:
            return value
        layers, heads, width = PRESETS[str(value["preset"])]
        return {"layers": layers, "heads": heads, "width": width, "context": 1024, **value}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"model.width: {self.width} does not divide into model.heads {self.heads} equal heads; "
                f"write {_multiples_around(self.width, self.heads)}"
            )
        return self

    def parameters(self, vocab: int) -> int:
        """The exact number of parameters with `vocab` tokens; 124,439,808 for GPT-2 small's 50257."""
        width, bias = self.width, int(self.bias)
        norm = width + bias * width
        attention = 4 * width * width + bias * 4 * width  # query, key, value and the projection back
        mlp = 8 * width * width + bias * 5 * width  # to 4·width and back
        embeddings = (vocab + self.context) * width
        head = 0 if self.tied_head else vocab * width  # never has a bias
        return embeddings + self.layers * (2 * norm + attention + mlp) + norm + head

    def flops_per_token(self, vocab: int) -> int:
        """Operations per token, forward and backward: 6 · parameters + 12 · layers · width · context.

        The second term is attention's scores and sums. An untied input embedding is only looked up, so its
        table does not count; a tied one does its multiplying as the head.
        """
        looked_up = 0 if self.tied_head else vocab * self.width
        return 6 * (self.parameters(vocab) - looked_up) + 12 * self.layers * self.width * self.context


class Source(Part):
    """One text of a mixture."""

    source: str = Field(min_length=1, description="A name or path, as in data.source.")
    weight: Real = Field(gt=0, description="Its share of the windows, relative to the other weights.")


def _one_or_mixture(source: object) -> str:
    return "mixture" if isinstance(source, list | tuple) else "one"


def _share_or_source(val: object) -> object:
    """'0.05' -> 0.05, and text that is no number is a source."""
    try:
        share = float(str(val))
    except ValueError:
        if isinstance(val, str) and val:
            return val
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"data.val: {shown(val)} is no share between 0 and 1; write e.g. data.val: 0.05")
    return share


class Data(Part):
    """The text, how it becomes tokens, and which of it is kept for validation."""

    source: Annotated[
        Annotated[str, Field(min_length=1), Tag("one")] | Annotated[tuple[Source, ...], Tag("mixture")],
        Discriminator(_one_or_mixture),
        "text or list of {source, weight}",
    ] = Field("stdlib", description="A corpus by name, a file, folder or pattern; or a mixture of these.")
    tokenizer: str = Field(
        "bpe:4096", description="gpt2, bytes, char, bpe:N (trained on the text), a .json file or a folder."
    )
    order: Literal["shuffled", "sequential", "random"] = Field(
        "shuffled", description="Of windows: each once an epoch, as the text has them, or with replacement."
    )
    val: Annotated[float | str, BeforeValidator(_share_or_source), "share or source"] = Field(
        0.05, description="The validation text: a share of the source, or a source of its own."
    )
    split: Literal["documents", "tail", "huggingface"] = Field(
        "documents",
        description="How val's share is taken: by a document's hash, off the end, or as datasets does.",
    )
    split_seed: Whole = Field(2357, ge=0, lt=SEEDS, description="Decides which documents or rows val gets.")
    column: str = Field("text", min_length=1, description="Where jsonl and parquet hold the text.")
    limit: Annotated[Whole, Field(gt=0)] | None = Field(
        None, description="Only so many rows of each source, its first: lines of text, rows of jsonl and parquet."
    )

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, name: str) -> str:
        _refuse_credentials("data.tokenizer", name)
        bpe = re.fullmatch(r"bpe:([0-9]{1,9})", name)
        is_path = name.endswith(".json") or "/" in name
        if name in ("gpt2", "bytes", "char") or is_path or (bpe and int(bpe[1]) >= MIN_BPE):
            return name
        if name.startswith("bpe"):
            raise ValueError(
                f"data.tokenizer: {shown(name)} is not bpe:N with a whole N of at least {MIN_BPE}; "
                "write e.g. data.tokenizer: bpe:4096"
            )
        raise ValueError(
            f"data.tokenizer: {shown(name)} is not gpt2, bytes, char, bpe:N, a .json file or a ./folder; "
            "write e.g. data.tokenizer: bpe:4096"
        )

    @field_validator("source", "val")
    @classmethod
    def _hold_no_credentials(cls, value: Any, info: ValidationInfo) -> Any:
        parts = value if isinstance(value, tuple) else [value]
        for part in parts:
            _refuse_credentials(f"data.{info.field_name}", getattr(part, "source", str(part)))
        return value

    @model_validator(mode="after")
    def _texts_are_distinct(self) -> Self:
        names = [part.source for part in self.sources]
        if not names:
            raise ValueError("data.source: the mixture is empty; write e.g. data.source: stdlib")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"data.source: {shown(twice)} is in the mixture twice; write it once")
        if self.val in names:
            raise ValueError(f"data.val: {shown(self.val)} is also trained on; write e.g. data.val: 0.05")
        return self

    @model_validator(mode="after")
    def _split_has_a_share(self) -> Self:
        if isinstance(self.val, str) and self.split != "documents":
            raise ValueError(
                f"data.split: {self.split} needs a share, but data.val is the source {shown(self.val)}; "
                "write e.g. data.val: 0.05, or data.split: documents"
            )
        return self

    @model_validator(mode="after")
    def _limit_is_known_to_the_split(self) -> Self:
        if self.limit and self.split == "huggingface":
            raise ValueError(
                f"data.limit: {self.limit} is not for data.split huggingface, which draws from all rows; "
                "write data.split: documents"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The mixture; a single source is a mixture of one."""
        return (Source(source=self.source, weight=1.0),) if isinstance(self.source, str) else self.source


class Optimizer(Part):
    """AdamW."""

    learning_rate: Real = Field(1e-3, gt=0, description="The highest rate; the schedule scales it.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="How much of the gradient's running mean and square each step keeps."
    )
    epsilon: Real = Field(1e-8, gt=0, description="Added to the divisor, so that it is never zero.")
    weight_decay: Real = Field(0.1, ge=0, description="Share of a weight taken off per step, times the rate.")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="What decays: matrices and embeddings only, or biases and norms too."
    )
    clip: Annotated[Real, Field(gt=0)] | None = Field(
        1.0, description="The gradient's largest global norm; null does not clip."
    )


class Schedule(Part):
    """The learning rate over the steps, as a share of optimizer.learning_rate."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="The shape after warm-up; wsd is constant, then falls at the end."
    )
    warmup_steps: Whole = Field(0, ge=0, description="Steps in which the rate rises from 0.")
    end: Real = Field(0.1, ge=0, le=1, description="What the rate falls to after the last step, as a share.")
    decay_share: Real = Field(0.2, gt=0, le=1, description="wsd: the share of steps in which the rate falls.")

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        # Compared with the default, not with "was it written": a resolved recipe writes every key.
        defaults = {name: field.default for name, field in Schedule.model_fields.items()}
        if self.kind != "wsd" and self.decay_share != defaults["decay_share"]:
            raise ValueError(
                f"schedule.decay_share: {self.decay_share} has no effect with schedule.kind {self.kind}; "
                "write schedule.kind: wsd, or leave schedule.decay_share at 0.2"
            )
        if self.kind == "constant" and self.end != defaults["end"]:
            raise ValueError(
                f"schedule.end: {self.end} has no effect with schedule.kind constant; "
                "write e.g. schedule.kind: cosine, or leave schedule.end at 0.1"
            )
        return self


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


def _task_names(names: object) -> object:
    """One stands for a list of one; each has a name that there is."""
    names = [names] if isinstance(names, str) else names
    for name in names if isinstance(names, list | tuple) else []:
        task, equals, path = str(name).partition("=")
        if task not in TASKS or (equals and not path):
            raise ValueError(
                f"training.eval_tasks: {shown(name)} is no task; write {' or '.join(TASKS)}, or e.g. lambada=FILE.jsonl"
            )
    return names


def _some_text(prompts: object) -> object:
    """One stands for a list of one; each has some text."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, list | tuple) and "" in prompts:
        raise ValueError(
            "training.prompts: one of them is empty; write some text, or none at all to begin as a document does"
        )
    return prompts


class Training(Part):
    """How long, in what batches, and what happens on the way."""

    steps: Annotated[Whole, Field(gt=0)] | None = Field(
        1000, description="Optimizer steps in all; null where epochs says how long."
    )
    epochs: Annotated[Real, Field(gt=0)] | None = Field(
        None, description="Passes over the corpus in all; null where steps says how long."
    )
    batch_tokens: Whole = Field(4096, gt=0, description="Tokens a step, all workers together; whole rows.")
    seed: Whole = Field(1337, ge=0, lt=SEEDS, description="Decides first weights, dropout and data order.")
    log_every: Whole = Field(10, gt=0, description="Steps between lines of the log.")
    eval_every: Every = Field(100, description="Steps between validations, or epoch: once in each.")
    eval_rows: Annotated[Whole, Field(gt=0)] | None = Field(
        None, description="Windows to validate on, evenly spread and always the same; null takes all."
    )
    eval_tasks: Annotated[tuple[str, ...], BeforeValidator(_task_names), "list of text"] = Field(
        (), description="Scored at each validation: hellaswag, lambada; or e.g. lambada=FILE.jsonl for its items."
    )
    eval_items: Annotated[Whole, Field(gt=0)] | None = Field(
        None, description="Items of each task to score, its first; null takes all."
    )
    prompts: Annotated[tuple[str, ...], BeforeValidator(_some_text), "list of text"] = Field(
        (), description="A sample is written on from each at each validation; without any, as a document begins."
    )
    checkpoint_every: Every = Field(100, description="Steps between checkpoints, or epoch: once in each.")
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="When a loss is not a number: end the run, or leave the step out and count it."
    )
    deterministic: bool = Field(
        False, description="The same bits every time on the same GPUs, which costs some speed; a CPU's always are."
    )
    on_spike: Literal["ignore", "warn", "skip", "stop"] = Field(
        "ignore", description="When loss or gradient norm is far above what it was: warn, leave the step out, or end."
    )
    spike_sigmas: Real = Field(6.0, gt=0, description="How far: in standard deviations over about the last 100 steps.")
    hang_after: Annotated[Real, Field(gt=0)] | None = Field(
        900,
        description="Seconds without a step, compiling included, after which a worker counts as hung.",
    )
    compile: Literal["auto", "scanned", "unrolled", "off"] = Field(
        "auto", description="The layers as one loop (compiles fast), one after another (runs fast), or not at all."
    )
    accumulation: Annotated[Whole, Field(gt=0)] | None = Field(
        None, description="Parts that a batch is computed in, one after another; null: as memory demands."
    )
    remat: Literal["none", "products", "blocks"] = Field(
        "none", description="What is computed again to save memory: nothing, all but matrix products, whole blocks."
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_stand_for_steps(cls, value: object) -> object:
        if isinstance(value, Mapping) and value.get("epochs") is not None and "steps" not in value:
            return {**value, "steps": None}
        return value

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
        """What is given in epochs, if anything, as one would write it: it needs the whole corpus."""
        every = [
            f"training.{key}: epoch" for key in ("eval_every", "checkpoint_every") if getattr(self, key) == "epoch"
        ]
        return next(iter([f"training.epochs: {self.epochs:g}"] if self.epochs else every), None)


class Mesh(Part):
    """How devices are arranged. One axis may be -1, what is left; that is `data` unless another is."""

    data: Whole = Field(-1, description="Copies of the model that share a batch.")
    fsdp: Whole = Field(1, description="Devices that share one copy's parameters, and the batch.")
    tensor: Whole = Field(1, description="Devices that share each matrix; must divide model.heads.")
    context: Whole = Field(1, description="Devices that share each row; must divide model.context. Engine jax alone.")

    @model_validator(mode="before")
    @classmethod
    def _only_one_takes_what_is_left(cls, value: object) -> object:
        if isinstance(value, Mapping) and "data" not in value and "-1" in map(str, value.values()):
            return {"data": 1, **value}
        return value

    @field_validator("data", "fsdp", "tensor", "context")
    @classmethod
    def _size(cls, size: int, info: ValidationInfo) -> int:
        if size < 1 and size != -1:
            raise ValueError(
                f"cluster.mesh.{info.field_name}: {size} is no number of devices; write 1 or more, "
                "or -1 for what is left"
            )
        return size

    @model_validator(mode="after")
    def _at_most_one_open_axis(self) -> Self:
        open_axes = [axis for axis, size in self.sizes().items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"cluster.mesh: {', '.join(open_axes)} are -1, and only one axis can be; "
                f"write e.g. cluster.mesh.{open_axes[0]}: 1"
            )
        return self

    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, in the order data, fsdp, tensor, context."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor, "context": self.context}

    def over(self, devices: int) -> dict[str, int]:
        """The same for so many devices: the axis that is -1 takes what the others leave."""
        fixed = prod(size for size in self.sizes().values() if size > 0)
        sizes = {axis: devices // fixed if size == -1 else size for axis, size in self.sizes().items()}
        if prod(sizes.values()) != devices:
            wanted = " × ".join(f"{axis}={size}" for axis, size in self.sizes().items() if size != 1) or "data=1"
            raise RaygptError(
                f"cluster.mesh: {wanted} does not multiply to the {devices} devices there are; "
                "write -1 for the axis that takes what is left, or change cluster.workers"
            )
        return sizes


def _count_or_range(workers: object) -> object:
    """'4' -> 4, and '1..4' stays."""
    text = str(workers)
    ends = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text)
    if not ends:
        raise ValueError(
            f"cluster.workers: {shown(workers)} is neither a whole number nor min..max; "
            "write e.g. cluster.workers: 1..4"
        )
    low, high = int(ends[1]), int(ends[2] or ends[1])
    if low < 1:
        raise ValueError(f"cluster.workers: {text!r} asks for none; write e.g. cluster.workers: 1")
    if low > high:
        raise ValueError(f"cluster.workers: {text!r} has min above max; write cluster.workers: {high}..{low}")
    return f"{low}..{high}" if ends[2] else low


class Cluster(Part):
    """Where it runs."""

    workers: Annotated[int | str, BeforeValidator(_count_or_range), "int or min..max"] = Field(
        1, description="Ray Train processes; min..max is elastic. The batches are the same for any number."
    )
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        "auto", description="What a worker computes on; auto takes a TPU or GPU where the cluster has one."
    )
    accelerator_type: str | None = Field(
        None, description="As Ray names it, e.g. H100 or TPU-V6E; null takes any. A TPU slice needs it."
    )
    topology: str | None = Field(None, description="Of a TPU slice, e.g. 4x4.")
    resources_per_worker: dict[str, Real] = Field(
        {}, description="As Ray names them; what is left out: 1 CPU, and 1 GPU or the chips of a TPU's host."
    )
    placement: Literal["auto", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "auto", description="Ray's strategy for where workers go; auto spreads TPU hosts and packs the rest."
    )
    runtime_env: dict[str, Any] = Field(  # left out of what is written to a run: it may hold secrets
        {}, exclude=True, description="Ray's runtime environment for the workers, e.g. {env_vars: {NAME: value}}."
    )
    max_faults: Whole = Field(
        100, ge=0, description="Times that lost workers are started again; a node that is taken away does not count."
    )
    mesh: Mesh = Field(Mesh(), description="How the devices of all workers are arranged.")

    @model_validator(mode="after")
    def _topology_is_a_tpus(self) -> Self:
        if self.topology and self.accelerator not in ("auto", "tpu"):
            raise ValueError(
                f"cluster.topology: {shown(self.topology)} is a TPU slice's, but cluster.accelerator is "
                f"{self.accelerator}; write cluster.accelerator: tpu, or leave cluster.topology out"
            )
        if self.topology and not self.accelerator_type:
            raise ValueError(
                f"cluster.accelerator_type: is missing for the slice {shown(self.topology)}; "
                "write e.g. cluster.accelerator_type: TPU-V6E"
            )
        return self

    @model_validator(mode="after")
    def _elastic_mesh_has_an_open_axis(self) -> Self:
        if self.min_workers < self.max_workers and -1 not in self.mesh.sizes().values():
            raise ValueError(
                f"cluster.mesh: every axis is fixed, but cluster.workers is {self.workers}; "
                "write cluster.mesh.data: -1, or one number of workers"
            )
        return self

    @property
    def min_workers(self) -> int:
        """The fewest workers that the run may have; equal to max_workers unless it is elastic."""
        return int(str(self.workers).split("..")[0])

    @property
    def max_workers(self) -> int:
        """The most workers that the run may have."""
        return int(str(self.workers).split("..")[-1])


class Run(Part):
    """Where its directory lies: storage/name."""

    name: str | None = Field(None, description="Of the run directory; null takes the recipe's name.")
    storage: str = Field("runs", min_length=1, description="A folder or s3:// address; shared by all nodes.")
    keep: Whole = Field(3, gt=0, description="Newest checkpoints that are kept.")
    keep_best: Whole = Field(1, ge=0, description="Checkpoints of the lowest validation loss that are kept besides.")
    keep_every: Annotated[Whole, Field(gt=0)] | None = Field(
        None, description="Checkpoints of these multiples of steps are kept for ever."
    )
    failed_saves: Whole = Field(5, gt=0, description="Checkpoints in a row that cannot be saved before the run ends.")
    start_from: str | None = Field(
        None, description="RUN or RUN@STEP: begin with that run's state, a name in storage or a path."
    )

    @field_validator("storage")
    @classmethod
    def _holds_no_credentials(cls, storage: str) -> str:
        _refuse_credentials("run.storage", storage)
        return storage

    @field_validator("name")
    @classmethod
    def _is_a_plain_folder_name(cls, name: str | None) -> str | None:
        if name is None:
            return None
        if name.lower() == "stores":  # lower: on a Mac, Stores is the same folder
            raise ValueError(f"run.name: {name!r} is where prepared tokens lie; write e.g. run.name: my-run")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name):
            raise ValueError(
                f"run.name: {shown(name)} is not 1 to 128 of A-Z a-z 0-9 . _ - without a '.' in front; "
                "write e.g. run.name: my-run"
            )
        return name


def _flag_or_address(mlflow: object) -> object:
    """'true' -> True, and an address stays."""
    if str(mlflow).lower() in ("true", "false"):
        return str(mlflow).lower() == "true"
    if not re.match(r"[a-z+]+:|databricks$", str(mlflow)):
        raise ValueError(
            f"track.mlflow: {shown(mlflow)} is neither true nor an address; write true, or e.g. http://host:5000"
        )
    _refuse_credentials("track.mlflow", str(mlflow))
    return mlflow


class Track(Part):
    """Trackers; each is an extra of its own name."""

    tensorboard: bool = Field(False, description="Event files in the run's folder: tensorboard --logdir RUN.")
    wandb: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="A Weights & Biases project; WANDB_MODE=offline keeps it on this disk."
    )
    mlflow: Annotated[bool | str, BeforeValidator(_flag_or_address), "true or address"] = Field(
        False, description="A tracking server's address, or true: mlflow.db beside the runs."
    )


class Recipe(Part):
    """Everything that decides a run. Made by `load_recipe`."""

    engine: Literal["jax", "torch"] = Field("jax", description="What computes: JAX or PyTorch.")
    model: Model = Field(Model(), description="What is trained.")
    data: Data = Field(Data(), description="What it is trained on.")
    optimizer: Optimizer = Field(Optimizer(), description="How a gradient becomes a step.")
    schedule: Schedule = Field(Schedule(), description="The learning rate over the steps.")
    training: Training = Field(Training(), description="How long and in what batches.")
    cluster: Cluster = Field(Cluster(), description="Where it runs.")
    run: Run = Field(Run(), description="Where its results go.")
    track: Track = Field(Track(), description="Who else is told of its metrics.")

    @model_validator(mode="after")
    def _batch_is_whole_rows(self) -> Self:
        tokens, context = self.training.batch_tokens, self.model.context
        if tokens % context:
            raise ValueError(
                f"training.batch_tokens: {tokens} is not a multiple of model.context {context}, "
                f"and a batch is whole rows; write {_multiples_around(tokens, context)}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        warmup, steps = self.schedule.warmup_steps, self.training.steps
        if steps is None:
            return self  # looked at again when epochs have become steps
        if warmup > steps:
            raise ValueError(
                f"schedule.warmup_steps: {warmup} is more than training.steps {steps}; write {steps} or less"
            )
        falling = round(self.schedule.decay_share * steps) if self.schedule.kind == "wsd" else 0
        if warmup + falling > steps:
            raise ValueError(
                f"schedule.warmup_steps: {warmup} reaches into the last {falling} of training.steps {steps}, "
                f"in which schedule.decay_share lets the rate fall; write {steps - falling} or less"
            )
        return self

    @model_validator(mode="after")
    def _transformers_model_fits(self) -> Self:
        if self.model.implementation == "huggingface" and self.engine != "torch":
            raise ValueError(f"model.implementation: huggingface is not for engine {self.engine}; write engine: torch")
        if self.model.implementation == "huggingface" and not self.model.bias:
            raise ValueError("model.bias: transformers' GPT-2 always has biases; write model.implementation: raygpt")
        if self.model.implementation == "huggingface" and self.cluster.mesh.tensor != 1:
            raise ValueError(
                f"cluster.mesh.tensor: {self.cluster.mesh.tensor} is not for transformers' GPT-2; "
                "write cluster.mesh.fsdp instead, or model.implementation: raygpt"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_compile_so(self) -> Self:
        how = self.training.compile
        if how == {"jax": "off", "torch": "scanned"}[self.engine]:
            raise ValueError(f"training.compile: {how} is not for engine {self.engine}; write training.compile: auto")
        return self

    @model_validator(mode="after")
    def _engine_can_use_the_cluster(self) -> Self:
        if self.engine != "torch":
            return self
        context = self.cluster.mesh.context
        if context != 1:
            raise ValueError(
                f"cluster.mesh.context: {context} is not for engine torch; write cluster.mesh.tensor instead, "
                "or engine: jax"
            )
        if self.cluster.accelerator == "tpu" or self.cluster.topology:
            key = "accelerator: tpu" if self.cluster.accelerator == "tpu" else f"topology: {self.cluster.topology}"
            raise ValueError(f"cluster.{key} is not for engine torch, which knows no TPU; write engine: jax")
        return self

    @model_validator(mode="after")
    def _mesh_divides_model(self) -> Self:
        mesh, model = self.cluster.mesh, self.model
        for axis, size, key, whole in (
            ("tensor", mesh.tensor, "heads", model.heads),
            ("context", mesh.context, "context", model.context),
        ):
            if size > 0 and whole % size:
                wrong = f"cluster.mesh.{axis}: {size} does not divide model.{key} {whole}"
                raise ValueError(f"{wrong}; write {gcd(size, whole)}")
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps in all, which `plan.in_steps` works out where the recipe has epochs."""
        if self.training.steps is None:
            raise RaygptError(
                f"training.epochs: {self.training.epochs} is no number of steps before its corpus is known"
            )
        return self.training.steps

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain YAML and JSON types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Every key with its value; `load_recipe` makes an equal Recipe of it."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)  # ASCII: PyYAML reads U+0085 in a name as a newline


def _refuse_credentials(key: str, address: str) -> None:
    """A recipe is written into its run, where everyone can read it."""
    if re.match(r"[a-z0-9+.-]+://[^/]*@", address, re.IGNORECASE):
        where = address.split("@", 1)[0].split("://")[0]
        raise ValueError(
            f"{key}: an address with a password in it would be written into the run; write {where}://BUCKET/…, and "
            "give the credentials by environment variables or your cloud's profile"
        )


def _multiples_around(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`, zero left out: '896 or 1024'."""
    below = number // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def shown(value: object) -> str:
    """A value as an error quotes it: short, and on one line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
