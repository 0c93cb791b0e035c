"""Runs that raygpt 0.1 wrote open, resume, export and fork as they did.

tests/fixtures/run-*-0.1.tar.xz each hold a text, its token store and a run of six steps of which three are done, and in
expected.jsonl the metrics of a run that did all six: by JAX on two devices, by PyTorch on two processes (fsdp), and by
transformers' own GPT-2.
"""

import json
import tarfile
from pathlib import Path

import pytest
from conftest import also

import raygpt
from raygpt.runs import open_run

pytest.importorskip("torch", reason="needs the extra torch")


@pytest.fixture
def old_run(request, tmp_path, monkeypatch):
    """The folder of a run, made the current one: the recipe's paths are relative."""
    name = request.param
    with tarfile.open(Path(__file__).parent / "fixtures" / f"run-{name}-0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return f"runs/{name}"


def expected(key):
    lines = [json.loads(line) for line in Path("expected.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.mark.parametrize("old_run", ["jax", "torch", *also("transformers")], indirect=True)
def test_a_run_goes_on_from_its_checkpoint_with_the_losses_that_it_would_have_had(old_run, ray_cluster):
    result = raygpt.train(f"{old_run}/recipe.yaml")
    assert result.error is None
    lines = [json.loads(line) for line in Path(old_run, "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step in (4, 5, 6):
        assert losses[step] == pytest.approx(expected("loss")[step], rel=1e-6)
    assert open_run(old_run).val_losses[6] == pytest.approx(expected("val_loss")[6], rel=1e-6)


@pytest.mark.parametrize("old_run", ["jax", "torch", "transformers"], indirect=True)
def test_a_run_is_evaluated_exported_and_imported(old_run, raygpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = raygpt("eval", old_run, "--step", "3", "--json")
    assert status == 0, err
    assert json.loads(out)["tasks"]["validation"]["loss"] == pytest.approx(expected("val_loss")[3], rel=1e-5)
    assert raygpt("export", old_run, "exported")[0] == 0
    assert raygpt("import", "exported", "runs/again")[0] == 0


@pytest.mark.parametrize("old_run", ["jax", *also("torch")], indirect=True)
def test_a_run_is_what_one_of_the_other_engine_starts_from(old_run, ray_cluster):
    other = {"runs/jax": "torch", "runs/torch": "jax"}[old_run]
    changes = {"engine": other, "run.name": "fork", "run.start_from": old_run, "cluster.workers": 1}
    result = raygpt.train(f"{old_run}/recipe.yaml", **changes, **{"cluster.mesh": {}, "model.dropout": 0.0})
    assert result.error is None
    lines = [json.loads(line) for line in Path("runs/fork/metrics.jsonl").read_text().splitlines()]
    began = next(line for line in lines if "val_loss" in line)
    assert began["step"] == 3
    assert began["val_loss"] == pytest.approx(expected("val_loss")[3], rel=1e-5)
