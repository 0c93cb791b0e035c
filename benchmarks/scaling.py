"""How well `raygpt scaling` predicts: the ladder of a recipe first, then the run itself, and both losses.

    python benchmarks/scaling.py tiny training.steps=4000 data.source=enwiki2014/train-00.txt.xz \
        data.val=enwiki2014/val.txt.xz

Runs are processes on this machine's devices, without a Ray cluster; only text that is not prepared yet is prepared by
Ray (`raygpt prepare SOURCE --nanogpt` makes a folder that needs none). `--storage` keeps the runs: the same command
goes on. `--came LOSS` is for another ladder of a run whose loss is known.
"""

import argparse
import tempfile
import threading
import time
from typing import Any

import in_process
import record

from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.recipes.lengths import in_steps
from raygpt.sweep.grid import base_of
from raygpt.sweep.runner import Leg, Runner, prepare_corpus
from raygpt.sweep.scaling import claim_ladder, plan_ladder, run_ladder, write_law


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--share", type=float, default=0.1, help="of the run's compute, for the ladder")
    parser.add_argument("--jobs", type=int, default=1, help="rungs at once")
    parser.add_argument("--storage", help="a folder that keeps the runs")
    parser.add_argument("--came", type=float, help="the loss of the run itself, which is then not trained")
    parser.add_argument("--name", help="of the results file; none is written without it")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments.overrides, f"run.storage={arguments.storage or folder}"]
        found = figures(arguments.recipe, words, arguments.share, arguments.jobs, arguments.came)
        record.show(found, arguments.name)


def figures(recipe: str, words: list[str], share: float, jobs: int, came: float | None) -> dict[str, Any]:
    base = base_of(recipe, words, "scaling")
    corpus = prepare_corpus(base, lambda progress: None)
    in_full = in_steps(base, corpus.windows(base.model.context))
    ladder = plan_ladder(in_full, corpus.tokenizer.vocab, share, corpus.bytes_per_token, corpus.unigram_loss)
    claim_ladder(ladder)
    stopping, train = threading.Event(), in_process.train_in_subprocess
    runs = Runner(ladder.folder, jobs, lambda leg, event: None, lambda: None, stopping, train)
    began = time.monotonic()
    answer = run_ladder(ladder, runs)
    write_law(ladder, answer)
    took = time.monotonic() - began
    print(f"predicted {answer.loss}", flush=True)
    came = came or loss_of_run(ladder.recipe, runs)
    return {
        "predicted": answer.loss.loss,
        "low": float(answer.loss.low),
        "high": float(answer.loss.high),
        "came": came,
        "error": answer.loss.loss / came - 1,
        "is_covered": bool(answer.loss.low <= came <= answer.loss.high),
        "share_of_compute": ladder.share,
        "ladder_seconds": took,
        "run_seconds": time.monotonic() - began - took,
        "law": answer.law.terms,
        "noise": answer.law.noise,
        "bytes_per_token": ladder.bytes_per_token,
        "rungs": [(rung.run, rung.parameters, rung.tokens, rung.loss) for rung in answer.law.rungs],
    }


def loss_of_run(recipe: Recipe, runs: Runner) -> float:
    """Train the run that was predicted."""
    run = recipe.run.model_copy(update={"name": f"{recipe.run.name}-run"})
    itself = Leg(recipe.model_copy(update={"run": run}))
    runs.train([itself])
    if runs.diverged:
        raise RaygptError(f"{', '.join(runs.diverged)} diverged")
    return itself.loss


if __name__ == "__main__":
    main()
