"""Which trials go on, what that costs, and what a fork that is cooled down computes."""

import math

import numpy as np
import pytest

from raygpt.recipes import load_recipe
from raygpt.sweep.rounds import best, cooled, rounds_of, share


def recipes(count, **changes):
    return [load_recipe("tiny", {"training.steps": 200, **changes})] * count


@pytest.mark.parametrize("count", range(3, 40))
def test_at_most_half_of_the_grids_tokens_are_spent_and_at_least_one_trial_is_trained_to_the_end(count):
    rounds = rounds_of(recipes(count))
    assert rounds[-1].kept == (count // 4 or 1)
    spent, before = 0, dict.fromkeys(range(count), 0)
    for one in rounds:  # counted step by step: the trial's own run goes on, a fork is extra
        step, last = one.steps(recipes(1)[0])
        for n in range(one.trials):
            spent += step - before[n] + last - step
            before[n] = step
    spent += sum(200 - before[n] for n in range(rounds[-1].kept))
    assert spent / (200 * count) == pytest.approx(share(rounds, count))
    assert spent / (200 * count) <= 0.5


def test_two_trials_or_very_short_runs_are_trained_to_the_end():
    assert rounds_of(recipes(2)) == []
    assert rounds_of(recipes(8, **{"training.steps": 40})) == []
    assert share([], 2) == 1


def test_a_long_warm_up_leaves_out_the_round_before_its_end():
    (only,) = rounds_of(recipes(8, **{"schedule.warmup_steps": 40}))
    assert (only.trunk, only.kept) == (0.3, 1)


def test_diverged_trials_never_go_on():
    assert best({"a": math.inf, "b": 2.0, "c": 1.0}, 3) == ["c", "b"]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear"])
def test_a_fork_begins_at_the_trials_rate_and_ends_at_its_schedules_end(kind):
    recipe = load_recipe("tiny", {"schedule": {"kind": kind, "end": 0.05}, "training.steps": 200, "run.name": "t"})
    fork = cooled(recipe, "t.60", 60, 80)

    def rates(one, step):
        scale = float(one.schedule.fraction(step, one.steps, np))
        return [scale * getattr(one.optimizer, key) for key in ("learning_rate", "embedding_rate", "head_rate")]

    assert rates(fork, 60) == pytest.approx(rates(recipe, 60))
    assert rates(fork, 80) == pytest.approx(rates(recipe, 200))
    assert rates(fork, 70)[0] < rates(fork, 65)[0] < rates(fork, 60)[0]
    assert (fork.run.start_from, fork.run.name, fork.steps) == ("t@60", "t.60", 80)
    assert fork.reason_not_to_start is None  # tiny has no gains, whose rate stays


def test_a_constant_rate_is_compared_without_cooling():
    recipe = load_recipe("tiny", {"schedule": {"kind": "constant"}, "training.steps": 200, "run.name": "t"})
    assert cooled(recipe, "t.60", 60, 80).schedule == recipe.schedule
