"""The fitted law, against losses that follow a known one."""

from dataclasses import replace

import numpy as np
import pytest

from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.planning.loss import Measured
from raygpt.recipes import load_recipe
from raygpt.show.scaling import show_plan
from raygpt.sweep.ladder import MOST_RUNGS, choose_rungs, cost
from raygpt.sweep.law import Goal, fit_law
from raygpt.sweep.scaling import plan_ladder

VOCAB = 4096
TINY = 4 * 12 * 128**2  # parameters of its blocks
BYTES_PER_TOKEN = 3.5
TRUE = (1.3, 7.5, 0.1, 30.0, 0.16, 2e5, 3.0)  # E, A, a, B, b, S, p: a loss of 3.85 for tiny after 4,000 steps


def true_loss(parameters, tokens, terms=TRUE):
    floor, of_size, a, of_tokens, b, before, p = terms
    return floor + ((of_size / parameters**a) ** p + (of_tokens / (tokens - before) ** b) ** p) ** (1 / p)


def target(steps=4000, share=0.1):
    recipe = load_recipe("tiny", {"training.steps": steps})
    rungs = choose_rungs(recipe, VOCAB, share)
    return rungs, TINY, steps * 4096


def test_a_ladder_is_within_its_share_of_the_compute_and_its_rungs_are_not_too_short():
    rungs, parameters, tokens = target()
    whole = 6 * (parameters + VOCAB * 128) * tokens
    assert cost(rungs) < 0.13 * whole  # attention comes on top of 6 N D
    assert min(rung.recipe.steps for rung in rungs) == 300
    assert len({rung.parameters for rung in rungs}) >= 3
    assert len({rung.tokens for rung in rungs}) >= 2
    assert max(rung.tokens for rung in rungs) < tokens
    assert len({rung.name for rung in rungs}) == len(rungs) >= 5


def test_rungs_are_divided_by_the_mesh_of_the_recipe():
    recipe = load_recipe("modern-124m", {"training.steps": 2560, "cluster.mesh.tensor": 2})
    rungs = choose_rungs(recipe, 50257, 0.1)
    assert len({rung.parameters for rung in rungs}) >= 2
    for rung in rungs:
        assert Recipe.model_validate(dict(rung.recipe)).model.heads % 2 == 0


def test_a_share_that_is_too_small_is_refused_with_the_one_that_is_not():
    recipe = load_recipe("tiny", {"training.steps": 1300})
    with pytest.raises(RaygptError, match=r"0.001 of the run's compute is too little .* write --share 0\.\d+"):
        choose_rungs(recipe, VOCAB, 0.001)
    with pytest.raises(RaygptError, match=r"180 are too few for a ladder.*write 1201 or more"):
        choose_rungs(load_recipe("tiny"), VOCAB, 0.1)


def test_a_ladder_that_is_far_from_its_run_says_with_which_share_it_would_not_be():
    recipe = load_recipe("modern-124m", {"training.steps": 1280})
    far = plan_ladder(recipe, 50257, 0.1, 4.4, 7.6)
    assert far.is_far
    assert 0.1 < far.enough < 0.25
    assert not plan_ladder(recipe, 50257, far.enough, 4.4, 7.6).is_far


@pytest.mark.parametrize(("enough", "remedy"), [(0.2, "--share 0.2"), (None, f"no ladder of up to {MOST_RUNGS} runs")])
def test_the_note_on_a_far_ladder_says_what_would_come_nearer(capsys, enough, remedy):
    far = plan_ladder(load_recipe("modern-124m", {"training.steps": 1280}), 50257, 0.1, 4.4, 7.6)
    show_plan(replace(far, enough=enough), at_once=1)
    assert f"off; {remedy} would come nearer" in capsys.readouterr().err


def law_of(rungs, losses, bytes_per_token=BYTES_PER_TOKEN, **options):
    measured = [Measured(one.name, one.parameters, one.tokens, loss) for one, loss in zip(rungs, losses, strict=True)]
    return fit_law(measured, "ladder", Goal(TINY, 4000 * 4096, 4096, bytes_per_token), **options)


def test_a_law_without_noise_predicts_the_run():
    rungs, parameters, tokens = target()
    found = law_of(rungs, [true_loss(one.parameters, one.tokens) for one in rungs])
    assert found.loss(parameters, tokens) == pytest.approx(true_loss(parameters, tokens), rel=0.01)


def test_small_models_of_a_large_vocabulary_predict_a_large_one():
    """benchmarks/results/scaling-modern-124m.json, and what came: the smallest had hardly begun to learn."""
    losses = {
        (2, 96, 300): 5.1928,
        (2, 96, 450): 5.0317,
        (2, 144, 300): 5.0945,
        (3, 192, 300): 4.9256,
        (2, 96, 900): 4.7644,
        (6, 384, 600): 4.1353,
    }
    measured = [
        Measured("rung", 12 * layers * width**2, steps * 32768, loss) for (layers, width, steps), loss in losses.items()
    ]
    law = fit_law(measured, "ladder", Goal(12 * 12 * 768**2, 2560 * 32768, 32768, 4.43))
    said = law.predict(12 * 12 * 768**2, 2560 * 32768)
    assert said.loss == pytest.approx(3.404, rel=0.015)
    assert said.low < 3.404 < said.high
    assert 50 < law.terms["S"] / 32768 < 255  # steps


def test_the_floor_is_that_of_the_texts_bytes_where_rungs_leave_it_open():
    rungs, *_ = target()
    losses = [true_loss(one.parameters, one.tokens) for one in rungs]
    floors = [law_of(rungs, losses, size).terms["E"] for size in (2.0, 4.0)]
    assert floors[1] > 1.3 * floors[0]


@pytest.mark.parametrize("wrong", [1, 3])
def test_one_rung_that_went_wrong_moves_the_prediction_little(wrong):
    rungs, parameters, tokens = target()
    random = np.random.default_rng(wrong)
    losses = [true_loss(one.parameters, one.tokens) * (1 + 0.002 * random.standard_normal()) for one in rungs]
    clean = law_of(rungs, losses)
    losses[wrong] *= 1.1
    spoilt = law_of(rungs, losses)
    ends = [found.loss(parameters, tokens) for found in (clean, spoilt)]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    assert spoilt.noise > clean.noise


def test_the_interval_covers_what_comes_out_in_about_four_runs_of_five():
    rungs, parameters, tokens = target()
    random, hits, errors, widths = np.random.default_rng(4), [], [], []
    for _ in range(12):
        powers, p = random.normal((0.11, 0.16), (0.03, 0.04)), random.uniform(2, 3.5)
        parts = random.uniform(1.5, 2.5, 2) * (parameters ** powers[0], tokens ** powers[1])  # at the run
        before = 4096 * abs(random.normal(0, 80))
        terms = (random.uniform(0.8, 1.8), parts[0], powers[0], parts[1], powers[1], before, p)
        losses = [noisy(random, true_loss(one.parameters, one.tokens, terms)) for one in rungs]
        law = law_of(rungs, losses, count=50)
        said, came = law.predict(parameters, tokens), noisy(random, true_loss(parameters, tokens, terms))
        hits.append(said.low <= came <= said.high)
        errors.append(abs(said.loss / came - 1))
        widths.append((said.high - said.low) / said.loss)
    assert np.mean(hits) >= 0.7
    assert np.median(errors) < 0.02
    assert np.median(widths) < 0.1


def noisy(random, loss):
    return loss * (1 + 0.003 * random.standard_normal())
