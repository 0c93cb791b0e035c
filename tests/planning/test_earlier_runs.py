"""What finished runs beside a run say of its loss."""

import json
import math
import os

import numpy as np
import pytest
from conftest import CHECKOUT
from test_loss import tiny, write_law

from raygpt.models import describe
from raygpt.planning import earlier_runs
from raygpt.planning.earlier_runs import read_earlier_runs
from raygpt.planning.forecast import forecast
from raygpt.planning.loss import Measured, read_laws
from raygpt.planning.target import parse_target
from raygpt.sweep.law import Goal, fit_law

SIZE = describe(tiny("runs").model, 4096).block_parameters


def finish(storage, name, loss, state="finished", **changes):
    """A run directory as a run leaves it."""
    folder = storage / name
    (folder / "checkpoints").mkdir(parents=True)
    recipe = tiny(storage, **changes)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "result.json").write_text(json.dumps({"state": state, "why": "", "time": 0.0}))
    losses = {0: 8.3, recipe.steps // 2: loss + 1, recipe.steps: loss}
    (folder / "checkpoints" / "scores.json").write_text(json.dumps(losses))


def loss_of(storage, **changes):
    return forecast(tiny(storage, **changes), parse_target("h200")).loss


def test_finished_runs_are_read_with_their_size_and_last_loss(tmp_path):
    finish(tmp_path, "done", 3.86)
    finish(tmp_path, "stopped", 3.9, state="stopped")
    finish(tmp_path, "fork", 3.7, **{"run.start_from": "runs/done"})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "result.json").write_text("[1]")
    assert [run for _, run in read_earlier_runs(str(tmp_path))] == [Measured("done", SIZE, 180 * 4096, 3.86)]
    assert read_earlier_runs("s3://bucket/runs") == ()


def test_only_the_latest_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(earlier_runs, "MOST", 2)
    for number, name in enumerate(("c", "a", "b")):
        finish(tmp_path, name, 3.0)
        os.utime(tmp_path / name / "result.json", (number, number))
    assert [run.run for _, run in read_earlier_runs(str(tmp_path))] == ["a", "b"]


def test_without_a_law_runs_of_the_same_size_and_length_say_the_loss(tmp_path):
    assert loss_of(tmp_path) is None
    finish(tmp_path, "one", 3.85)
    finish(tmp_path, "two", 3.87, **{"training.seed": 5})
    finish(tmp_path, "longer", 3.5, **{"training.steps": 360})
    finish(tmp_path, "other", 2.0, **{"data.tokenizer": "bytes"})
    got = loss_of(tmp_path)
    assert got.loss == pytest.approx(3.86)
    assert got.high - got.loss == pytest.approx(1.2816 * 0.009 * math.sqrt(1.5) * 3.86, rel=1e-3)  # 80 % of a normal
    assert got.rests_on == "one, two, of the same size and length"
    assert loss_of(tmp_path, **{"training.steps": 200}) is None


def test_a_law_is_corrected_by_a_run_that_is_nearer_than_its_rungs(tmp_path):
    write_law(tmp_path)  # its rungs have 10^6 parameters and 10^8 tokens
    law = read_laws(str(tmp_path)).laws[0][1]
    size, tokens = 2**3 * 10**6, 2**4 * 10**8  # 5 doublings away
    plain = law.predict(size, tokens)
    run = Measured("near", size, tokens, 0.97 * law.loss(size, tokens))
    got = law.predict(size, tokens, [run])
    walked = (0.0035 * 5) ** 2
    assert got.loss == pytest.approx(plain.loss * (1 - 0.03 * walked / (walked + 0.009**2)))
    assert got.high - got.low < plain.high - plain.low
    assert got.rests_on.endswith(", corrected by near")
    several = law.predict(size, tokens, [run] * 4)  # four seeds are trusted more
    assert abs(several.loss / run.loss - 1) < abs(got.loss / run.loss - 1)
    assert law.predict(size, tokens, [Measured("far", 1000, 10**5, 9.0)]) == plain


def test_a_run_with_another_seed_corrects_the_law_of_tiny():
    """Real runs of 4,000 steps: two texts with four seeds each, of which the law expects over 2 % more than came."""
    results = CHECKOUT / "benchmarks" / "results"
    figures = json.loads((results / "scaling-tiny.json").read_text())["figures"]
    tokens, rungs = 4000 * 4096, [Measured(*rung) for rung in figures["rungs"]]
    law = fit_law(rungs, "ladder", Goal(SIZE, tokens, 4096, figures["bytes_per_token"]))
    texts = [json.loads((results / f"{name}.json").read_text())["figures"]["tiny"] for name in ("tiny-00", "tiny-01")]
    losses = [loss for text in texts for loss in text["val_losses"]]
    assert law.predict(SIZE, tokens).loss / np.mean(losses) - 1 > 0.02
    off, covered = [], []
    for number, loss in enumerate(losses):
        got = law.predict(SIZE, tokens, [Measured("earlier", SIZE, tokens, loss)])
        others = np.delete(losses, number)
        off.append(got.loss / others.mean() - 1)
        covered.append(np.mean((got.low < others) & (others < got.high)))
    assert np.sqrt(np.mean(np.square(off))) < 0.012
    assert 0.7 < np.mean(covered) < 1
