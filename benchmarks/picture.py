"""Draws loss over tokens and over seconds of steps, from recorded results: the pictures of docs/models.md.

    python benchmarks/picture.py          # writes docs/images/loss-tokens.svg and loss-seconds.svg

Lines are training losses, means over the seeds and over three logged steps; each ends with its validation loss.
nanoGPT's are the validation losses of its own training of GPT-2 124M, every 500 steps; its seconds are its step's, as
measured beside ours. AdamW's is the best of the runs of our GPT-2 124M with 40 M tokens whose files were kept; as two
of these shared a GPU, its seconds are not drawn.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from raygpt.show.chart import Curve, picture

ROOT = Path(__file__).parents[1]
NANOGPT = {500: 5.046, 1000: 4.226, 1500: 4.025}  # its validation losses by step, of 64 × 1,024 tokens
HIGHEST = 6.5  # a loss above it is not drawn: all begin at 10.8

Points = list[tuple[int, float]]  # losses by step


def main() -> None:
    nanogpt = figures("step-modern-124m-64x1024")["nanoGPT"]
    swept = (figures("adamw-gpt2-124m") | figures("adamw-wsd")).values()
    best = min(swept, key=lambda figure: figure["val_loss"])
    adamw = list(best["runs"].values())
    modern, speedrun = (seeds(f"to-loss-{recipe}") for recipe in ("modern-124m", "speedrun-124m"))
    points = {
        "nanoGPT": list(NANOGPT.items()),
        "modern-124m": curve(modern),
        "speedrun-124m": curve(speedrun),
        "GPT-2, AdamW swept": curve(adamw),
    }
    tokens = {"nanoGPT": 64 * 1024, "modern-124m": tokens_a_step(modern), "speedrun-124m": tokens_a_step(speedrun)}
    tokens["GPT-2, AdamW swept"] = best["tokens"] / adamw[0]["steps"]
    seconds = {"nanoGPT": nanogpt["ms"] / 1e3}
    seconds |= {"modern-124m": seconds_a_step(modern), "speedrun-124m": seconds_a_step(speedrun)}
    draw("tokens", "tokens", points, tokens)
    draw("seconds", "time", points, seconds)


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["figures"]
    return found


def seeds(name: str) -> list[dict[str, Any]]:
    return [run for seed, run in figures(name).items() if seed.startswith("seed ")]


def curve(runs: list[dict[str, Any]]) -> Points:
    """Training losses, and at the end the validation loss."""
    steps = [int(step) for step in runs[0]["losses"]]
    losses = [fmean(run["losses"][str(step)] for run in runs) for step in steps]
    middle = [(steps[n], fmean(losses[n - 1 : n + 2])) for n in range(1, len(steps) - 1)]
    return [*middle, (runs[0]["steps"], fmean(list(run["val_losses"].values())[-1] for run in runs))]


def tokens_a_step(runs: list[dict[str, Any]]) -> float:
    return fmean(run["tokens_per_s"] * run["seconds_of_steps"] / run["steps"] for run in runs)


def seconds_a_step(runs: list[dict[str, Any]]) -> float:
    return fmean(run["seconds_of_steps"] / run["steps"] for run in runs)


def draw(name: str, axis: str, points: dict[str, Points], each: dict[str, float]) -> None:
    """One picture; x is a step times what each step takes."""
    curves = []
    for n, (label, size) in enumerate(each.items()):
        drawn = [(step * size, loss) for step, loss in points[label] if loss < HIGHEST]
        curves.append(Curve(label, drawn, n, n, has_dots=label == "nanoGPT"))
    path = ROOT / f"docs/images/loss-{name}.svg"
    path.write_text(picture("loss on enwiki2014", list(each), curves, axis=axis))
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
