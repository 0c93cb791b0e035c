"""What a key of a recipe is worth: variants of one recipe trained in turn, in this process, without Ray.

    python benchmarks/variants.py speedrun-124m data.source=STORE data.limit=null --seeds 1 2 \
        --variant "no gates: model.head_gates=false" --variant "no gains: model.norm_gain=false"

The recipe itself comes first, then each variant: a name, a colon, and what it changes (`--bare` leaves the recipe
itself out). Every one is trained to its end by the loop that `raygpt train` runs on each worker; validation losses are
those at its end, milliseconds those between logged steps. With `--name` all of it goes into results/NAME.json, after
each variant: what came before an interruption is kept.
"""

import argparse
import tempfile
import time
from statistics import fmean, median
from typing import Any

import in_process
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
    parser.add_argument("--name", help="of the results file; none is written without it")
    arguments = parser.parse_intermixed_args()
    variants = {} if arguments.bare else {arguments.recipe: []}
    for text in arguments.variant:
        name, _, words = text.partition(":")
        variants[name] = words.split()
    figures: dict[str, Any] = {}
    for name, words in variants.items():
        figures[name] = trained(arguments.recipe, [*arguments.overrides, *words], arguments.seeds)
        print(name, *_row(figures[name]), flush=True)
        if arguments.name:
            record.save(arguments.name, figures)
    Console(width=120).print(_table(figures))


def trained(recipe: str, words: list[str], seeds: list[int]) -> dict[str, Any]:
    """The figures of one variant, over its seeds."""
    runs = {seed: one_run(recipe, [*words, f"training.seed={seed}"]) for seed in seeds}
    losses = [list(run["val_losses"].values())[-1] for run in runs.values()]
    return {
        "overrides": words,
        "val_loss": fmean(losses),
        "val_losses": losses,
        "tokens": next(iter(runs.values()))["tokens"],
        "ms": median(ms for run in runs.values() for ms in run["round_ms"]),
        "runs": {f"seed {seed}": run for seed, run in runs.items()},
    }


def one_run(recipe: str, words: list[str]) -> dict[str, Any]:
    """What a run said, and how long it took; its folder is not kept."""
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        asked = load_recipe(recipe, [*words, f"run.storage={folder}", "run.name=variant"])
        began = time.time()
        run = prepared.prepare_run(asked, lambda progress: None, False, spare_cpus=lambda: 0)
        if error := in_process.train(asked, events.append, None):
            raise error
    found = measured(events, run, began)
    return {**found, "tokens": run.plan.rows * run.plan.context * run.plan.steps}


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
