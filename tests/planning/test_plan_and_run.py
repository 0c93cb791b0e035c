"""Where a plan and the run that follows it have to say the same: devices, workers, batches, and what is assumed."""

from types import SimpleNamespace

import pytest
from test_forecast import planned
from test_loss import write_law

from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Bpe
from raygpt.errors import RaygptError
from raygpt.planning.forecast import HUGGINGFACE
from raygpt.planning.micro_batch_size import cpu_devices, split_batch
from raygpt.planning.search import fastest
from raygpt.planning.target import found_target, parse_target
from raygpt.recipes import load_recipe
from raygpt.runs import records
from raygpt.training.ray import worker

GIB = 2**30
SLICE = {"cluster.accelerator_type": "TPU-V6E", "cluster.topology": "4x4"}


@pytest.mark.parametrize(
    ("about", "nodes", "changes", "on"),
    [
        ({"device": "TPU v6 lite", "devices": "16"}, 4, {**SLICE, "cluster.workers": 4}, "v6e:4x4"),
        ({"device": "TPU v6 lite", "devices": "32"}, 8, {**SLICE, "cluster.workers": 8}, "2*v6e:4x4"),
        ({"device": "NVIDIA H100 80GB HBM3", "devices": "16"}, 2, {"cluster.workers": 16}, "2x8xh100"),
        ({"device": "NVIDIA H100 80GB HBM3", "devices": "8"}, 1, {"cluster.workers": 8}, "8xh100"),
    ],
)
def test_a_run_keeps_the_plan_that_was_made_for_its_devices(about, nodes, changes, on, tmp_path, monkeypatch):
    changes |= {"training.batch_tokens": 65536, "cluster.mesh": {"data": 1, "fsdp": -1}}
    before = planned("modern-124m", on, tmp_path, **changes)
    found = SimpleNamespace(find_devices=lambda recipe: before.devices)
    monkeypatch.setattr(worker, "engine_of", lambda name: found)
    spec = SimpleNamespace(
        recipe=before.recipe, run_folder=str(tmp_path / "run"), tokenizer=SimpleNamespace(vocab=50257), val=()
    )
    worker.keep_plan(spec, about, nodes)
    kept = records.read_plan(spec.run_folder)
    assert kept["target"] == str(before.target)
    assert kept["step_s"] == before.as_dict()["step_s"]


def test_a_host_of_tpus_without_a_slice_has_its_chips(tmp_path):
    target = found_target({"device": "TPU v5 lite", "devices": "4"}, 1, None)
    assert (target.device.name, target.count, target.sides) == ("v5e", 4, ())


def test_machines_without_gpus_are_as_many_cpus():
    assert found_target({"device": "cpu", "devices": "8"}, 3, None).count == 3
    assert found_target({"device": "NVIDIA X9000", "devices": "8"}, 1, None) is None


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_on_this_cpu_the_recipes_workers_share_it(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("raygpt.planning.target.cores", lambda: 4)
    got = planned("tiny", "here", tmp_path, engine=engine, **{"cluster.workers": 2, "cluster.accelerator": "cpu"})
    assert got.devices == cpu_devices(got.recipe, 2, 2, 4, got.target.device.memory)
    assert fastest(got).forecast.recipe.cluster.workers == 2


def test_micro_batches_that_the_recipe_says_and_that_do_not_fit_are_refused(tmp_path):
    recipe = load_recipe("gpt2-124m", {"training.accumulation": 1})
    devices = planned("gpt2-124m", "l4", tmp_path).devices
    with pytest.raises(RaygptError) as refused:
        split_batch(recipe, 50257, devices)
    line = "training.accumulation: with 1, 480 rows at a time need 146.4 GiB on a device, but the device has 20.2 GiB"
    assert str(refused.value).startswith(line)
    fitting = int(str(refused.value).partition("; write ")[2].partition(",")[0])
    assert fitting == split_batch(load_recipe("gpt2-124m"), 50257, devices).accumulation
    assert not planned("gpt2-124m", "l4", tmp_path, **{"training.accumulation": 1}).fits


@pytest.mark.parametrize(("on", "accumulation"), [("h100", 480), ("l4", 1)])
def test_find_searches_the_accumulation_too(on, accumulation, tmp_path):
    fixed, free = (
        fastest(planned("gpt2-124m", on, tmp_path, **keys)) for keys in ({"training.accumulation": accumulation}, {})
    )
    assert fixed.keys == free.keys


def test_a_mesh_that_shards_nothing_is_said_and_another_is_advised(tmp_path):
    got = planned("modern-1.5b", "v5e:16x16", tmp_path)
    assert not got.fits
    assert any("256 does not divide model.width 1920, so every device has all" in note for note in got.notes)
    assert any("write 128, and the rest along data" in note for note in got.notes)
    with pytest.raises(RaygptError, match=r"write cluster\.mesh\.data: -1 and cluster\.mesh\.fsdp: 128 to shard it$"):
        split_batch(got.recipe, got.corpus.vocab, got.devices)


def test_validations_of_a_known_text_are_counted_and_of_another_it_is_said_that_they_are_not(tmp_path):
    known = planned("gpt2-124m-openwebtext", "h200", tmp_path)
    assert known.corpus.val_tokens == pytest.approx(4_434_897, rel=0.05)
    assert known.evaluation_s > 0
    assert not any("validations" in note for note in known.notes)
    other = planned("gpt2-124m-openwebtext", "h200", tmp_path, **{"data.source": "tinystories"})
    assert [note for note in other.notes if note.startswith("validations are not counted")]


def test_a_saved_tokenizer_has_its_own_vocabulary(tmp_path):
    trained = Bpe.train(iter(["a few words of a text " * 50]), 300)
    tokenizers.save(trained, str(tmp_path / "saved"))
    got = planned("tiny", "h200", tmp_path, **{"data.tokenizer": str(tmp_path / "saved")})
    assert got.corpus.vocab == trained.vocab
    with pytest.raises(RaygptError, match="no tokenizer at"):
        planned("tiny", "here", tmp_path, **{"data.tokenizer": str(tmp_path / "nowhere")})
    elsewhere = planned("tiny", "h200", tmp_path, **{"data.tokenizer": "/data/tokenizer"})
    assert any("/data/tokenizer cannot be read on this machine" in note for note in elsewhere.notes)


@pytest.mark.parametrize("on", ["v6e:4x4", "t4", "v100", "h100"])
def test_a_peak_by_the_command_line_keeps_the_devices_ratio_of_precisions(on):
    table = parse_target(on).device
    same = parse_target(on, peak=table.peak / 1e12).device
    assert (same.peak, same.fp32) == (table.peak, pytest.approx(table.fp32))
    assert same.source == f"{table.source}; peak by the command line"
    assert parse_target("x1", peak=10, memory=8, bandwidth=100).device.fp32 == 5e12


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"engine": "torch", "training.compile": "off"}, "training.compile: off takes longer and more memory"),
        ({"engine": "torch", "model.implementation": "huggingface"}, HUGGINGFACE),
    ],
)
def test_what_the_figures_are_not_of_is_said(changes, note, tmp_path):
    assert any(line.startswith(note) for line in planned("gpt2-124m", "h200", tmp_path, **changes).notes)
    assert not any(line.startswith(note) for line in planned("gpt2-124m", "h200", tmp_path).notes)


def test_no_law_is_of_a_run_that_starts_from_another(tmp_path):
    write_law(tmp_path)
    assert planned("tiny", "h200", tmp_path).loss
    assert planned("tiny", "h200", tmp_path, **{"run.start_from": "runs/other"}).loss is None


def test_the_mfu_of_a_cpu_is_unknown_as_in_training(tmp_path):
    assert planned("tiny", "here", tmp_path).mfu is None
