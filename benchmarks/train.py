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
from itertools import pairwise
from statistics import fmean
from typing import Any

import record

from raygpt.config import Recipe
from raygpt.recipes import load_recipe
from raygpt.training.events import CheckpointSaved, Event, Sampled, Started, StepLogged, Validated
from raygpt.training.mfu import mfu
from raygpt.training.prepared import Prepared
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


def measured(events: list[Event], run: Prepared, began: float) -> dict[str, Any]:
    """The figures of a run that began then, from what it said."""
    about = next(event.about for event in events if isinstance(event, Started))
    logged = [event.line() for event in events if isinstance(event, StepLogged | Validated)]
    trained = [pair for pair in pairwise(logged) if all("loss" in line for line in pair)]
    seconds = sum(after["time"] - before["time"] for before, after in trained)
    speed = sum(after["tokens"] - before["tokens"] for before, after in trained) / seconds
    share = mfu(speed, run.plan.flops_per_token, about["device"], int(about["devices"]))
    return {
        **about,
        "parameters": run.plan.parameters,
        "batch": f"{run.plan.rows} × {run.plan.context}",
        "steps": run.plan.steps,
        "checkpoints": sum(isinstance(event, CheckpointSaved) for event in events),
        "first_logged": {"step": trained[0][0]["step"], "after_s": round(trained[0][0]["time"] - began, 1)},
        "seconds": seconds,
        "round_ms": [round(1e3 * _seconds_per_step(*pair), 2) for pair in trained],
        "tokens_per_s": speed,
        "seconds_of_steps": run.plan.rows * run.plan.context * run.plan.steps / speed,
        **({"mfu": share} if share else {}),
        "data_wait_s": sum(after["data_wait_s"] for _, after in trained),
        "losses": {line["step"]: round(line["loss"], 4) for line in logged if "loss" in line},
        "val_losses": {line["step"]: round(line["val_loss"], 4) for line in logged if "val_loss" in line},
        "sample": next((event.text for event in reversed(events) if isinstance(event, Sampled)), ""),
    }


def _seconds_per_step(before: dict[str, Any], after: dict[str, Any]) -> float:
    return float((after["time"] - before["time"]) / (after["step"] - before["step"]))


if __name__ == "__main__":
    main()
