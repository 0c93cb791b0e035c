"""Is my loss normal? A run beside runs of the same recipe that were really done, three seeds each.

    python -m raygpt.show.normal RUN RUN RUN > raygpt/show/references/RECIPE.json

A further run should fall into the band in 95 of 100 cases: the references' mean ± t · s · √(1 + 1/n), Student's t for
the n values' spread s. Three values say little of their spread, so s is pooled over neighbouring points; and the band
is never narrower than 1 % of the loss to either side, since another version of a library or of the text moves it.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

import numpy as np

from raygpt.config import Recipe
from raygpt.recipes import load_recipe, shipped_recipes
from raygpt.recipes.explain import flat
from raygpt.runs import OpenRun, open_run
from raygpt.show.series import Series, train_series, val_series
from raygpt.training import resume

NEIGHBOURS = 4  # points to either side whose spread is pooled
# Two-sided 95 % of Student's t for 1 to 30 degrees of freedom; beyond that it hardly falls.
T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
T95 += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]
# What a loss at step N does not depend on, but for rounding and chance: what may change when a run goes on, and
FREE = (*resume.FREE, "engine", "model.precision", "model.implementation", "training.seed")


@dataclass(frozen=True)
class Band:
    """Between which losses a further run is expected at each of some steps."""

    steps: list[float]
    low: list[float]
    high: list[float]

    def at(self, step: float) -> tuple[float, float]:
        """Low and high at a step between the first and the last."""
        return float(np.interp(step, self.steps, self.low)), float(np.interp(step, self.steps, self.high))


@dataclass(frozen=True)
class Verdict:
    """The answer, and what it is drawn by."""

    kind: str  # normal, high, low; unknown where there is nothing to compare with
    sentence: str
    recipe: str | None = None
    train: Band | None = None
    val: Band | None = None


def judge(run: OpenRun) -> Verdict:
    """A run's losses against the references of its recipe."""
    name, differences = nearest_recipe(run.recipe)
    if differences:
        return Verdict("unknown", _no_reference(name, differences))
    reference = load_reference(name)
    train, val = band(reference["train"]), band(reference["val"])
    for label, series, measured in (("validation loss", val_series(run), val), ("loss", train_series(run), train)):
        points = [(step, loss) for step, loss in zip(series["step"], series["loss"], strict=True) if loss and step]
        if points:
            kind, sentence = _compare(label, *points[-1], measured, name, len(reference["seeds"]))
            return Verdict(kind, sentence, name, train, val)
    return Verdict(
        "unknown", f"Too early to say: the run has not logged a loss yet. The band is {name}'s.", name, train, val
    )


def nearest_recipe(recipe: Recipe) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The recipe with a reference that differs in the fewest keys; and these, (its value, the run's)."""
    ours = _decisive(recipe)
    found = {}
    for name in references():
        theirs = _decisive(load_recipe(name))
        found[name] = {
            key: (theirs.get(key), ours.get(key)) for key in theirs | ours if theirs.get(key) != ours.get(key)
        }
    best = min(found, key=lambda name: len(found[name]))
    return best, found[best]


def references() -> list[str]:
    """Shipped recipes that have a reference."""
    folder = resources.files("raygpt") / "show" / "references"
    return [name for name in shipped_recipes() if (folder / f"{name}.json").is_file()]


def load_reference(name: str) -> dict[str, Any]:
    """The losses of a recipe's reference runs, their seeds, and what they ran on."""
    file = resources.files("raygpt") / "show" / "references" / f"{name}.json"
    read: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return read


def band(curves: Mapping[str, Sequence[Any]]) -> Band:
    """Of {"steps": […], "losses": [one list a seed]}."""
    losses = np.array(curves["losses"], dtype=np.float64)  # [seeds, points]
    seeds, points = losses.shape
    mean, spread = losses.mean(axis=0), losses.var(axis=0, ddof=1)
    half = []
    for point in range(points):
        near = slice(max(0, point - NEIGHBOURS), point + NEIGHBOURS + 1)
        pooled = spread[near]
        t = T95[min(len(pooled) * (seeds - 1), len(T95)) - 1]
        half.append(t * math.sqrt(pooled.mean() * (1 + 1 / seeds)))
    width = np.maximum(half, 0.01 * mean)
    return Band(list(curves["steps"]), (mean - width).tolist(), (mean + width).tolist())


def _compare(label: str, step: float, loss: float, measured: Band, name: str, seeds: int) -> tuple[str, str]:
    low, high = measured.at(step)
    expected = f"from {seeds} runs of {name}, {low:.3f} to {high:.3f} is expected there"
    where = f"At step {step:,.0f} the {label} is {loss:.3f}; {expected}"
    if loss > high:
        return "high", f"Higher than normal. {where}. Look at the data, the gradient norm and the versions below."
    if loss < low:
        return "low", f"Lower than normal. {where}. Check that validation text was not trained on."
    return "normal", f"Normal. {where}."


def _no_reference(name: str, differences: Mapping[str, tuple[Any, Any]]) -> str:
    first = list(differences.items())[:3]
    shown = [f"{key} {json.dumps(ours)} instead of {json.dumps(theirs)}" for key, (theirs, ours) in first]
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"No reference has this recipe. The nearest is {name}, but here {', '.join(shown)}{more}."


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """The keys that decide its losses; a source is the same under any path."""
    values = {key: value for key, value in flat(recipe.to_dict()).items() if not key.startswith(FREE)}
    if isinstance(values["data.source"], str):
        values["data.source"] = PurePath(values["data.source"]).name
    return values


def make_reference(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """What is shipped of runs that differ in their seed alone."""
    return {
        "seeds": [run.recipe.training.seed for run in runs],
        "about": runs[0].about,
        "train": _curves([train_series(run) for run in runs]),
        "val": _curves([val_series(run) for run in runs]),
    }


def _curves(series: Sequence[Series]) -> dict[str, Any]:
    steps = series[0]["step"]
    assert all(one["step"] == steps for one in series), "the runs logged different steps"
    return {"steps": steps, "losses": [[round(loss or math.nan, 4) for loss in one["loss"]] for one in series]}


if __name__ == "__main__":
    print(json.dumps(make_reference([open_run(folder) for folder in sys.argv[1:]])))
