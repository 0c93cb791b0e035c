"""A whole ladder of bigram models: real runs, a law, and what `raygpt plan` reads."""

from dataclasses import replace

import pytest
from here import SMALL, Here, Killed, make_runner, write_text

from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.planning.loss import read_laws
from raygpt.recipes import load_recipe
from raygpt.runs import open_run
from raygpt.show.scaling import show_answer
from raygpt.show.scaling_page import scaling_page
from raygpt.sweep.scaling import EARLY, _as_run, claim_ladder, plan_ladder, run_ladder, write_law

VOCAB = 257
UNIGRAM = 5.0  # a loss that token frequencies alone would give


@pytest.fixture
def recipe(tmp_path):
    text = write_text(tmp_path / "tokens")
    model = {"layers": 4, "heads": 4, "width": 64, "context": 16}
    training = {**SMALL["training"], "steps": 1300, "checkpoint_every": 500}
    return load_recipe(
        "tiny",
        {
            **SMALL,
            "data.source": str(text),
            "model": model,
            "training": training,
            "optimizer.learning_rate": 0.01,
            "run.storage": str(tmp_path),
            "run.name": "ladder",
        },
    )


def test_a_ladder_that_was_killed_goes_on_and_its_law_is_found_beside_the_runs(recipe, tmp_path):
    ladder = plan_ladder(recipe, VOCAB, 0.3, 1.0, UNIGRAM)
    claim_ladder(ladder)
    here = Here()
    here.killed_after = 2
    with pytest.raises(Killed):
        run_ladder(ladder, make_runner(ladder.folder, here))
    here = Here()
    answer = run_ladder(ladder, make_runner(ladder.folder, here))
    assert [name for name, _ in here.trained] == [rung.name for rung in ladder.rungs[2:]]
    write_law(ladder, answer)
    count = describe(recipe.model, VOCAB).block_parameters
    read = read_laws(str(tmp_path)).expected_loss(recipe, count, ladder.tokens)
    assert read.loss == answer.loss.loss
    assert read.low < read.loss < read.high
    rung = open_run(f"{tmp_path}/ladder/{ladder.rungs[0].name}")
    assert rung.val_losses[ladder.rungs[0].recipe.steps] == answer.law.rungs[0].loss
    html = scaling_page(ladder, answer)
    assert f"{answer.loss.loss:.4f}" in html
    assert "http" not in html


def test_rungs_that_have_only_learned_token_frequencies_give_no_law(recipe):
    rungs = len(plan_ladder(recipe, VOCAB, 0.3, 1.0, UNIGRAM).rungs)
    ladder = plan_ladder(recipe, VOCAB, 0.3, 1.0, 0.1)
    with pytest.raises(RaygptError) as refused:
        run_ladder(ladder, make_runner(ladder.folder, Here()))
    assert f"ladder: {rungs} of {rungs} rungs had hardly begun to learn: they ended at " in str(refused.value)
    assert "token frequencies alone give 0.10; write a recipe whose small models learn sooner" in str(refused.value)


def test_a_rung_that_has_only_learned_token_frequencies_is_left_out(recipe, capsys):
    ladder = plan_ladder(recipe, VOCAB, 0.5, 1.0, UNIGRAM)
    losses = [rung.loss for rung in run_ladder(ladder, make_runner(ladder.folder, Here())).law.rungs]
    ladder = replace(ladder, unigram_loss=sorted(losses)[-2] / EARLY + 1e-6)
    answer = run_ladder(ladder, make_runner(ladder.folder, Here()))  # which are trained already
    (early,) = answer.early
    assert early.loss == max(losses)
    assert len(answer.law.rungs) == len(losses) - 1
    assert "hardly begun" in scaling_page(ladder, answer)
    show_answer(ladder, answer, "scaling.html")
    assert f"note: {early.run} had hardly begun to learn and are left out" in " ".join(capsys.readouterr().err.split())


def test_a_rung_has_none_of_the_tasks_that_the_run_is_evaluated_on(recipe):
    training = recipe.training.model_copy(update={"eval_tasks": ("lambada=FILE",), "eval_items": 10})
    ladder = plan_ladder(recipe.model_copy(update={"training": training}), VOCAB, 0.3, 1.0, UNIGRAM)
    rung = _as_run(ladder.rungs[0], ladder.folder)
    assert (rung.training.eval_tasks, rung.training.eval_items) == ((), None)


def test_the_ladder_of_another_family_in_the_same_folder_is_refused(recipe):
    claim_ladder(plan_ladder(recipe, VOCAB, 0.3, 1.0, UNIGRAM))
    claim_ladder(plan_ladder(recipe, VOCAB, 0.5, 1.0, UNIGRAM))  # a larger one of the same family
    other = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"kind": "cosine"})})
    line = r"ladder has the runs of another sweep or ladder \(it differs in family\); write run.name=ladder-2 to begin"
    with pytest.raises(RaygptError, match=line):
        claim_ladder(plan_ladder(other, VOCAB, 0.3, 1.0, UNIGRAM))


def test_without_validation_text_there_is_no_ladder(recipe):
    with pytest.raises(RaygptError, match=r"data\.val: holds out no text"):
        plan_ladder(recipe, VOCAB, 0.3, 0.0, 0.0)
