"""A recipe trained undisturbed, and again while its workers are killed: are the numbers the same, and what did it cost?

    python benchmarks/chaos.py tiny --kills 20 --name chaos-jax cluster.workers=2 training.steps=150 …

With `--name` the figures go into results/NAME.json. It ends with status 1 where a single bit differs, or where not all
the kills struck.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict

import record
import yaml

from raygpt.recipes import load_recipe
from raygpt.runs import metrics
from raygpt.testing.chaos import chaos
from raygpt.training.ray import launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--name", help="of the results file; none is written without it")
    arguments = parser.parse_intermixed_args()
    words = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in arguments.overrides)}
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with tempfile.TemporaryDirectory() as home, launch.on_cluster(recipe):
        result = chaos(arguments.recipe, kills=arguments.kills, seed=arguments.seed, home=home, **words)
        logged = metrics.read(f"{home}/undisturbed")
    speeds = [line["tokens_per_s"] for line in logged if "tokens_per_s" in line]
    figures = {
        **asdict(result),
        "engine": recipe.engine,
        "steps": recipe.steps,
        "checkpoint_every": recipe.training.checkpoint_every,
        "most_steps_repeated": max(result.steps_repeated, default=0),
        "seconds_per_fault": (result.disturbed_s - result.undisturbed_s) / max(len(result.struck), 1),
        "deterministic": recipe.training.deterministic,
        "tokens_per_s": statistics.median(speeds),
    }
    record.show(figures, arguments.name)
    sys.exit(0 if result.is_identical and len(result.struck) == arguments.kills else 1)


if __name__ == "__main__":
    main()
