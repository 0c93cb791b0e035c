"""How good a sweep's answer is, and what it costs: `raygpt sweep`, killed on the way, against its whole grid.

    python benchmarks/sweep.py tiny optimizer.learning_rate=log:0.0025..0.32 --kills 2

The sweep is a process that is killed (SIGKILL) after some of its run directories have appeared, and started again. The
whole grid is trained after it, in another folder. `--without-ray` trains both without a cluster and without kills. With
`--folder` the runs stay there, and the same command goes on with them.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import in_process
import record

from raygpt.sweep import grid
from raygpt.sweep.runner import Runner
from raygpt.sweep.values import divide
from raygpt.training import prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="+")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, with --without-ray")
    parser.add_argument("--folder", help="where the runs are kept; without it they are deleted")
    parser.add_argument("--name", help="of the results file; none is written without it")
    arguments = parser.parse_intermixed_args()
    if arguments.jobs > 1 and not arguments.without_ray:
        parser.error("--jobs: only with --without-ray; a cluster decides how many run at once")
    kept = contextlib.nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory()
    with kept as folder:
        words = [*arguments.words, f"run.storage={folder}"]
        answers, seconds = {}, {}
        for name in ("sweep", "grid"):
            began = time.monotonic()
            if arguments.without_ray:
                answers[name] = here(arguments.recipe, [*words, f"run.name={name}"], name == "grid", arguments.jobs)
            else:
                command = [arguments.recipe, *words, f"run.name={name}", "--json"]
                kills = arguments.kills if name == "sweep" else 0
                answers[name] = by_command(command + ["--whole"] * (name == "grid"), Path(folder, name), kills)
            seconds[f"{name}_seconds"] = time.monotonic() - began
    record.show({**judged(**answers), **seconds, **answers}, arguments.name)


def by_command(words: list[str], folder: Path, kills: int) -> dict[str, Any]:
    """The answer of `raygpt sweep`, killed when a quarter and a half of the usual number of runs have begun."""
    command = [sys.executable, "-m", "raygpt", "sweep", *words]
    for begun in range(5, 5 * kills + 1, 5):
        if _begun(folder) >= begun:
            continue  # killed here before
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and _begun(folder) < begun:
            time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"killed with {_begun(folder)} runs begun", file=sys.stderr)
    answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return answer


def _begun(folder: Path) -> int:
    return len(list(folder.glob("*/metrics.jsonl")))


def here(recipe: str, words: list[str], is_whole: bool, jobs: int) -> dict[str, Any]:
    axes, overrides = divide(words)
    base = grid.base_of(recipe, overrides, "sweep")
    windows = prepared.prepare_run(base, lambda progress: None, False, spare_cpus=lambda: 0).corpus.windows
    sweep = grid.plan_sweep(recipe, overrides, axes, windows, is_whole)
    grid.claim(sweep.folder, grid.definition_of(sweep))
    stopping = threading.Event()
    runs = Runner(
        sweep.folder, jobs, lambda leg, event: None, lambda: None, stopping, train_one=in_process.train_in_subprocess
    )
    return grid.as_dict(grid.run_sweep(sweep, runs, print))


def judged(sweep: dict[str, Any], grid: dict[str, Any]) -> dict[str, Any]:
    """Loss, values and tokens of the sweep beside those of the grid."""
    return {
        "loss_over_grids_best": sweep["loss"] / grid["loss"] - 1,
        "best_of_sweep": sweep["best"],
        "best_of_grid": grid["best"],
        "fitted": [(one["key"], one["low"], one["value"], one["high"]) for one in sweep["optima"]],
        "tokens_of_grid": sweep["tokens"] / grid["tokens"],
    }


if __name__ == "__main__":
    main()
