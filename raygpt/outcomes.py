"""What people see of export, import and eval."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from raygpt.console import _near as near
from raygpt.console import _program as program
from raygpt.console import err, out
from raygpt.evaluation.tasks import Result
from raygpt.inference.loaded import Loaded, Weighed
from raygpt.runs import OpenRun
from raygpt.training.plan import size


def show_exported(found: Weighed, folder: str, files: Mapping[str, int]) -> None:
    """The files, and how to open them."""
    out.print(f"checkpoint of step {found.checkpoint.step} of {escape(near(found.run.folder))}", soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    for name, count in sorted(files.items()):
        table.add_row(f"  {escape(name)}", size(count))
    out.print(table)
    out.print("\nOpen it with transformers:", soft_wrap=True)
    out.print(f"  AutoModelForCausalLM.from_pretrained({folder!r})", markup=False, soft_wrap=True)


def show_imported(run: OpenRun) -> None:
    """What it is, and how to train it further."""
    model, vocab = run.recipe.model, run.tokenizer.vocab
    folder = escape(near(run.folder))
    out.print(
        f"{model.parameters(vocab):,} parameters: {model.layers} layers, {model.heads} heads, width {model.width}, "
        f"context {model.context}, {vocab:,} tokens in the vocabulary",
        soft_wrap=True,
    )
    out.print(f"run directory  {folder}\n\nTry next:", soft_wrap=True)
    keys = [f"{key}={getattr(model, key)}" for key in ("layers", "heads", "width", "context")]
    sizes = " ".join(f"model.{key}" for key in ([f"preset={model.preset}", keys[-1]] if model.preset else keys))
    sizes += "" if model.tied_head else " model.tied_head=false"
    batch = max(1, 4096 // model.context) * model.context
    where = folder if "/" in folder else f"./{folder}"  # a bare name would be looked for in run.storage
    tokenizer = "gpt2" if run.recipe.data.tokenizer == "gpt2" else where
    out.print(f"  {program()} generate {folder} --prompt 'Once'", soft_wrap=True)
    out.print(
        f"  {program()} train tiny run.name=further run.start_from={where} {sizes} "
        f"data.tokenizer={tokenizer} data.source=YOUR.txt training.batch_tokens={batch}",
        soft_wrap=True,
    )


@contextlib.contextmanager
def evaluating() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each task while it is scored; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield watch


def show_scores(loaded: Loaded, results: Mapping[str, Result]) -> None:
    """A line for each score, with its standard error."""
    out.print(f"checkpoint of step {loaded.checkpoint.step} of {escape(near(loaded.run.folder))}", soft_wrap=True)
    table = Table("task", "score", "value", "± standard error", "over", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for task, result in results.items():
        over = f"{result['items']:,} items" if "items" in result else f"{result['tokens']:,} tokens"
        for name in (name for name in result if f"{name}_stderr" in result or name in ("perplexity", "bits_per_byte")):
            error = result.get(f"{name}_stderr")
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, name.replace("_", " "), f"{result[name]:.4f}", shown, over)
    out.print(table)
