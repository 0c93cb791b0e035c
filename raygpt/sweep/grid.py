"""`raygpt sweep`: trains the trials of a grid in rounds, and answers which values are best.

RUN_STORAGE/NAME/           trials.json: what is swept
    learning_rate-0.01      a trial, an ordinary run; the best quarter are trained to the end
    learning_rate-0.01.18   its fork at step 18, cooled down, by which it was compared
    sweep.json, sweep.html  the answer
    best.yaml               the recipe with the best values

Which trials go on is decided by losses in the run directories alone, so a sweep that was killed goes on as if it had
not been.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raygpt import storage
from raygpt.config import Recipe, Run
from raygpt.corpus.store import TRIALS
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.recipes.lengths import in_steps
from raygpt.runs import free_name
from raygpt.sweep.optimum import Compared, Fit, fit
from raygpt.sweep.rounds import Round, best, cooled, rounds_of, share
from raygpt.sweep.runner import Leg, Runner
from raygpt.sweep.values import Axis, Trial, fork_name, trials_of, typed
from raygpt.training.prepared import run_folder_of

ANSWER, BEST = "sweep.json", "best.yaml"
# A trial needs no checkpoint but the newest: to go on, and for its forks.
KEPT = {"keep": 1, "keep_best": 0, "keep_every": None}


@dataclass(frozen=True)
class Sweep:
    """A grid of trials and the rounds in which they are compared."""

    folder: str
    base: Recipe  # of its first trial; its run is named for the sweep
    axes: tuple[Axis, ...]
    trials: tuple[Trial, ...]
    recipes: Mapping[str, Recipe]  # of each trial, by its name
    rounds: tuple[Round, ...]

    @property
    def grid_tokens(self) -> int:
        """Tokens of training every trial to the end."""
        return sum(recipe.steps * recipe.training.batch_tokens for recipe in self.recipes.values())

    @property
    def share(self) -> float:
        return share(self.rounds, len(self.trials))

    @property
    def finalists(self) -> int:
        """How many trials are trained to the end."""
        return self.rounds[-1].kept if self.rounds else len(self.trials)


@dataclass(frozen=True)
class SweepAnswer:
    """What a sweep found."""

    best: Trial
    loss: float
    compared: tuple[Compared, ...]
    diverged: tuple[str, ...]  # names of trials
    fit: Fit
    tokens: int  # of all rounds, of `grid_tokens`; trials that diverged count in full
    grid_tokens: int

    @property
    def finals(self) -> list[Compared]:
        """The trials that were trained to the end, the best first."""
        return sorted((one for one in self.compared if one.fraction == 1), key=lambda one: one.loss)


def base_of(
    name: str, overrides: Sequence[str], suffix: str, note: Callable[[str], None] = lambda text: None
) -> Recipe:
    """The recipe of a sweep, whose run is named for it unless an override names it. `note` is load_recipe's."""
    base = load_recipe(name, overrides, note)
    is_named = any(word.partition("=")[0].strip() == "run.name" for word in overrides)
    run = base.run if is_named else base.run.model_copy(update={"name": f"{base.run.name}-{suffix}"})
    return base.model_copy(update={"run": run})


def base_of_sweep(
    name: str, overrides: Sequence[str], axes: Sequence[Axis], note: Callable[[str], None] = lambda text: None
) -> Recipe:
    """The recipe of its first trial, whose run is the sweep's."""
    return base_of(name, [*overrides, *trials_of(axes)[0].overrides], "sweep", note)


def check_trials(name: str, overrides: Sequence[str], axes: Sequence[Axis]) -> None:
    """Refuse combinations of values that cannot work, before anything is prepared."""
    for trial in trials_of(axes):
        load_recipe(name, [*overrides, *trial.overrides])


def plan_sweep(
    name: str, overrides: Sequence[str], axes: Sequence[Axis], windows: Callable[[int], int], is_whole: bool
) -> Sweep:
    """The sweep of a recipe; refuses values that do not fit each other. `windows` counts those of a context."""
    base = base_of_sweep(name, overrides, axes)
    folder = run_folder_of(base)
    trials = trials_of(axes)
    recipes = {}
    for trial in trials:
        recipe = load_recipe(name, [*overrides, *trial.overrides, f"run.name={trial.name}"])
        recipe = in_steps(recipe, windows(recipe.model.context))
        run = recipe.run.model_copy(update={"storage": folder, "start_from": _start_of(base.run), **KEPT})
        recipes[trial.name] = recipe.model_copy(update={"run": run})
    rounds = [] if is_whole else rounds_of(list(recipes.values()))
    return Sweep(folder, base, tuple(axes), tuple(trials), recipes, tuple(rounds))


def _start_of(run: Run) -> str | None:
    """The path of the run that `run.start_from` names: a trial would look for the name in the sweep's folder."""
    name = run.start_from
    return name if name is None or "/" in name else storage.join(storage.absolute(run.storage), name)


def check_start(base: Recipe, is_whole: bool) -> None:
    """Refuse rounds for trials that start from another run."""
    if base.run.start_from is not None and not is_whole:
        raise RaygptError(
            "run.start_from: the rounds of a sweep begin at step 0; add --whole to train every trial to its end, or "
            "leave run.start_from out"
        )


def claim(folder: str, definition: Mapping[str, Any]) -> None:
    """Write what a folder's runs are for, of a sweep or a ladder; refuses a folder that has runs for something else."""
    uri = storage.join(folder, TRIALS)
    before = storage.read_json(uri)
    if before is not None and before != definition:
        keys = [key for key in definition if before.get(key) != definition[key]]
        raise RaygptError(
            f"{folder} has the runs of another sweep or ladder (it differs in {', '.join(keys)}); "
            f"write run.name={free_name(folder)} to begin a new one"
        )
    storage.write_json(uri, definition)


def definition_of(sweep: Sweep) -> dict[str, Any]:
    """What makes it the same sweep when it is started again; its trials check the rest of their recipes."""
    return {
        "keys": {axis.key: list(axis.values) for axis in sweep.axes},
        "rounds": [asdict(one) for one in sweep.rounds],
    }


def run_sweep(sweep: Sweep, runner: Runner, say: Callable[[str], None]) -> SweepAnswer:
    """Train the trials, round after round, and answer."""
    compared: list[Compared] = []
    tokens, names = 0, list(sweep.recipes)
    for number, one in enumerate(sweep.rounds):
        losses, spent = _compare(sweep, runner, names, one)
        compared += _compared(sweep, losses, number, one.trunk + one.cooling)
        tokens += spent - (sum(_trunk_tokens(sweep, name, number - 1) for name in names) if number else 0)
        names = best(losses, one.kept)
        say(f"round {number + 1} of {len(sweep.rounds) + 1}: {', '.join(names)} go on" if names else "all diverged")
    legs = {name: Leg(sweep.recipes[name]) for name in names}
    runner.train(list(legs.values()))
    losses = {name: _loss(runner, name, leg) for name, leg in legs.items()}
    compared += _compared(sweep, losses, len(sweep.rounds), 1.0)
    tokens += sum(_tokens(leg) - _trunk_tokens(sweep, name, len(sweep.rounds) - 1) for name, leg in legs.items())
    return _answer(sweep, compared, losses, tokens, runner.diverged)


def _compare(sweep: Sweep, runner: Runner, names: Sequence[str], one: Round) -> tuple[dict[str, float], int]:
    """The losses of trials that are cooled down early, and the tokens up to there, from the first step on."""
    trunks, forks, tokens = [], {}, 0
    for name in names:
        recipe = sweep.recipes[name]
        step, last = one.steps(recipe)
        trunks.append(Leg(recipe, until=step))
        forks[name] = Leg(cooled(recipe, fork_name(name, step), step, last))
        tokens += last * recipe.training.batch_tokens
    runner.train(trunks)
    runner.train([fork for name, fork in forks.items() if name not in runner.diverged])
    return {name: _loss(runner, name, fork) for name, fork in forks.items()}, tokens


def _loss(runner: Runner, name: str, leg: Leg) -> float:
    is_lost = {name, str(leg.recipe.run.name)} & runner.diverged
    return math.inf if is_lost else leg.loss


def _tokens(leg: Leg) -> int:
    return leg.last * leg.recipe.training.batch_tokens


def _trunk_tokens(sweep: Sweep, name: str, number: int) -> int:
    """The tokens of a trial's own run after a round."""
    if number < 0:
        return 0
    recipe = sweep.recipes[name]
    return sweep.rounds[number].steps(recipe)[0] * recipe.training.batch_tokens


def _compared(sweep: Sweep, losses: Mapping[str, float], number: int, fraction: float) -> list[Compared]:
    values = {trial.name: trial.values for trial in sweep.trials}
    return [Compared(name, values[name], number, fraction, loss) for name, loss in losses.items()]


def _answer(
    sweep: Sweep, compared: list[Compared], finals: Mapping[str, float], tokens: int, diverged: set[str]
) -> SweepAnswer:
    first = next(iter(best(finals, 1)), None)
    if first is None:
        raise RaygptError(
            f"{sweep.folder}: every trial that was trained to the end diverged; write lower values, e.g. of "
            "optimizer.learning_rate"
        )
    trial = next(trial for trial in sweep.trials if trial.name == first)
    lost = tuple(sorted(name for name in sweep.recipes if name in diverged))
    found = fit(compared, sweep.axes)
    return SweepAnswer(trial, finals[first], tuple(compared), lost, found, tokens, sweep.grid_tokens)


def write_answer(sweep: Sweep, answer: SweepAnswer) -> None:
    """sweep.json and best.yaml."""
    recipe = sweep.recipes[answer.best.name]
    run = _as_best(sweep, recipe)
    values = ", ".join(f"{key} {value}" for key, value in answer.best.values.items())
    head = f"# {values}: the best of {len(sweep.trials)} trials, with a validation loss of {answer.loss:.4f}.\n"
    storage.write_bytes(storage.join(sweep.folder, BEST), (head + run.to_yaml()).encode())
    storage.write_json(storage.join(sweep.folder, ANSWER), as_dict(answer))


def _as_best(sweep: Sweep, recipe: Recipe) -> Recipe:
    """The recipe as a run of its own, beside the sweep."""
    run = sweep.base.run.model_copy(update={"name": f"{sweep.base.run.name}-best"})
    return recipe.model_copy(update={"run": run})


def as_dict(answer: SweepAnswer) -> dict[str, Any]:
    """As JSON, with numbers for values that are numbers."""
    return {
        "best": {key: typed(value) for key, value in answer.best.values.items()},
        "loss": answer.loss,
        "optima": [asdict(one) for one in answer.fit.optima],
        "effects": [asdict(one) for one in answer.fit.effects],
        "noise": answer.fit.noise,
        "tokens": answer.tokens,
        "grid_tokens": answer.grid_tokens,
        "diverged": list(answer.diverged),
        "compared": [
            asdict(replace(one, loss=one.loss if math.isfinite(one.loss) else None))  # type: ignore[arg-type]
            for one in answer.compared
        ],
    }
