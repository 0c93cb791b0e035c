"""Console output of `raygpt sweep`: what it will take, its progress, and the answer."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn

from raygpt.config import Recipe
from raygpt.formatting import time_span
from raygpt.show.console import command, err, out, relative_path, table_of
from raygpt.show.training import message_text, show_message
from raygpt.training.events import Event, StepLogged, Validated

if TYPE_CHECKING:
    from raygpt.sweep.grid import Sweep, SweepAnswer
    from raygpt.sweep.optimum import Optimum
    from raygpt.sweep.runner import Leg, Runner


def show_plan(sweep: "Sweep", at_once: int, seconds: float | None, devices_and_cost: str = "") -> None:
    """What a sweep will take; `seconds` are None where its cluster's speed is not known.

    `devices_and_cost` is printed after the time: " on 1 × h200, 0.33 at 3 per device-hour".
    """
    keys = [(axis.key, ", ".join(axis.values)) for axis in sweep.axes]
    steps = {recipe.steps for recipe in sweep.recipes.values()}
    length = f"{min(steps):,} steps" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,} steps"
    rounds = [
        (
            f"round {n}",
            f"{one.trials} trials, cooled down from {one.trunk:.0%} to {one.trunk + one.cooling:.0%} of them",
        )
        for n, one in enumerate(sweep.rounds, 1)
    ]
    tokens = f"{sweep.share * sweep.grid_tokens:,.0f}, {sweep.share:.1%} of the whole grid's {sweep.grid_tokens:,}"
    out.print(
        table_of(
            [
                *keys,
                ("trials", f"{len(sweep.trials)} of {length}, {at_once} at once"),
                *rounds,
                ("to the end", "1 trial" if sweep.finalists == 1 else f"{sweep.finalists} trials"),
                ("tokens", tokens),
                *([("time", f"about {time_span(seconds)}{devices_and_cost}")] if seconds else []),
                ("folder", relative_path(sweep.folder)),
            ]
        )
    )


@contextlib.contextmanager
def running(folder: str, recipe: Recipe, as_json: bool) -> Iterator["Runner"]:
    """What trains the runs of a folder, with a line for each, and a live line in a terminal."""
    from raygpt.sweep.runner import runner

    is_live = out.is_terminal and not as_json
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with (
        Progress(*columns, console=out, transient=True, disable=not is_live) as live,
        runner(folder, recipe, Watching(live, as_json), show_message) as runs,
    ):
        yield runs


class Watching:
    """Shows the events of many runs: a line when one is validated at its end, messages, and a live line."""

    def __init__(self, live: Progress, as_json: bool):
        self._console = err if as_json else out
        self._live, self._task = live, live.add_task("starting")
        self._now: dict[str, str] = {}

    def __call__(self, leg: "Leg", event: Event) -> None:
        name = str(leg.recipe.run.name)
        if text := message_text(event):
            self._console.print(f"{escape(name)}: {text}", soft_wrap=True)
        if isinstance(event, StepLogged):
            self._now[name] = f"{name} {event.step}/{leg.last} loss {event.loss:.4f}"
        if isinstance(event, StepLogged) and event.step == leg.last and leg.until:
            self._console.print(f"{escape(name)}  step {event.step}  loss {event.loss:.4f}", soft_wrap=True)
        if isinstance(event, Validated) and event.step == leg.last and event.val_loss is not None:
            self._console.print(f"{escape(name)}  step {event.step}  val loss {event.val_loss:.4f}", soft_wrap=True)
        if isinstance(event, StepLogged | Validated) and event.step >= leg.last:
            self._now.pop(name, None)
        self._live.update(self._task, description=escape("  ".join(self._now.values()) or "starting"))


def interval_text(optimum: "Optimum") -> str:
    """0.0213, between 0.018 and 0.025."""
    if optimum.low is None or optimum.high is None:
        return f"{optimum.value:.3g}"
    return f"{optimum.value:.3g} ({optimum.low:.3g} to {optimum.high:.3g})"


def show_answer(sweep: "Sweep", answer: "SweepAnswer", page: str) -> None:
    """The best values, the fitted optimum, which keys mattered, and what to do next."""
    values = ", ".join(f"{key} {value}" for key, value in answer.best.values.items())
    rows = [("best", f"{values}: validation loss {answer.loss:.4f}")]
    fitted = {one.key: one for one in answer.fit.optima}
    for axis in sweep.axes:
        if one := fitted.get(axis.key):
            rows.append(("fitted", f"{axis.key} {interval_text(one)}"))
        elif hint := _hint(sweep, answer, axis.key):
            rows.append(("fitted", f"{axis.key} has no minimum inside its values{hint}"))
    for effect in answer.fit.effects:
        clear = {True: "", False: ", not clearly more than noise", None: "; too few trials to know the noise"}
        rows.append(
            ("mattered", f"{effect.key}: {effect.loss:.4f} between its best and worst value{clear[effect.is_clear]}")
        )
    if answer.diverged:
        rows.append(("diverged", ", ".join(answer.diverged)))
    share = answer.tokens / answer.grid_tokens
    rows.append(("tokens", f"{answer.tokens:,}, {share:.1%} of the whole grid's"))
    rows.append(("page", f"{relative_path(page)}; open it in a browser"))
    out.print()
    out.print(table_of(rows))
    out.print("\nTry next:")
    out.print(f"  {command('train', f'{relative_path(sweep.folder)}/best.yaml')}", soft_wrap=True)


def _hint(sweep: "Sweep", answer: "SweepAnswer", key: str) -> str:
    """What to add where the best value is the first or the last."""
    axis = next(axis for axis in sweep.axes if axis.key == key)
    numbers = []
    for value in axis.values:
        with contextlib.suppress(ValueError):
            numbers.append(float(value))
    best = answer.best.values[key]
    if len(numbers) < len(axis.values) or float(best) not in (min(numbers), max(numbers)):
        return ""
    below = "lower" if float(best) == min(numbers) else "higher"
    return f"; {best} is the end of what was tried, so try {below} ones too"
