"""How long a sweep will take, against the sum over its runs by hand."""

import pytest

from raygpt.planning.corpus import Corpus
from raygpt.planning.forecast import forecast
from raygpt.planning.target import parse_target
from raygpt.sweep import grid
from raygpt.sweep.forecast import START_S, forecasts, sweep_seconds
from raygpt.sweep.values import divide

CORPUS = Corpus(4096, 3_000_000, 128 * 1000)


def planned(tmp_path, is_whole=False):
    axes, overrides = divide(["optimizer.learning_rate=log:0.0025..0.32", f"run.storage={tmp_path}"])
    return grid.plan_sweep("tiny", overrides, axes, lambda context: CORPUS.train_tokens // context, is_whole)


def test_every_run_of_every_round_is_counted(tmp_path):
    sweep, target = planned(tmp_path), parse_target("h200")
    trials = forecasts(sweep, target, CORPUS)
    each = forecast(sweep.recipes["learning_rate-0.01"], target, CORPUS)
    step, validation = each.time.total, each.evaluation_s
    assert validation == pytest.approx(128_000 / 3 / each.tokens_per_s)
    runs = 8 + 8 + 4 + 4 + 2
    steps = 8 * (18 + 9) + 4 * (36 + 18) + 2 * 126
    validations = 8 * (1 + 2) + 4 * (0 + 2) + 2 * 2  # eval_every is 100 of 180 steps
    by_hand = runs * START_S + steps * step + validations * validation
    assert sweep_seconds(sweep, trials, 1) == pytest.approx(by_hand)


def test_runs_side_by_side_take_less_and_a_whole_grid_is_every_run_to_its_end(tmp_path):
    sweep, whole = planned(tmp_path), planned(tmp_path, is_whole=True)
    trials = forecasts(sweep, parse_target("h200"), CORPUS)
    assert sweep_seconds(sweep, trials, 8) < 0.2 * sweep_seconds(sweep, trials, 1)
    assert sweep_seconds(whole, trials, 1) == pytest.approx(
        sum(START_S + one.recipe.steps * one.time.total + 3 * one.evaluation_s for one in trials.values())
    )
