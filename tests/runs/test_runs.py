"""A run directory opened for reading: which checkpoint is picked, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raygpt.runs
from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.errors import RaygptError, StorageError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints, open_run


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 10, 20 and 30, the one of 20 the best; 40 is unfinished; 15 was scored and deleted."""
    folder = tmp_path / "runs" / "mine"
    storage.write_bytes(str(folder / "recipe.yaml"), load_recipe("tiny", {"run.name": "mine"}).to_yaml().encode())
    tokenizers.save(tokenizers.Bytes(), str(folder))
    lines = [{"step": 10, "loss": 3.0}, {"step": 10, "val_loss": 2.5}, {"step": 20, "loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    for step, loss in ((10, 2.5), (15, 1.0), (20, 2.0), (30, 2.25)):
        where, part = checkpoints.folder_of(str(folder), step), tmp_path / "part"
        if step != 15:
            storage.write_bytes(str(part / "deep" / "weights.bin"), b"weights of %d" % step)
            checkpoints.commit(where, step, {"engine": "jax"}, checkpoints.publish(part, where))
        checkpoints.write_val_loss(str(folder), step, loss)
    storage.write_bytes(storage.join(checkpoints.folder_of(str(folder), 40), "weights.bin"), b"half")
    (folder / "checkpoints" / "step-00000050.orbax-checkpoint-tmp").mkdir()
    return folder


def test_a_run_says_what_is_in_it(run):
    opened = open_run(f"{run}/")
    assert (opened.name, opened.home) == ("mine", str(run.parent))
    assert opened.recipe.run.name == "mine"
    assert opened.tokenizer.vocab == 257
    assert [line["step"] for line in opened.metrics] == [10, 10, 20]
    assert opened.steps == [10, 20, 30]
    assert opened.val_losses == {10: 2.5, 15: 1.0, 20: 2.0, 30: 2.25}


def test_the_best_is_picked_or_the_newest_or_the_one_that_is_named(run):
    opened = open_run(str(run))
    assert opened.pick().step == 20
    assert opened.pick(best=False).step == 30
    assert opened.pick(10).folder == checkpoints.folder_of(str(run), 10)
    assert checkpoints.facts(opened.pick(10))["engine"] == "jax"


def test_of_equal_losses_the_newest_is_picked(run):
    (run / "checkpoints" / "scores.json").write_text('{"10": 2.0, "20": 2.0, "30": NaN}')
    assert open_run(str(run)).pick().step == 20


def test_without_scores_the_newest_is_picked(run):
    (run / "checkpoints" / "scores.json").write_text('{"10": null}')
    assert open_run(str(run)).pick().step == 30


def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(run):
    (run / "checkpoints" / "step-00000020" / "deep" / "weights.bin").write_bytes(b"weights of 21")
    opened = open_run(str(run))
    assert opened.pick().step == 30  # the next best
    with pytest.raises(RaygptError, match=r"step 20 is damaged \(deep/weights.bin was altered\)"):
        opened.pick(20)


def test_a_checkpoint_that_cannot_be_fetched_is_not_taken_for_damaged(run, monkeypatch):
    def unreachable(run_folder, step):
        raise StorageError("s3://bucket does not answer")

    monkeypatch.setattr(checkpoints, "find", unreachable)
    with pytest.raises(StorageError, match="does not answer"):
        open_run(str(run)).pick()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (40, "the checkpoint of step 40 is unfinished; there are: 10, 20, 30"),
        (15, "has no checkpoint of step 15; there are: 10, 20, 30"),
        (50, "has no checkpoint of step 50; there are: 10, 20, 30"),
    ],
)
def test_a_step_that_is_not_whole_is_refused_with_those_that_are(run, step, message):
    with pytest.raises(RaygptError, match=message):
        open_run(str(run)).pick(step)


def test_a_run_without_a_whole_checkpoint_is_refused(run):
    for step in (10, 20, 30):
        (run / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").unlink()
    with pytest.raises(RaygptError) as caught:
        open_run(str(run)).pick()
    assert str(caught.value) == (
        f"{run} has no complete checkpoint (unfinished or damaged: 10, 20, 30, 40); train it further: raygpt train"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("runs", "name one of the runs in it, e.g. runs/mine"),
        ("runs/mine/checkpoints/step-00000010", "it is a checkpoint: write runs/mine --step 10"),
    ],
)
def test_a_folder_beside_a_run_is_refused_with_what_was_meant(run, monkeypatch, name, remedy):
    home = run.parent / "home"
    (home / "runs").mkdir(parents=True)
    run.rename(home / "runs" / "mine")
    monkeypatch.chdir(home)
    with pytest.raises(RaygptError) as caught:
        open_run(name)
    assert str(caught.value) == f"{name} is no run, it has no recipe.yaml; {remedy}"


@pytest.mark.parametrize("name", ["nowhere", "mine/checkpoints"])
def test_a_folder_that_is_no_run_is_refused(run, monkeypatch, name):
    monkeypatch.chdir(run.parent)
    with pytest.raises(RaygptError) as caught:
        open_run(name)
    assert str(caught.value) == (
        f"{name} is no run, it has no recipe.yaml; name a folder that raygpt train made; `raygpt runs` lists those in "
        "runs/"
    )


def test_a_run_on_s3_is_fetched_once_and_checked(run, s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = f"{s3}/runs/mine"
    for path in run.rglob("*"):
        if path.is_file():
            storage.write_bytes(f"{there}/{path.relative_to(run).as_posix()}", path.read_bytes())
    opened = open_run(there)
    assert opened.recipe == open_run(str(run)).recipe
    assert (opened.tokenizer.vocab, len(opened.metrics)) == (257, 3)
    assert (opened.steps, opened.pick().step) == ([10, 20, 30], 20)
    with checkpoints.fetched_to_node(opened.pick()) as folder:
        assert storage.read_bytes(f"{folder}/deep/weights.bin") == b"weights of 20"
    with checkpoints.fetched_to_node(opened.pick()) as again:
        assert again == folder
    storage.write_bytes(f"{there}/checkpoints/step-00000030/deep/weights.bin", b"weights of 31")
    with pytest.raises(RaygptError, match="step 30 is damaged"):
        opened.pick(30)
    assert opened.pick(best=False).step == 20
    with pytest.raises(RaygptError, match=r"is no run, it has no recipe\.yaml"):
        open_run(f"{s3}/runs/other")


MODULES = sorted(path.stem for path in Path(raygpt.runs.__file__).parent.glob("*.py") if path.stem != "__init__")


def test_the_format_of_a_run_imports_neither_ray_nor_an_engine_nor_the_rooms_that_use_it():
    rooms = [f"raygpt.{name}" for name in ("training", "inference", "evaluation", "show", "interop", "engines")]
    code = f"import sys, {', '.join(f'raygpt.runs.{name}' for name in MODULES)}\n"
    code += f"sys.exit(' '.join({{'ray', 'jax', 'torch', *{rooms}}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
