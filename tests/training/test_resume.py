"""A run goes on with the text that it was trained on, or says so."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from raygpt.config import Cluster
from raygpt.corpus import tokenizers
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints, records
from raygpt.training import prepared
from raygpt.training.events import Warned
from raygpt.training.prepared import Prepared
from raygpt.training.ray import launch
from raygpt.training.ray.scaling import Workers
from raygpt.training.resume import changed_rate, check, check_fork, check_text, fork


@pytest.fixture
def run_folder(tmp_path):
    """With a checkpoint of step 10, trained on two stores."""
    folder = checkpoints.folder_of(str(tmp_path), 10)
    checkpoints.commit(folder, 10, {"tokenizer": "bytes-1", "data": ["aa", "bb"]}, {})
    return str(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "data", "what"),
    [
        ("bytes-1", ["aa", "cc"], "its text"),
        ("bytes-1", ["bb", "aa"], "its text"),
        ("bytes-2", ["aa", "bb"], "its tokenizer"),
    ],
)
def test_a_text_that_changed_under_its_name_is_refused_unless_forced(run_folder, tokenizer, data, what):
    with pytest.raises(RaygptError, match=f"{what} is not what it was trained on up to step 10; .* --force"):
        check_text(run_folder, 10, tokenizer, data, force=False)
    check_text(run_folder, 10, tokenizer, data, force=True)


@pytest.mark.parametrize(
    ("after", "tokenizer", "data", "is_refused"),
    [
        (10, "bytes-1", ["aa", "bb"], False),  # what it was trained on
        (10, "bytes-2", ["cc"], True),
        (0, "bytes-2", ["cc"], False),  # begun anew: nothing was trained on anything
    ],
)
def test_the_same_text_and_a_new_run_are_not(run_folder, after, tokenizer, data, is_refused):
    refused = None
    try:
        check_text(run_folder, after, tokenizer, data, force=False)
    except RaygptError as error:
        refused = str(error)
    assert (refused is not None) == is_refused, refused


def schedule(kind, steps, warmup=20):
    return load_recipe("gpt2-tiny", {"schedule.kind": kind, "schedule.warmup_steps": warmup, "training.steps": steps})


@pytest.mark.parametrize(
    ("kind", "after", "steps", "moves"),
    [
        ("cosine", 200, 400, ("0.10", "0.59")),  # 0.1 + 0.9 · (1 + cos(π · 180/380)) / 2 = 0.587
        ("linear", 200, 400, ("0.10", "0.57")),  # 1 - 0.9 · 180/380 = 0.574
        ("linear", 110, 400, ("0.55", "0.79")),  # 1 - 0.9 · 90/180, and 90/380 of the way
        ("wsd", 200, 400, ("0.10", "1.00")),
        ("wsd", 180, 400, ("0.55", "1.00")),  # 20 of the 40 steps in which it falls
        ("wsd", 160, 400, None),  # it has not fallen yet
        ("constant", 200, 400, None),
        ("cosine", 10, 400, None),  # still rising
        ("cosine", 200, 200, None),
    ],
)
def test_a_length_that_moves_the_learning_rate_at_once_is_said(tmp_path, kind, after, steps, moves):
    folder, before = checkpoints.folder_of(str(tmp_path), after), schedule(kind, 200)
    checkpoints.commit(folder, after, {"recipe": before.to_dict()}, {})
    said = changed_rate(str(tmp_path), after, schedule(kind, steps))
    if moves is None:
        assert said is None
    else:
        assert f"{steps} instead of 200 stretch the {kind} schedule" in said
        assert "from {} to {} of its highest".format(*moves) in said


def test_another_schedule_that_moves_the_learning_rate_at_once_is_said(tmp_path):
    folder = checkpoints.folder_of(str(tmp_path), 150)
    checkpoints.commit(folder, 150, {"recipe": schedule("cosine", 200).to_dict()}, {})
    said = changed_rate(str(tmp_path), 150, schedule("constant", 200))
    assert said.startswith("schedule: a changed one replaces the cosine schedule, and the learning rate goes at once")


def test_a_recipe_that_was_shortened_for_a_try_goes_on_with_its_own_length_and_warm_up(tmp_path):
    folder = str(tmp_path)
    short, whole = load_recipe("gpt2-tiny", {"training.steps": 12}), load_recipe("gpt2-tiny")
    assert short.schedule.warmup_steps < whole.schedule.warmup_steps == 20
    (tmp_path / "recipe.yaml").write_text(short.to_yaml())
    checkpoints.commit(checkpoints.folder_of(folder, 12), 12, {"recipe": short.to_dict()}, {})
    assert check(folder, whole, force=False) == 12
    assert "from 0.10 to 0.62 of its highest" in changed_rate(folder, 12, whole)  # 13/21: the warm-up goes on
    same_length = load_recipe("gpt2-tiny", {"training.steps": 12, "schedule.warmup_steps": 5})
    with pytest.raises(RaygptError, match=r"another recipe \(schedule\.warmup_steps: 1 → 5\)"):
        check(folder, same_length, force=False)


def test_a_new_run_has_no_rate_to_change(tmp_path):
    assert changed_rate(str(tmp_path), 0, schedule("cosine", 400)) is None


@pytest.fixture
def train(monkeypatch):
    """launch.train of a recipe without Ray; `seen` gets its events, and "the run" where the workers would start."""

    def train(folder, recipe, after, seen):
        corpus = SimpleNamespace(tokenizer=tokenizers.Bytes(), stores=(), close=lambda: None)
        plan = SimpleNamespace(run_folder=folder, steps=recipe.steps, vocab=257)
        monkeypatch.setattr(launch, "fit", lambda *asked, **keys: seen.append("the run"))
        launch.train(Prepared(recipe, recipe, corpus, plan, None, after, None, {}), seen.append)

    for name, instead in {
        "on_cluster": lambda recipe: contextlib.nullcontext(),
        "open_mailbox": lambda: None,
        "request_memory": lambda workers, recipe, vocab: workers,
        "choose_workers": lambda *asked: Workers(Cluster(), "cpu"),
        "stoppable": lambda *asked: contextlib.nullcontext(lambda: None),
        "Trainer": lambda *asked, **keys: None,
    }.items():
        monkeypatch.setattr(launch, name, instead)
    return train


def test_whoever_watches_is_warned_before_the_run_goes_on(tmp_path, train):
    folder, longer, seen = str(tmp_path), schedule("cosine", 400), []
    checkpoints.commit(checkpoints.folder_of(folder, 200), 200, {"recipe": schedule("cosine", 200).to_dict()}, {})
    train(folder, longer, 200, seen)
    assert seen == [Warned(changed_rate(folder, 200, longer)), "the run"]


def test_a_checkpoint_whose_marker_is_damaged_is_passed_over_for_the_one_before(run_folder):
    newest = checkpoints.folder_of(run_folder, 20)
    checkpoints.commit(newest, 20, {"tokenizer": "bytes-1", "data": ["aa", "bb"]}, {})
    recipe = load_recipe("gpt2-tiny", {"training.steps": 30})
    Path(run_folder, "recipe.yaml").write_text(recipe.to_yaml())
    assert check(run_folder, recipe, force=False) == 20
    Path(newest, "checkpoint.json").write_text('{"step": 20, "fil')
    assert check(run_folder, recipe, force=False) == 10


def test_a_run_that_has_taken_no_step_is_begun_anew_with_another_recipe(tmp_path, train):
    folder, before = str(tmp_path), load_recipe("tiny", {"training.seed": 1})
    (tmp_path / "recipe.yaml").write_text(before.to_yaml())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 8.3}\n{"step": 10, "val_loss": 8.2}\n')  # a fork's
    records.keep_sample(folder, 0, "of the first model")
    checkpoints.write_val_loss(folder, 0, 8.3)
    corrected = load_recipe("tiny", {"training.seed": 2})
    assert check(folder, corrected, force=False) == 0
    (tmp_path / "recipe.yaml").write_text("of: another version")
    assert check(folder, corrected, force=False) == 0
    train(folder, corrected, 0, [])
    assert not (tmp_path / "metrics.jsonl").exists()  # or the new run would count as restarted
    assert not records.read_samples(folder)
    assert not checkpoints.is_evaluated(folder, 0)  # or the new model would not be
    assert load_recipe(tmp_path / "recipe.yaml") == corrected
    (tmp_path / "recipe.yaml").write_text(before.to_yaml())
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 5.1}\n')
    with pytest.raises(RaygptError, match="is a run of another recipe"):  # no checkpoint, but a run to look at
        check(folder, corrected, force=False)


def test_a_taken_name_is_refused_with_the_next_free_one(tmp_path):
    changed = load_recipe("tiny", {"training.seed": 2})
    for name, offered in (("mine", "mine-2"), ("mine-2", "mine-3"), ("mine-3", "mine-4")):
        checkpoints.commit(checkpoints.folder_of(str(tmp_path / name), 10), 10, {}, {})
        (tmp_path / name / "recipe.yaml").write_text(load_recipe("tiny").to_yaml())
        with pytest.raises(RaygptError) as refused:
            check(str(tmp_path / name), changed, force=False)
        assert str(refused.value) == (
            f"{tmp_path}/{name} is a run of another recipe (training.seed: 1337 → 2); write run.name={offered} to "
            "begin a new one, or add --force to go on with this one all the same"
        )
    with pytest.raises(RaygptError, match=r"write run\.name=mine-4 to begin"):
        check(str(tmp_path / "mine"), changed, force=False)


def test_a_start_from_that_is_no_run_is_refused_before_the_corpus_is_prepared(tmp_path):
    recipe = load_recipe("gpt2-tiny", {"run.start_from": "gone", "run.storage": str(tmp_path)})
    with pytest.raises(RaygptError, match="there is no run 'gone'"):
        prepared.check(recipe)


@pytest.mark.parametrize("name", ["a@b/runs/tiny", "a@b/runs/tiny@10"])
def test_a_start_from_may_have_an_at_in_its_path(tmp_path, name):
    folder = tmp_path / "a@b" / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(load_recipe("gpt2-tiny").to_yaml())
    check_fork(load_recipe("gpt2-tiny", {"run.start_from": f"{tmp_path}/{name}"}), str(tmp_path))


@pytest.mark.parametrize("name", ["tiny@", "tiny@best"])
def test_a_start_from_with_something_else_for_a_step_is_refused(tmp_path, name):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "recipe.yaml").write_text(load_recipe("gpt2-tiny").to_yaml())
    with pytest.raises(RaygptError, match=f"there is no run '{name}' in .* and @STEP after it for one of its steps"):
        check_fork(load_recipe("gpt2-tiny", {"run.start_from": name}), str(tmp_path))


def saved_run(storage, **model):
    """The facts of a run at step 10 that has a model with these keys, and no arrays."""
    recipe = load_recipe("gpt2-tiny", {"model": model})
    (storage / "before").mkdir()
    (storage / "before" / "recipe.yaml").write_text(recipe.to_yaml())
    folder = checkpoints.folder_of(str(storage / "before"), 10)
    checkpoints.commit(folder, 10, {"recipe": recipe.to_dict(), "tokenizer": "bytes-1", "data": []}, {})


def further(**model):
    return load_recipe("gpt2-tiny", {"model": model, "run.start_from": "before"})


# A size that follows from others, where it is null. gpt2-tiny has 4 heads and a width of 128.
DERIVED = {"kv_heads": 4, "hidden": 512, "head_size": 32}


@pytest.mark.parametrize("key", DERIVED)
def test_a_run_starts_from_one_whose_sizes_are_the_same_though_written_in_another_way(tmp_path, key):
    saved_run(tmp_path, **{key: DERIVED[key]})
    assert fork(further(), str(tmp_path), "bytes-1").step == 10
    assert fork(further(**DERIVED), str(tmp_path), "bytes-1").step == 10
    half = {key: DERIVED[key] // 2}
    with pytest.raises(RaygptError, match=rf"another model \(model\.{key}: None → {half[key]}\); write the same"):
        fork(further(**half), str(tmp_path), "bytes-1")


def test_what_a_run_began_from_may_be_gone_when_it_goes_on(tmp_path):
    recipe = load_recipe("gpt2-tiny", {"run.start_from": "gone"})
    assert fork(recipe, str(tmp_path), "bytes-1", after=10) is None
    with pytest.raises(RaygptError, match="there is no run 'gone'"):
        fork(recipe, str(tmp_path), "bytes-1")
