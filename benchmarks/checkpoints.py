"""What checkpoints cost: a recipe with one every hundredth of its steps, and without any, in turns.

    python benchmarks/checkpoints.py shakespeare-char data.source=TEXT training.steps=1000 --name checkpoints-cpu

Prints the ratio of the tokens per second, and that of a step's time while a checkpoint is written to when none is.
"""

import argparse
import statistics
import tempfile
from itertools import pairwise

import record

from raygpt.recipes import load_recipe
from raygpt.training.events import CheckpointSaved, Event, StepLogged
from raygpt.training.ray import launch

Events = list[Event]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", help="of the results file; none is written without it")
    arguments = parser.parse_intermixed_args()
    steps = load_recipe(arguments.recipe, arguments.overrides).steps
    speeds: dict[str, list[float]] = {"with": [], "without": []}
    during, outside, saves = [], [], []
    for _ in range(arguments.rounds):
        for kind, every in (("with", max(1, steps // 100)), ("without", steps)):
            events = run(arguments.recipe, [*arguments.overrides, f"training.checkpoint_every={every}"])
            speeds[kind].append(speed(events))
            if kind == "with":
                inside, other = step_times(events)
                during, outside = during + inside, outside + other
                saves += [event.seconds for event in events if isinstance(event, CheckpointSaved)]
    figures = {
        "steps": steps,
        "checkpoint_every": max(1, steps // 100),
        "tokens_per_s_with": statistics.median(speeds["with"]),
        "tokens_per_s_without": statistics.median(speeds["without"]),
        "ratio": statistics.median(a / b for a, b in zip(speeds["with"], speeds["without"], strict=True)),
        "step_during_a_save_ratio": statistics.mean(during) / statistics.mean(outside) if during else None,
        "steps_during_saves": len(during),
        "seconds_of_a_save": statistics.median(saves),
    }
    record.show(figures, arguments.name)


def run(name: str, overrides: list[str]) -> Events:
    """The events of a run that logs every step and validates only before the first and after the last."""
    events: Events = []
    with tempfile.TemporaryDirectory() as folder:
        steps = load_recipe(name, overrides).steps
        recipe = load_recipe(
            name, ["training.log_every=1", *overrides, f"run.storage={folder}", f"training.eval_every={steps}"]
        )
        with launch.on_cluster(recipe):
            result = launch.train(launch.prepare_run(recipe), events.append)
    if result.error:
        raise result.error
    return events


def speed(events: Events) -> float:
    """Tokens per second between the first and the last logged step."""
    logged = [event.line() for event in events if isinstance(event, StepLogged)]
    first, last = logged[0], logged[-1]
    return float((last["tokens"] - first["tokens"]) / (last["time"] - first["time"]))


def step_times(events: Events) -> tuple[list[float], list[float]]:
    """Seconds from one logged step to the next, while a checkpoint was being written and while none was."""
    logged = [event.line() for event in events if isinstance(event, StepLogged)]
    at = {line["step"]: line["time"] for line in logged}
    saves = [event for event in events if isinstance(event, CheckpointSaved) and event.step in at]
    windows = [(at[event.step], at[event.step] + event.seconds) for event in saves]
    during, outside = [], []
    for before, after in pairwise(logged):
        is_during = any(begin <= before["time"] and after["time"] <= end for begin, end in windows)
        per_step = (after["time"] - before["time"]) / (after["step"] - before["step"])
        (during if is_during else outside).append(per_step)
    return during, outside


if __name__ == "__main__":
    main()
