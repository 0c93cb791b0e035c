"""Every number that follows from a recipe and its corpus, worked out before step 0."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from raygpt.config import Recipe

STATE_BYTES = 16  # a parameter, its gradient and AdamW's two averages, all fp32
ACTIVATIONS = 16  # times width, per token and layer, kept for the backward pass: norms 2, Q/K/V 3, attention 1,
#                   its projection 1, MLP 4 before and 4 after GELU, the sum 1
USABLE = 0.8  # of a device's memory; the rest is for temporary buffers and fragmentation


@dataclass(frozen=True)
class Plan:
    """What a run will be."""

    parameters: int
    vocab: int
    train_tokens: int
    val_tokens: int
    steps: int
    rows: int  # of a batch
    context: int
    workers: int
    micro_rows: int  # per worker at a time
    accumulation: int  # micro-batches per worker and step
    flops_per_token: int
    memory_bytes: int  # estimated, per worker
    run_folder: str

    @property
    def batch_tokens(self) -> int:
        return self.rows * self.context

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def epochs(self) -> float:
        return self.tokens / self.train_tokens

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return {**asdict(self), "batch_tokens": self.batch_tokens, "tokens": self.tokens, "epochs": self.epochs}

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each number, for people."""
        computed = self.micro_rows * self.workers * self.accumulation
        padding = f", {computed - self.rows} of them padding" if computed > self.rows else ""
        return [
            ("parameters", f"{self.parameters:,} with {self.vocab:,} tokens in the vocabulary"),
            ("corpus", f"{self.train_tokens:,} tokens to train on, {self.val_tokens:,} to validate"),
            (
                "training",
                f"{self.steps:,} steps × {self.batch_tokens:,} tokens = {self.tokens:,} tokens, "
                f"{self.epochs:.2f} epochs, {self.tokens / self.parameters:.1f} tokens per parameter",
            ),
            (
                "batch",
                f"{self.rows} rows × {self.context} tokens = {self.micro_rows} rows × {self.workers} "
                f"{'worker' if self.workers == 1 else 'workers'} × {self.accumulation} accumulated{padding}",
            ),
            (
                "compute",
                f"{self.flops_per_token / 1e6:,.1f} MFLOPs per token, "
                f"{self.flops_per_token * self.tokens:.2e} FLOPs in all",
            ),
            ("memory", f"about {size(self.memory_bytes)} per worker for parameters, optimizer and activations"),
            ("run", self.run_folder),
        ]


def make_plan(
    recipe: Recipe, *, vocab: int, train_tokens: int, val_tokens: int, run_folder: str, memory_bytes: int
) -> Plan:
    """The plan for a recipe on workers that have `memory_bytes` each."""
    model, workers = recipe.model, recipe.cluster.max_workers
    parameters = model.parameters(vocab)
    rows = recipe.training.batch_tokens // model.context
    rows_per_worker = -(-rows // workers)
    state = parameters * STATE_BYTES
    room = max(1, (int(memory_bytes * USABLE) - state) // row_bytes(recipe))
    accumulation = -(-rows_per_worker // room)
    micro_rows = -(-rows_per_worker // accumulation)
    return Plan(
        parameters=parameters,
        vocab=vocab,
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        steps=recipe.training.steps,
        rows=rows,
        context=model.context,
        workers=workers,
        micro_rows=micro_rows,
        accumulation=accumulation,
        flops_per_token=model.flops_per_token(vocab),
        memory_bytes=state + micro_rows * row_bytes(recipe),
        run_folder=run_folder,
    )


def row_bytes(recipe: Recipe) -> int:
    """Activations of one row: in fp32 unless the recipe says otherwise, which is the safe guess."""
    width = 2 if recipe.model.precision in ("bf16", "fp16") else 4
    return recipe.model.layers * recipe.model.context * recipe.model.width * ACTIVATIONS * width


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
