"""Is my loss normal? The band against the textbook's formula, the sentence against runs inside and outside of it."""

import numpy as np
import pytest
from directories import logged, make_run

from raygpt.recipes import load_recipe
from raygpt.runs import open_run
from raygpt.show import normal


def test_the_band_is_where_a_further_run_falls_in_95_of_100_cases():
    """Drawn from a known distribution, with as many seeds and points as a reference has."""
    chance = np.random.default_rng(1)
    inside = []
    for _ in range(300):
        drawn = 5 + 0.2 * chance.standard_normal((4, 20))
        band = normal.band({"steps": list(range(20)), "losses": drawn[:3].tolist()})
        inside += [low <= loss <= high for low, loss, high in zip(band.low, drawn[3], band.high, strict=True)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.01)


def test_the_band_of_one_point_is_the_prediction_interval_by_hand():
    band = normal.band({"steps": [7], "losses": [[1.0], [2.0], [3.0]]})  # mean 2, s 1, t of 2 degrees 4.303
    assert (band.low[0], band.high[0]) == pytest.approx((2 - 4.303 * (4 / 3) ** 0.5, 2 + 4.303 * (4 / 3) ** 0.5))


def test_the_band_is_at_least_one_percent_to_either_side_and_straight_between_points():
    band = normal.band({"steps": [0, 100], "losses": [[4.0, 2.0], [4.0, 2.0]]})
    assert band.at(50) == pytest.approx((0.99 * 3, 1.01 * 3))


@pytest.mark.parametrize("name", normal.references())
def test_each_of_the_shipped_reference_runs_is_normal_itself(name, tmp_path):
    reference = normal.load_reference(name)
    assert len(reference["seeds"]) == 3
    assert reference["val"]["steps"][-1] == load_recipe(name).steps  # trained to the end
    for losses in reference["val"]["losses"]:
        lines = [{"step": step, "val_loss": loss} for step, loss in zip(reference["val"]["steps"], losses, strict=True)]
        folder = make_run(tmp_path, "a", lines)
        (tmp_path / "a" / "recipe.yaml").write_text(load_recipe(name).to_yaml())
        verdict = normal.judge(open_run(folder))
        assert (verdict.kind, verdict.recipe) == ("normal", name)


@pytest.mark.parametrize(("factor", "kind"), [(1.0, "normal"), (1.1, "high"), (0.9, "low")])
def test_a_run_is_judged_by_its_last_validation_loss(tmp_path, factor, kind):
    reference = normal.load_reference("tiny")["val"]
    loss = factor * float(np.mean([losses[-1] for losses in reference["losses"]]))
    lines = [*logged([10, 200], lambda step: 9.0), {"step": 200, "val_loss": loss}]
    verdict = normal.judge(open_run(make_run(tmp_path, "a", lines, {"engine": "torch", "training.seed": 5})))
    assert verdict.kind == kind
    low, high = normal.band(reference).at(200)
    assert (
        f"At step 200 the validation loss is {loss:.3f}; from 3 runs of tiny, {low:.3f} to {high:.3f}"
        in verdict.sentence
    )


def test_before_the_first_validation_it_is_judged_by_its_training_loss(tmp_path):
    lines = [{"step": 0, "val_loss": 8.33}, *logged([10, 20], lambda step: 20.0)]
    verdict = normal.judge(open_run(make_run(tmp_path, "a", lines)))
    assert verdict.kind == "high"
    assert verdict.sentence.startswith("Higher than normal. At step 20 the loss is 20.000")
    empty = normal.judge(open_run(make_run(tmp_path, "b", [{"step": 0, "val_loss": 8.33}])))
    assert empty.kind == "unknown"
    assert empty.sentence.startswith("Too early to say")


def test_another_recipe_is_told_what_keeps_it_from_being_compared(tmp_path):
    settings = {"training.steps": 300, "model.bias": False}
    verdict = normal.judge(open_run(make_run(tmp_path, "a", [{"step": 10, "val_loss": 8.0}], settings)))
    assert (verdict.kind, verdict.val) == ("unknown", None)
    assert verdict.sentence == (
        "No reference has this recipe. The nearest is tiny, but here model.bias false instead of true, "
        "training.steps 300 instead of 200."
    )
