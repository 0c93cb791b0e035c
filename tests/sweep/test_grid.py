"""A whole sweep of a very small model, with real steps, checkpoints and forks, in this process."""

import math

import pytest
from here import SMALL, Here, Killed, make_runner, write_text

from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.runs import open_run
from raygpt.show.sweep_page import sweep_page
from raygpt.sweep.grid import (
    SweepAnswer,
    as_dict,
    base_of_sweep,
    check_trials,
    claim,
    definition_of,
    plan_sweep,
    run_sweep,
    write_answer,
)
from raygpt.sweep.values import divide
from raygpt.training.events import StepLogged

RATES = "optimizer.learning_rate=log:0.0025..0.32"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "tokens")


@pytest.fixture
def start(text, tmp_path):
    """Start a sweep, or go on with it: its plan, and what trains its runs."""

    def of(*words, name="sweep", is_whole=False, **more):
        recipe = tmp_path / "small.yaml"
        recipe.write_text(load_recipe("tiny", {**SMALL, "data.source": str(text), **more}).to_yaml())
        axes, overrides = divide(words)
        where = [f"run.storage={tmp_path}", f"run.name={name}"]
        sweep = plan_sweep(str(recipe), [*overrides, *where], axes, lambda context: 1, is_whole)
        claim(sweep.folder, definition_of(sweep))
        here = Here()
        return sweep, here, make_runner(sweep.folder, here)

    return of


def losses(answer: SweepAnswer):
    return {(one.trial, one.round): one.loss for one in answer.compared}


def test_a_sweep_finds_the_grids_best_with_half_of_its_tokens_although_it_is_killed_twice(start):
    whole, _, runs = start(RATES, name="whole", is_whole=True)
    grid = run_sweep(whole, runs, print)
    undisturbed = run_sweep(*start(RATES, name="undisturbed")[::2], print)
    killed_after = [3, 5]
    while True:
        sweep, here, runs = start(RATES)
        here.killed_after = killed_after.pop(0) if killed_after else None
        try:
            answer = run_sweep(sweep, runs, print)
            break
        except Killed:
            pass
    assert len(here.trained) == 8 + 8 + 4 + 4 + 2 - 8  # nothing that was finished is trained again
    assert losses(answer) == losses(undisturbed)  # to the bit
    assert answer.tokens / grid.tokens == pytest.approx(0.475)
    assert answer.loss <= 1.005 * grid.loss
    assert (
        abs(math.log2(float(answer.best.values[sweep.axes[0].key]) / float(grid.best.values[sweep.axes[0].key]))) < 1.01
    )
    finals = {one.trial: one.loss for one in answer.finals}
    assert finals.items() <= {one.trial: one.loss for one in grid.finals}.items()  # the very runs of the grid


def test_the_answer_is_a_recipe_a_page_and_values(start, tmp_path):
    sweep, _, runs = start(RATES.replace("log:0.0025..0.32", "0.005,0.02,500"), "schedule.warmup_steps=0,5")
    answer = run_sweep(sweep, runs, print)
    write_answer(sweep, answer)
    best = load_recipe(f"{sweep.folder}/best.yaml")
    assert best.optimizer.learning_rate == as_dict(answer)["best"]["optimizer.learning_rate"] in (0.005, 0.02)
    assert (best.run.name, best.run.storage) == ("sweep-best", str(tmp_path))
    html = sweep_page(sweep, answer)
    assert all(f"<h3>{axis.key}</h3>" in html for axis in sweep.axes)
    assert f"{answer.loss:.4f}" in html
    assert "http" not in html.replace("http://www.w3.org", "")
    final = open_run(f"{sweep.folder}/{answer.best.name}")
    assert final.val_losses[120] == answer.loss


def test_values_that_only_fit_each_other_are_a_grid(tmp_path):
    """Values that the recipe's own other keys would not go with; each combination is judged, not each value."""
    for words in (
        ["schedule.warmup_steps=150,200", "training.steps=1000,2000"],
        ["model.heads=3,6", "model.width=96,192"],
        ["schedule.warmup_steps=150", "training.steps=1000,2000"],
    ):
        axes, overrides = divide(words)
        check_trials("tiny", overrides, axes)
        assert base_of_sweep("tiny", overrides, axes).run.name == "tiny-sweep"
    axes, overrides = divide(["model.heads=3,5", "model.width=96,192"])
    with pytest.raises(RaygptError, match=r"model\.(heads|width)"):
        check_trials("tiny", overrides, axes)


def test_trials_that_were_trained_with_another_recipe_are_refused_though_they_are_done(start):
    sweep, _, runner = start("optimizer.learning_rate=0.01,0.02", is_whole=True)
    run_sweep(sweep, runner, lambda text: None)
    sweep, here, runner = start("optimizer.learning_rate=0.01,0.02", is_whole=True, **{"training.seed": 5})
    with pytest.raises(
        RaygptError, match=r"is a run of another recipe \(training.seed: 1337 → 5\); write run.name=sweep-2"
    ):
        run_sweep(sweep, runner, lambda text: None)
    assert here.trained == []


def test_the_same_keys_in_another_order_are_the_same_sweep(start):
    words = ["optimizer.learning_rate=0.01,0.02", "schedule.warmup_steps=0,5"]
    sweep, _, runner = start(*words, is_whole=True, **{"training.steps": 50})
    run_sweep(sweep, runner, lambda text: None)
    sweep, here, runner = start(*reversed(words), is_whole=True, **{"training.steps": 50})
    run_sweep(sweep, runner, lambda text: None)
    assert here.trained == []


def test_trials_trained_to_their_end_may_start_from_a_run_by_its_name(start, tmp_path):
    words = ("optimizer.learning_rate=0.01,0.02",)
    sweep, here, _ = start(*words, is_whole=True, **{"training.steps": 50})
    before = sweep.recipes["learning_rate-0.01"]
    run = before.run.model_copy(update={"name": "before", "storage": str(tmp_path)})
    assert here.train(before.model_copy(update={"run": run}), print, 20) is None
    logged = []
    sweep, _, runner = start(*words, "run.start_from=before@20", is_whole=True, name="after")
    runner.watch = lambda leg, event: logged.append(event.step) if isinstance(event, StepLogged) else None
    run_sweep(sweep, runner, lambda text: None)
    assert logged[0] == 30  # every tenth is logged, and the first twenty are those of the run before


def test_the_name_that_is_offered_is_no_other_sweeps(start):
    start(RATES)
    start(RATES, name="sweep-2")
    with pytest.raises(RaygptError, match=r"has the runs of another sweep or ladder .* write run.name=sweep-3"):
        start("optimizer.learning_rate=1e-3,2e-3,4e-3")


def test_another_grid_in_the_same_folder_is_refused(start):
    start(RATES)
    with pytest.raises(
        RaygptError, match=r"has the runs of another sweep or ladder \(it differs in keys.*write run.name=sweep-2"
    ):
        start("optimizer.learning_rate=1e-3,2e-3,4e-3")
