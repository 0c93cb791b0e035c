"""How fast a recipe trains end to end, through Ray: feed, steps, logging, validation and checkpoints.

    python benchmarks/train.py gpt2-124m data.source=TEXT training.batch_tokens=65536 training.steps=1000

Tokens per second are taken over the wall time between the first and the last logged step, checkpoints included, and
validation left out; `round_ms` says how long a step took between any two of them, `first_logged` when the first was
reached; `seconds_of_steps`: how long all steps take at that speed, compiling left out. `--seeds 1 2 3` trains a run of
each. With `--name` the figures, the validation losses and the last sample go into results/NAME.json.
"""

import argparse
import tempfile
import time
from statistics import fmean
from typing import Any

import record
from figures import measured

from raygpt.config import Recipe
from raygpt.recipes import load_recipe
from raygpt.training.events import Event
from raygpt.training.ray import launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--name", help="of the results file; none is written without it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337], help="a run for each")
    arguments = parser.parse_intermixed_args()
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.storage={folder}", *arguments.overrides]
        with launch.on_cluster(load_recipe(arguments.recipe, words)):
            for seed in arguments.seeds:
                named = [*words, f"training.seed={seed}", f"run.name=seed-{seed}"]
                runs[f"seed {seed}"] = figures_of(load_recipe(arguments.recipe, named))
    ends = [(list(run["val_losses"].values())[-1], run["seconds_of_steps"]) for run in runs.values()]
    means = dict(zip(("mean val_loss", "mean seconds_of_steps"), map(fmean, zip(*ends, strict=True)), strict=True))
    record.show(means | runs if len(runs) > 1 else next(iter(runs.values())), arguments.name)


def figures_of(recipe: Recipe) -> dict[str, Any]:
    """Train it, and measure."""
    events: list[Event] = []
    began = time.time()
    run = launch.prepare_run(recipe)
    result = launch.train(run, events.append)
    if result.error:
        raise result.error
    return measured(events, run, began)


if __name__ == "__main__":
    main()
