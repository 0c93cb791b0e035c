"""The loss to expect, by a law beside the runs."""

import json

import numpy as np
import pytest

from raygpt import storage
from raygpt.models import describe
from raygpt.planning.forecast import forecast
from raygpt.planning.loss import family_of, read_laws
from raygpt.planning.search import fastest, helpful_changes
from raygpt.planning.target import parse_target
from raygpt.recipes import load_recipe

LAW = {"E": 1.7, "A": 110.0, "a": 0.24, "B": 180.0, "b": 0.25, "S": 1e8, "p": 3.0}


def tiny(storage, **changes):
    return load_recipe("tiny", {"run.storage": str(storage), **changes})


def write_law(storage, name="ladder", rungs=6, spread=0.02, noise=0.004, higher=0.0, changes=(), **more):
    """A law whose floor E varies by `spread` between its samples, around one that is `higher` than the law's."""
    floors = np.random.default_rng(1).normal(LAW["E"] + higher, spread, 200)
    content = {
        "format": 3,
        "family": family_of(tiny(storage)),
        "law": LAW,
        "samples": [[floor, *list(LAW.values())[1:]] for floor in floors],
        "noise": noise,
        "rungs": [{"run": f"rung-{n}", "parameters": 10**6, "tokens": 10**8, "loss": 4.0} for n in range(rungs)],
        **more,
        **dict(changes),
    }
    (storage / name).mkdir()
    (storage / name / "scaling.json").write_text(json.dumps(content))


def expected_loss(storage, **changes):
    return read_laws(str(storage)).expected_loss(tiny(storage, **changes), 10**8, 10**9)


def test_the_loss_is_the_laws_and_its_interval_covers_four_runs_of_five(tmp_path):
    write_law(tmp_path)
    got = expected_loss(tmp_path)
    loss = 1.7 + ((110 / 1e8**0.24) ** 3 + (180 / 9e8**0.25) ** 3) ** (1 / 3)
    assert got.loss == pytest.approx(loss)
    away = 0.0035 * np.hypot(np.log2(100), np.log2(10))  # from the rungs
    deviation = (0.02**2 + (0.004 * loss) ** 2 + (away * loss) ** 2) ** 0.5
    assert (got.low, got.high) == pytest.approx((loss - 1.28 * deviation, loss + 1.28 * deviation), abs=0.012)
    assert got.rests_on == "a law fitted to 6 runs in ladder, 1,000 times the largest one's size × tokens"


def test_the_interval_lies_around_the_loss_though_the_samples_are_higher(tmp_path):
    write_law(tmp_path, higher=0.05)  # as priors that vary make them
    got = expected_loss(tmp_path)
    assert got.high / got.loss == pytest.approx(got.loss / got.low, abs=0.004)


def test_without_a_law_of_the_family_nothing_is_expected(tmp_path):
    assert expected_loss(tmp_path) is None
    write_law(tmp_path, "few", rungs=3)
    write_law(tmp_path, "other-format", format=2)
    assert expected_loss(tmp_path) is None
    write_law(tmp_path, "enough", rungs=4)
    assert expected_loss(tmp_path).rests_on.endswith("in enough, 1,000 times the largest one's size × tokens")
    assert expected_loss(tmp_path, **{"data.tokenizer": "bytes"}) is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "3",
        '{"format": 3}',
        '{"format": 3, "family": 1, "law": {}}',
        {"samples": []},
        {"samples": [[1, 2]]},
        {"law": {**LAW, "p": 0}},
        {"law": {**LAW, "E": None}},
        {"noise": float("nan")},
        {"rungs": [{"run": "a", "parameters": 0, "tokens": 1, "loss": 4.0}] * 4},
        {"rungs": [{"run": "a", "size": 1}] * 4},
        {"rungs": {"a": 1}},
    ],
)
def test_a_file_that_is_no_law_is_left_out_with_a_note(tmp_path, content):
    write_law(tmp_path, "sound")
    if isinstance(content, str):
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "scaling.json").write_text(content)
    else:
        write_law(tmp_path, "damaged", changes=content)
    assert " runs in sound" in expected_loss(tmp_path).rests_on
    line = f"{tmp_path}/damaged/scaling.json is left out: it is no scaling law; delete it"
    assert read_laws(str(tmp_path)).unreadable == (line,)
    assert line in forecast(tiny(tmp_path), parse_target("h200")).notes


def test_a_law_that_may_not_be_read_is_no_reason_to_delete_it(tmp_path, monkeypatch):
    write_law(tmp_path, "sound")
    (tmp_path / "folder" / "scaling.json").mkdir(parents=True)  # by that name

    def refuse(uri):
        raise PermissionError(13, "Permission denied", uri)

    assert read_laws(str(tmp_path)).unreadable == ()
    monkeypatch.setattr(storage, "read_bytes", refuse)
    said = tuple(
        f"{tmp_path}/{name}/scaling.json is left out: it cannot be read (Permission denied)"
        for name in ("folder", "sound")
    )
    assert read_laws(str(tmp_path)).unreadable == said


@pytest.mark.parametrize(
    "change",
    [{"model.width": 256}, {"model.layers": 8}, {"training.steps": 4000}, {"training.seed": 3}, {"engine": "torch"}],
)
def test_size_length_seed_and_engine_are_not_of_the_family(tmp_path, change):
    assert family_of(tiny(tmp_path, **change)) == family_of(tiny(tmp_path))


def test_a_ladder_of_gpt2s_published_sizes_is_one_family():
    small, medium = (load_recipe("gpt2-124m", {"model.preset": preset}) for preset in ("gpt2", "gpt2-medium"))
    assert family_of(small) == family_of(medium)


def test_tables_do_not_count():
    modern = describe(load_recipe("modern-124m").model, 50257)
    assert modern.block_parameters == modern.count - 2 * 50257 * 768 == 12 * 12 * 768**2
    with_values = load_recipe("modern-124m", {"model.value_embeddings": 3}).model
    assert describe(with_values, 50257).block_parameters == modern.block_parameters


def test_the_laws_are_read_once_for_a_plan_and_all_its_changes(tmp_path, monkeypatch):
    write_law(tmp_path)
    read = []
    monkeypatch.setattr(storage, "read_bytes", lambda uri, real=storage.read_bytes: read.append(uri) or real(uri))
    found = forecast(tiny(tmp_path), parse_target("8xh100"))
    changes = [fastest(found), *helpful_changes(found)]
    assert [uri for uri in read if uri.endswith("scaling.json")] == [f"{tmp_path}/ladder/scaling.json"]
    assert all(change.forecast.loss for change in changes if change.is_same_run)
