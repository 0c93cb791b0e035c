"""A recipe's forecast, its search for a faster plan, and `raygpt plan`."""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from math import prod

import pytest

from raygpt import storage
from raygpt.cli import main
from raygpt.corpus.extents import Extent
from raygpt.corpus.index import Index
from raygpt.errors import RaygptError
from raygpt.planning.forecast import SHARED, forecast
from raygpt.planning.loss import read_laws
from raygpt.planning.search import fastest, helpful_changes, meshes
from raygpt.planning.step_time import _link, exchange, sent_bytes
from raygpt.planning.target import parse_target
from raygpt.recipes import load_recipe


def planned(recipe, on, tmp_path, **changes):
    return forecast(load_recipe(recipe, {"run.storage": str(tmp_path), **changes}), parse_target(on))


def run(capsys, monkeypatch, *words):
    return told(capsys, monkeypatch, *words).out


def told(capsys, monkeypatch, *words):
    """What the command writes to standard output and standard error."""
    monkeypatch.setattr("sys.argv", ["raygpt", "plan", *words])
    with contextlib.suppress(SystemExit):
        main()
    return capsys.readouterr()


def test_numbers_of_a_run_follow_from_each_other(tmp_path):
    got = planned("gpt2-124m", "h200", tmp_path)
    assert got.fits
    assert got.parameters == 124_439_808
    assert got.tokens_per_s == pytest.approx(491_520 / got.time.total)
    assert got.mfu == pytest.approx(got.tokens_per_s * 859_885_056 / 989e12)
    assert got.run_s > 600_000 * got.time.total
    assert got.cost(3.0) == pytest.approx(3 * got.run_s / 3600)
    assert got.checkpoint_bytes == 12 * (124_439_808 + 47 * 768)  # parameters and two averages, padded tables
    assert sum(asdict(got.memory).values()) == got.memory.total <= got.devices.memory_bytes


def test_a_model_that_is_too_large_does_not_fit_and_says_which_mesh_would(tmp_path):
    got = planned("modern-1.5b", "v5e:4x4", tmp_path, **{"cluster.mesh": {"data": -1, "fsdp": 1}})
    assert not got.fits
    changes = helpful_changes(got)
    assert changes
    assert all(change.forecast.fits for change in changes)
    assert any("cluster.mesh.fsdp" in change.keys for change in changes)


@pytest.mark.parametrize(("recipe", "on"), [("tiny", "h200"), ("modern-124m", "h200"), ("gpt2-124m", "8xh100")])
def test_where_memory_is_plentiful_only_changes_that_make_it_faster_are_listed(recipe, on, tmp_path):
    got = planned(recipe, on, tmp_path)
    assert got.fits
    assert all(change.forecast.tokens_per_s > 1.01 * got.tokens_per_s for change in helpful_changes(got))


@pytest.mark.parametrize(
    ("recipe", "fixed"),
    [
        ("gpt2-124m", {"cluster.mesh.tensor": 2}),
        ("modern-1.5b", {"cluster.mesh.data": 4, "cluster.mesh.fsdp": 2}),
        ("gpt2-124m", {"cluster.mesh.data": 1, "cluster.mesh.fsdp": 4, "cluster.mesh.tensor": 2}),
    ],
)
def test_axes_that_a_recipe_fixes_can_become_one_again(recipe, fixed, tmp_path):
    got = planned(recipe, "8xh100", tmp_path, **fixed)
    meshes_of = [change for change in helpful_changes(got) if any("mesh" in key for key in change.keys)]
    best = fastest(got).forecast
    assert best.tokens_per_s > 1.01 * got.tokens_per_s
    changed = load_recipe(recipe, {"run.storage": str(tmp_path), **fixed, **meshes_of[0].keys})  # keys that train takes
    assert forecast(changed, got.target).mesh == meshes_of[0].forecast.mesh
    if got.recipe.training.remat == best.recipe.training.remat:
        assert meshes_of[0].forecast.mesh == best.mesh


def test_no_mesh_that_splits_products_is_proposed_where_a_step_takes_less_than_a_millisecond(tmp_path):
    got = planned("tiny", "8xh100", tmp_path)
    assert got.time.total < 1e-3
    assert any("a step of less than 1 ms takes longer than planned" in note for note in got.notes)
    proposed = [fastest(got), *helpful_changes(got)]
    assert all(change.forecast.mesh["tensor"] == change.forecast.mesh["context"] == 1 for change in proposed)
    assert not any("1 ms" in note for note in planned("gpt2-124m", "8xh100", tmp_path).notes)


def test_a_small_steps_kinds_are_no_zeros_and_a_long_change_keeps_its_indent(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(capsys, monkeypatch, "tiny", "--on", "v6e:16x16", f"run.storage={tmp_path}", "cluster.mesh.tensor=2")
    assert re.search(r"products +[0-9.]+ (µs|ns)", text)
    assert " 0.0 ms" not in text
    assert "0.0 s each" not in text
    assert "32 rows = 128 × 1 accumulated, 96 of them padding" in " ".join(text.split())
    changes = text.partition("changes that would help most\n")[2].partition("note:")[0]
    assert "cluster.mesh.tensor=1" in changes
    assert all(line.startswith("  ") for line in changes.splitlines() if line.strip())


def test_a_few_tokens_for_each_parameter_are_not_none(tmp_path, capsys, monkeypatch):
    words = ["gpt2-124m", "--on", "h200", f"run.storage={tmp_path}"]
    assert "4,915,200 tokens, 0.039 tokens per parameter" in run(capsys, monkeypatch, *words, "training.steps=10")
    assert "2,369.9 tokens per parameter" in " ".join(run(capsys, monkeypatch, *words).split())


def test_trials_that_start_from_a_run_are_planned_to_their_end(tmp_path, capsys, monkeypatch):
    words = ["tiny", "--on", "h200", f"run.storage={tmp_path}", "optimizer.learning_rate=log:0.01..0.08"]
    assert json.loads(run(capsys, monkeypatch, *words, "--json"))["to_the_end"] == 1
    assert json.loads(run(capsys, monkeypatch, *words, "run.start_from=before", "--json"))["to_the_end"] == 4


def test_several_values_of_a_key_are_planned_as_a_sweep(tmp_path, capsys, monkeypatch):
    words = ["modern-124m", "--on", "h200", "--price", "3", f"run.storage={tmp_path}", "training.steps=200"]
    rates = "optimizer.learning_rate=0.01,0.02,0.04,0.08"
    told = json.loads(run(capsys, monkeypatch, *words, rates, "--json"))
    one = json.loads(run(capsys, monkeypatch, *words, "--json"))
    assert (told["trials"], told["to_the_end"]) == (4, 1)
    assert told["grid_tokens"] == 4 * one["tokens"]
    assert told["tokens"] == pytest.approx(0.475 * told["grid_tokens"])
    # 4 trunks and forks, 2 of each, 1 to the end: 13 starts, and 0.475 of the grid's steps
    steps = 0.475 * 4 * 200 * one["step_s"]["total"]
    assert told["run_s"] > 13 * 15 + steps
    assert told["cost"] == pytest.approx(3 * told["run_s"] / 3600)
    assert told["target"] == "1 × h200"
    assert any("is not prepared" in note for note in told["notes"])
    text = run(capsys, monkeypatch, *words, rates)
    assert "47.5% of the whole grid's" in text
    assert " min on 1 × h200, " in text


def test_a_sweeps_plan_says_whether_it_fits_and_what_its_workers_would_leave_idle(tmp_path, capsys, monkeypatch):
    words = ["modern-1.5b", f"run.storage={tmp_path}", "training.steps=200", "schedule.warmup_steps=0"]
    words += ["model.layers=2,24", "cluster.mesh.fsdp=1", "cluster.mesh.data=-1", "--on", "8xt4"]
    got = json.loads(run(capsys, monkeypatch, *words, "--json"))
    assert not got["fits"]
    assert re.match(r"layers-24 does not fit: [0-9.]+ GiB of 13\.5 GiB on each device$", got["notes"][0])
    idle = "cluster.workers: 1 would use 1 of the 8 devices; train with cluster.workers=8"
    assert got["notes"].count(idle) == 1
    assert f"note: {idle}" in run(capsys, monkeypatch, *words)
    assert json.loads(run(capsys, monkeypatch, *words[:-1], "8xh200", "--json"))["fits"]


def test_the_fastest_plan_fits_and_no_other_mesh_is_faster(tmp_path):
    start = planned("modern-1.5b", "8xa100-40", tmp_path)
    best = fastest(start)
    assert best.forecast.fits
    assert best.forecast.tokens_per_s >= start.tokens_per_s
    others = [change for change in helpful_changes(best.forecast) if change.is_same_run and "engine" not in change.keys]
    assert not [change for change in others if change.forecast.tokens_per_s > 1.01 * best.forecast.tokens_per_s]


@pytest.mark.parametrize("on", ["2xh200", "here"])
def test_any_context_can_be_searched_on_gpus_and_on_the_cores_of_a_cpu(on, tmp_path, monkeypatch):
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", list)
    monkeypatch.setattr("raygpt.planning.target.cores", lambda: 2)
    start = planned("tiny", on, tmp_path, **{"model.context": 64})  # no multiple of 128, which a context axis needs
    best = fastest(start)
    assert prod(best.forecast.mesh.values()) == 2
    assert best.forecast.mesh["context"] == 1


def test_a_search_without_a_possible_mesh_is_refused(tmp_path):
    start = planned("tiny", "2xh200", tmp_path)
    wrong = start.recipe.model_copy(update={"engine": "none"})
    with pytest.raises(RaygptError, match="--find: no mesh of 2 × h200 goes with the other keys of this recipe"):
        fastest(replace(start, original=wrong))


def test_a_search_in_which_nothing_fits_is_refused(tmp_path):
    start = planned("gpt2-124m", "t4", tmp_path, **{"model.width": 12288, "model.heads": 96, "model.layers": 96})
    with pytest.raises(RaygptError, match="--find: no mesh and no recomputation fits on 1 × t4, the least needs"):
        fastest(start)


def test_a_corpus_that_is_not_prepared_is_assumed_and_said(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 44_000)
    got = planned("gpt2-124m", "h200", tmp_path, **{"data.source": str(text), "data.val": 0.1, "data.split": "tail"})
    assert (got.corpus.train_tokens, got.corpus.val_tokens) == (9_000, 1_000)
    assert got.corpus.assumed[0].endswith("a vocabulary of 50,257 and 10,000 tokens by its size are assumed")


@pytest.mark.parametrize("changes", [{}, {"data.limit": 10}, {"data.source": "wikitext:/nope/here.txt"}])
def test_a_text_that_is_not_there_is_refused(tmp_path, changes):
    with pytest.raises(RaygptError, match="no text at '/nope"):
        planned("tiny", "here", tmp_path, **{"data.source": "/nope.txt"} | changes)
    with pytest.raises(RaygptError, match="no text at '/nope"):
        planned("tiny", "here", tmp_path, **{"data.source": "hf:a/b", "data.val": "/nope.txt"})
    with pytest.raises(RaygptError, match="no text at 'nope"):
        planned("tiny", "h200", tmp_path, **{"data.source": "nope.txt"})


@pytest.mark.parametrize("source", ["/nope.txt", "wikitext:/nope.txt"])
def test_an_absolute_path_may_be_one_of_another_machine(tmp_path, source):
    line = "/nope.txt is not on this machine; the nodes that train have to find it there"
    assert line in planned("tiny", "8xh100", tmp_path, **{"data.source": source}).notes


@pytest.mark.parametrize("source", ["hf:owner/name", "wikitext-103"])
def test_a_text_that_is_elsewhere_is_assumed(tmp_path, source):
    assert planned("gpt2-124m", "h200", tmp_path, **{"data.source": source}).corpus.train_tokens is None


def test_a_prepared_corpus_is_found_beside_the_runs(tmp_path):
    prepared_store(tmp_path)
    got = planned("tiny", "h200", tmp_path)
    assert (got.corpus.vocab, got.corpus.train_tokens, got.corpus.val_tokens) == (4000, 900_000, 50_000)
    assert not got.corpus.assumed


def test_a_sweeps_trials_have_the_stores_beside_the_sweep(tmp_path):
    prepared_store(tmp_path)
    sweep = tmp_path / "tiny-sweep"
    sweep.mkdir()
    (sweep / "trials.json").write_text("{}")
    assert not planned("tiny", "h200", sweep).corpus.assumed


def test_a_plan_is_made_where_the_runs_storage_cannot_be_reached(tmp_path, monkeypatch):
    def unreached(uri):
        asked.append(uri)
        raise RaygptError(f"{uri} cannot be reached")

    asked = []
    for name in ("exists", "folders"):
        monkeypatch.setattr(storage, name, unreached)
    line = "prepared texts and scaling laws in run.storage are left out: s3://b/runs/trials.json cannot be reached"
    assert line in planned("tiny", "h200", "s3://b/runs").notes
    assert len(asked) == 1  # each attempt takes seconds
    assert read_laws("s3://b/runs").unreadable == (
        "scaling laws in run.storage are left out: s3://b/runs cannot be reached",
    )


def prepared_store(tmp_path):
    """A store of the standard library, and the settings that it was made with."""
    extents = {"train": (Extent("train-0", 0, 900_000),), "val": (Extent("val-0", 0, 50_000),)}
    folder = tmp_path / "stores" / "stdlib-1"
    folder.mkdir(parents=True)
    Index("f", "stdlib", "t", 4000, 3999, "<u2", 10, 3_000_000, **extents).write(str(folder))
    made = {"limit": None, "column": "text", "val": 0.05, "split": "documents", "split_seed": 2357}
    made["tokenizer"] = "bpe:4096"
    (folder / "plan.json").write_text(json.dumps(made))


@pytest.mark.parametrize(
    "changes",
    [
        {"data.limit": 10},
        {"data.val": 0.1},
        {"data.split": "tail"},
        {"data.split_seed": 1},
        {"data.tokenizer": "bpe:50000"},
        {"data.tokenizer": "char"},
        {"data.dedup": "exact"},
    ],
)
def test_a_store_that_was_made_with_other_settings_is_not_the_corpus(tmp_path, changes):
    prepared_store(tmp_path)
    assert not planned("tiny", "h200", tmp_path).corpus.assumed
    assert planned("tiny", "h200", tmp_path, **changes).corpus.assumed


def test_a_damaged_store_of_another_text_is_left_out_with_a_note(tmp_path):
    prepared_store(tmp_path)
    (tmp_path / "stores" / "other-1").mkdir()
    (tmp_path / "stores" / "other-1" / "index.json").write_text("{")
    got = planned("tiny", "h200", tmp_path)
    assert got.corpus.train_tokens == 900_000
    [note] = got.corpus.assumed
    assert "other-1/index.json is damaged" in note
    texts = [{"source": source, "weight": 1} for source in ("stdlib", "wikitext-103")]
    two = planned("tiny", "h200", tmp_path, **{"data.source": texts})
    assert sum("other-1/index.json is damaged" in note for note in two.corpus.assumed) == 1


def test_more_workers_than_a_target_has_room_for_are_said(tmp_path):
    line = "cluster.workers: 8 has no room on 2 × h100, which takes 2; the plan is for 2: write cluster.workers=2, or"
    assert any(line in note for note in planned("gpt2-124m", "2xh100", tmp_path, **{"cluster.workers": 8}).notes)
    assert planned("gpt2-124m", "2xh100", tmp_path, **{"cluster.workers": "2..8"}).missing is None
    assert planned("gpt2-124m", "8xh100", tmp_path, **{"cluster.workers": 8}).missing is None


def test_devices_with_which_an_elastic_run_cannot_fill_its_mesh_are_said(tmp_path):
    got = planned("gpt2-124m", "8xh100", tmp_path, **{"cluster.workers": "2..7", "cluster.mesh.fsdp": 2})
    assert got.unused == ("cluster.workers: 2..7 would use 6 of the 8 devices; train with cluster.workers=8")


def test_a_plan_with_a_part_of_a_gpu_says_whose_time_it_is(tmp_path):
    part = planned("gpt2-124m", "h200", tmp_path, **{"cluster.resources_per_worker": {"GPU": 0.5}})
    whole = planned("gpt2-124m", "h200", tmp_path)
    assert [note for note in part.notes if note not in whole.notes] == [SHARED]
    assert part.split.micro_rows < whole.split.micro_rows


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cluster.accelerator": "cpu"}, "cluster: accelerator cpu is other hardware than 8 × h100; write"),
        (
            {"cluster.topology": "4x4", "cluster.accelerator_type": "TPU-V6E"},
            "cluster: accelerator_type TPU-V6E, topology 4x4 is other hardware than 8 × h100; write "
            "cluster.accelerator_type=null cluster.topology=null",
        ),
    ],
)
def test_a_recipe_for_other_hardware_is_said_and_find_writes_one_for_the_target(tmp_path, changes, line):
    got = planned("tiny", "8xh100", tmp_path, **changes)
    assert any(line in note for note in got.notes)
    best = fastest(got)
    assert not any("other hardware" in note for note in best.forecast.notes)
    found = load_recipe(best.write(str(tmp_path / "found.yaml"))).cluster
    assert (found.accelerator in ("auto", "gpu"), found.accelerator_type, found.topology) == (True, None, None)


def test_workers_without_a_place_are_refused_before_anything_is_printed(tmp_path, capsys, monkeypatch):
    words = ["tiny", "--on", "h200", f"run.storage={tmp_path}", "cluster.resources_per_worker={CPU: 0, GPU: 0}"]
    got = told(capsys, monkeypatch, *words)
    assert got.out == ""
    assert "error: cluster.resources_per_worker: with nothing a worker has no place" in got.err


def test_every_validation_of_a_run_takes_time(tmp_path):
    got = planned("tiny", "h200", tmp_path, **{"training.steps": 180, "training.eval_every": 100})
    step, each = got.time.total, got.evaluation_s
    assert got.run_s == pytest.approx(60 + 180 * step + 3 * each)  # before the first step, after 100 and after the last
    assert got.seconds(54, 100) == pytest.approx(46 * step + each)
    assert got.seconds(100, 180) == pytest.approx(80 * step + each)
    assert planned("tiny", "h200", tmp_path, **{"training.eval_every": 90}).seconds(0, 180) > 3 * each


def test_a_validation_takes_no_more_windows_than_there_are(tmp_path):
    got = planned("tiny", "h200", tmp_path)
    windows = got.corpus.val_tokens // 128
    assert replace(got, recipe=with_eval_rows(got.recipe, windows)).evaluation_s == got.evaluation_s
    assert replace(got, recipe=with_eval_rows(got.recipe, 10 * windows)).evaluation_s == got.evaluation_s
    assert replace(got, recipe=with_eval_rows(got.recipe, 1)).evaluation_s == pytest.approx(got.evaluation_s / windows)


def with_eval_rows(recipe, rows):
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"eval_rows": rows})})


@pytest.mark.parametrize(("count", "sizes"), [(12, {1, 2, 3, 4, 6}), (16, {1, 2, 4, 8}), (1, {1})])
def test_a_search_tries_each_tensor_axis_within_a_node(count, sizes):
    every = list(meshes(load_recipe("gpt2-124m"), count))
    assert {mesh["tensor"] for mesh in every} == sizes
    assert all(prod(mesh.values()) == count for mesh in every)


def test_epochs_of_an_unknown_corpus_are_refused(tmp_path):
    with pytest.raises(RaygptError, match=r"training.epochs: 2: its corpus is not prepared.*write training.steps=N"):
        planned(
            "gpt2-124m",
            "h200",
            tmp_path,
            **{"data.source": "tinystories", "training.epochs": 2, "schedule.warmup_steps": 0},
        )


@pytest.mark.parametrize(
    "changes", [{"training.eval_every": "epoch"}, {"training.steps": None, "training.epochs": 2}, {}]
)
def test_a_text_shorter_than_a_window_is_refused(tmp_path, changes):
    text = tmp_path / "text.txt"
    text.write_text("ab")
    with pytest.raises(
        RaygptError, match=r"^data\.source: has fewer tokens than a window of 129; set model\.context lower"
    ):
        planned("tiny", "h200", tmp_path, **{"data.source": str(text), "data.tokenizer": "bytes", **changes})


def test_epochs_stay_epochs_in_the_recipe_that_find_writes(tmp_path):
    lengths = {"training.steps": None, "training.epochs": 2, "training.eval_every": "epoch"}
    prepared_store(tmp_path)
    got = planned("tiny", "h200", tmp_path, **lengths)
    found = load_recipe(fastest(got).write(str(tmp_path / "found.yaml"))).training
    assert (found.steps, found.epochs, found.eval_every) == (None, 2, "epoch")
    double = next(change for change in helpful_changes(got) if "training.batch_tokens" in change.keys)
    assert "training.steps" not in double.keys  # epochs stay what they are
    assert double.forecast.recipe.steps == pytest.approx(got.recipe.steps / 2, abs=1)


def test_a_sweep_in_epochs_of_an_unknown_corpus_is_refused_too(tmp_path, capsys, monkeypatch):
    words = ["gpt2-124m-wikitext103", "optimizer.learning_rate=1e-4,2e-4", "--on", "h200", f"run.storage={tmp_path}"]
    assert "its length is unknown; write" in " ".join(told(capsys, monkeypatch, *words).err.split())


def test_a_recipe_for_cpus_leaves_this_machines_gpus_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", lambda: ["NVIDIA H200, 143771"])
    assert planned("tiny", "here", tmp_path).target.device.name == "h200"
    assert planned("tiny", "here", tmp_path, **{"cluster.accelerator": "cpu"}).target.device.name == "cpu"
    assert planned("tiny", "h100", tmp_path, **{"cluster.accelerator": "cpu"}).target.device.name == "h100"


@pytest.mark.parametrize(
    ("changes", "write"),
    [
        ({"training.steps": 10, "training.eval_every": "epoch"}, "training.eval_every=N"),
        ({"training.checkpoint_every": "epoch"}, "training.checkpoint_every=N"),
        ({"training.epochs": 2, "training.eval_every": "epoch"}, "training.steps=N training.eval_every=N"),
    ],
)
def test_the_keys_to_write_for_epochs_of_an_unknown_corpus_are_those_in_epochs(tmp_path, changes, write):
    with pytest.raises(RaygptError, match=f"its length is unknown; write {write}$"):
        planned("gpt2-124m", "h200", tmp_path, **{"data.source": "tinystories", "schedule.warmup_steps": 0}, **changes)


def test_a_mesh_that_does_not_divide_is_refused(tmp_path):
    line = r"cluster\.mesh: data=3 does not multiply to the 8 devices there are; .* or name other devices by --on$"
    with pytest.raises(RaygptError, match=line):
        planned("gpt2-124m", "8xh100", tmp_path, **{"cluster.mesh": {"data": 3}})


def test_the_command_prints_80_columns_or_json(tmp_path, capsys, monkeypatch):
    words = ("gpt2-124m", f"run.storage={tmp_path}", "--on", "8xh100", "--price", "2.5")
    monkeypatch.setenv("COLUMNS", "80")
    text = run(capsys, monkeypatch, *words, "--svg", str(tmp_path / "plan.svg"))
    assert "memory of each device" in text
    assert "per device-hour" in text
    assert "changes that would help most" in text
    assert (tmp_path / "plan.svg").read_text().count("<rect") >= 8
    figures = json.loads(run(capsys, monkeypatch, *words, "--json"))
    assert figures["target"] == "8 × h100"
    assert figures["memory"]["total"] < figures["memory"]["limit"]
    assert len(figures["changes"]) <= 3
    of_losses = {"training.batch_tokens", "model.context"}
    assert figures["changes"]
    assert all(change["same_run"] != bool(change["keys"].keys() & of_losses) for change in figures["changes"])


def test_find_writes_a_recipe_that_loads_and_uses_all_devices(tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "found.yaml"
    words = ("modern-350m", f"run.storage={tmp_path}", "--on", "4xl4")
    note = "cluster.workers: 1 would use 1 of the 4 devices; train with cluster.workers=4"
    assert note in run(capsys, monkeypatch, *words)
    assert "would use" not in run(capsys, monkeypatch, *words, "--find", "--out", str(file))
    found = load_recipe(str(file))
    assert found.training.accumulation
    assert found.cluster.workers == prod(found.cluster.mesh.sizes().values()) == 4
    assert forecast(found, parse_target("4xl4")).fits
    named = tmp_path / "RENAMED.yaml"  # a name is taken as it is
    run(capsys, monkeypatch, *words, "--find", "--out", str(named))
    assert named.is_file()


def test_find_says_that_the_workers_environment_is_not_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "--on", "h200", "--find", "--out", "found.yaml"]
    line = "found.yaml has no cluster.runtime_env, which may contain secrets; give it again to raygpt train"
    assert line in told(capsys, monkeypatch, *words, "cluster.runtime_env={env_vars: {KEY: secret}}").err
    assert "secret" not in (tmp_path / "found.yaml").read_text()
    assert "runtime_env" not in told(capsys, monkeypatch, *words).err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--find", "--out", ""], "--out: is empty; write the file's name, or leave the option out"),
        (["--svg", ""], "--svg: is empty; write the file's name, or leave the option out"),
        (["--out", "mine.yaml"], "--out: is where --find writes the recipe; add --find, or leave --out out"),
        (["--price", "inf"], "--price inf: is no price; write what a device costs for an hour, e.g. --price 2.5"),
        (["--price", "-1"], "--price -1: is no price; write what a device costs for an hour, e.g. --price 2.5"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(words, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"error: {line}\n" in told(capsys, monkeypatch, "tiny", "--on", "h200", *words).err
    assert not list(tmp_path.iterdir())


def test_the_largest_target_is_searched_within_seconds(tmp_path):
    start = planned("tiny", "390*v6e:16x16", tmp_path)
    began = time.monotonic()
    assert list(meshes(start.recipe, start.target.count))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("words", [[], ["optimizer.learning_rate=0.01,0.02"]])
def test_a_plan_imports_neither_an_engine_nor_ray(words):
    words = ["plan", "gpt2-124m", "--on", "h200", *words]
    code = (
        f"import sys; from raygpt.cli import app; app({words}, standalone_mode=False);"
        "sys.exit(' '.join({'ray', 'jax', 'torch'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("on", "size", "gb"),
    [
        ("v6e:16x16", 64, 448),  # longer than a side: all links
        ("v6e:16x16", 16, 224),  # one dimension's
        ("v6e:4x4", 16, 224),  # sides whose ends are not connected
        ("v6e:4x4", 4, 112),
        ("v5p:4x4x4", 16, 600),
        ("8xh100", 8, 450),
    ],
)
def test_an_axis_has_the_links_of_the_sides_of_a_slice_that_it_needs(on, size, gb):
    assert _link(parse_target(on), size) == gb * 1e9


def test_between_slices_a_chip_sends_only_its_part(tmp_path):
    """Sums along data, 8 here, are made inside each slice first; then two chips, one of each slice, exchange what they
    have of the sum: of a quarter each sends a half."""
    changes = {"cluster.mesh": {"data": -1, "fsdp": 64}, "training.batch_tokens": 1024 * 1024}
    one, two = (planned("modern-1.5b", on, tmp_path, **changes) for on in ("v6e:16x16", "2*v6e:16x16"))
    sent = [
        exchange(plan.recipe, plan.description, plan.target, plan.mesh, 0.0, 1, plan.devices.number_bytes)
        for plan in (one, two)
    ]
    along_data = sent_bytes(two.recipe, two.description, two.mesh, 0.0, 1, two.devices.number_bytes)["data"]
    whole = along_data / (7 / 8)  # each of 8 sends the parts of the others
    assert sent[1] - sent[0] == pytest.approx(whole / 4 / 2 / 12.5e9)
