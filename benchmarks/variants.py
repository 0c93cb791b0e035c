"""What a key of a recipe is worth: variants of one recipe trained in turn, in this process, without Ray.

    python benchmarks/variants.py speedrun-124m data.source=STORE data.limit=null --seeds 1 2 \
        --variant "no gates: model.head_gates=false" --variant "no gains: model.norm_gain=false"

The recipe itself comes first, then each variant: a name, a colon, and what it changes (`--bare` leaves the recipe
itself out). Every run is a process of its own, trained to its end by the loop that `raygpt train` runs on each worker.
`--jobs` of them compile beside each other, but one at a time trains; with `--together` all of them do, and times mean
nothing. Validation losses are those at the end, milliseconds those between logged steps. With `--name` all of it goes
into results/NAME.json, after each run: what came before an interruption is kept.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median
from typing import Any

import in_process
import processes
import record
from figures import measured
from rich.console import Console
from rich.table import Table

from raygpt.recipes import load_recipe
from raygpt.training import prepared
from raygpt.training.events import Event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME: KEY=VALUE …")
    parser.add_argument("--bare", action="store_true", help="without the recipe itself")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337])
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile beside each other")
    parser.add_argument("--together", action="store_true", help="they train beside each other, too")
    parser.add_argument("--name", help="of the results file; none is written without it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # what one process trains
    arguments = parser.parse_intermixed_args()
    if arguments.one:
        print(json.dumps(one_run(arguments.recipe, arguments.overrides, alone=not arguments.together)))
        return
    variants = {} if arguments.bare else {arguments.recipe: []}
    for text in arguments.variant:
        name, _, words = text.partition(":")
        variants[name] = words.split()
    Console(width=120).print(_table(all_runs(variants, arguments)))


def all_runs(variants: dict[str, list[str]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of each variant. Seeds come one after another, so that an interruption leaves whole ones."""
    figures: dict[str, Any] = {}
    writing = threading.Lock()

    def one(name: str, seed: int) -> None:
        words = [*arguments.overrides, *variants[name], f"training.seed={seed}"]
        run = in_a_process([arguments.recipe, *words, *(["--together"] if arguments.together else [])])
        with writing:
            runs = figures.get(name, {}).get("runs", {}) | ({f"seed {seed}": run} if run else {})
            if runs:
                figures[name] = together(variants[name], runs)
                print(name, *_row(figures[name]), flush=True)
            if figures and arguments.name:
                record.save(arguments.name, figures)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda each: one(*each), [(name, seed) for seed in arguments.seeds for name in variants]))
    return figures


def in_a_process(words: list[str]) -> dict[str, Any] | None:
    """The figures of one run, if it succeeds."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share the GPU
    return processes.measured(" ".join(words), [__file__, *words, "--one"], environment)


def together(words: list[str], runs: dict[str, Any]) -> dict[str, Any]:
    """The figures of one variant, over its seeds."""
    losses = [list(run["val_losses"].values())[-1] for run in runs.values()]
    return {
        "overrides": record.shown(words),
        "val_loss": fmean(losses),
        "val_losses": losses,
        "tokens": next(iter(runs.values()))["tokens"],
        "ms": median(ms for run in runs.values() for ms in run["round_ms"]),
        "runs": runs,
    }


def one_run(recipe: str, words: list[str], alone: bool) -> dict[str, Any]:
    """What a run said, and how long it took; its folder is not kept."""
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        asked = load_recipe(recipe, [*words, f"run.storage={folder}", "run.name=variant"])
        began = time.time()
        run = prepared.prepare_run(asked, lambda progress: None, False, spare_cpus=lambda: 0)
        if error := in_process.train(asked, events.append, None, alone):
            raise error
    found = measured(events, run, began)
    return {**found, "tokens": run.totals.rows * run.totals.context * run.totals.steps}


def _row(figure: dict[str, Any]) -> list[str]:
    losses = ", ".join(f"{loss:.3f}" for loss in figure["val_losses"])
    return [f"{figure['tokens'] / 1e6:.1f}", f"{figure['val_loss']:.4f}", losses, f"{figure['ms']:.2f}"]


def _table(figures: dict[str, Any]) -> Table:
    table = Table("", "M tokens", "validation", "of each seed", "ms a step")
    for name, figure in figures.items():
        table.add_row(name, *_row(figure))
    return table


if __name__ == "__main__":
    main()
