"""The smoke variant of the WikiText-103 recipe, run to its end: the loss of each of its 25 steps, and how long it took.

    python benchmarks/smoke.py                                                   # downloads WikiText-103
    python benchmarks/smoke.py --source wikitext:TRAIN.tokens --val wikitext:VALID.tokens

Run it on an idle machine: each step is 6 · 8,192 tokens · 124 M parameters = 6 TFLOPs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from rich.console import Console
from rich.table import Table

from raygpt.recipes import load_recipe
from raygpt.runs import metrics
from raygpt.training.events import StepLogged
from raygpt.training.ray import launch

RECIPE = "gpt2-124m-wikitext103-smoke"


def main() -> None:
    arguments = _arguments()
    texts = {f"data.{key}": value for key, value in vars(arguments).items() if value}
    with tempfile.TemporaryDirectory() as folder:
        figures = smoke({**texts, "run.storage": folder})
    table = Table("step", "loss", "val loss")
    for step, line in figures["steps"].items():
        table.add_row(str(step), *(f"{line[key]:.4f}" if key in line else "" for key in ("loss", "val_loss")))
    Console().print(table)
    print(f"written to {record.save('smoke', figures).relative_to(Path.cwd())}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="text to train on, as data.source")
    parser.add_argument("--val", help="text to validate on, as data.val")
    return parser.parse_args()


def smoke(changes: dict[str, str]) -> dict[str, Any]:
    """Losses by step, and the seconds from the command to the first shard, the first step and the end."""
    recipe = load_recipe(RECIPE, changes)
    moments: dict[str, float] = {}
    started = time.monotonic()

    def note(moment: str) -> None:
        moments.setdefault(moment, round(time.monotonic() - started, 1))

    with launch.on_cluster(recipe):
        run = launch.prepare_run(recipe)
        note("first shard")
        result = launch.train(run, lambda event: note("first step") if isinstance(event, StepLogged) else None)
        note("end")
    if result.error:
        raise result.error
    steps: dict[int, dict[str, float]] = {}
    for line in metrics.read(result.path):
        kept = {key: line[key] for key in ("loss", "val_loss", "tokens_per_s", "data_wait_s") if key in line}
        steps.setdefault(line["step"], {}).update(kept)
    return {"recipe": RECIPE, "seconds": moments, "streamed": run.totals.train_tokens is None, "steps": steps}


if __name__ == "__main__":
    main()
