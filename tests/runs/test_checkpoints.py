"""Which checkpoints of a run are whole, and which are kept."""

import json
import math

import pytest

from raygpt import storage
from raygpt.config import Run
from raygpt.errors import RaygptError, StorageError
from raygpt.runs import checkpoints


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint of a file every 10 steps, and their validation losses."""

    def make(losses):
        for number, loss in enumerate(losses, start=1):
            part = checkpoints.parts_folder(str(tmp_path)) / "0"
            part.mkdir(parents=True)
            (part / "state").write_text(f"state {number}")
            folder = checkpoints.folder_of(str(tmp_path), number * 10)
            checkpoints.commit(folder, number * 10, {"engine": "jax"}, checkpoints.publish(part, folder))
            if loss is not None:
                checkpoints.write_val_loss(str(tmp_path), number * 10, loss)
        return str(tmp_path)

    return make


def left(folder, **policy):
    checkpoints.prune(folder, Run(**policy), upto=1000)
    return list(checkpoints.folders(folder))


def test_the_newest_are_kept_with_the_best_and_the_permanent_ones(run):
    folder = run([5.0, 3.0, 4.0, 3.5, 3.6, 3.7, 3.8])
    assert left(folder, keep=2, keep_best=2, keep_every=30) == [20, 30, 40, 60, 70]


@pytest.mark.parametrize(
    ("losses", "policy", "steps"),
    [
        ([1.0, 2.0, 3.0, 4.0], {"keep": 1, "keep_best": 0}, [40]),
        ([1.0, 2.0, 3.0, 4.0], {"keep": 1, "keep_best": 1}, [10, 40]),
        ([2.0, 2.0, 3.0, 4.0], {"keep": 1, "keep_best": 1}, [20, 40]),  # of two equals the newer
        ([None, None, None, None], {"keep": 2, "keep_best": 1}, [30, 40]),  # without losses there is no best
        ([None, 9.0, None, None], {"keep": 1, "keep_best": 1}, [20, 40]),
        ([math.nan, 9.0, 8.0, 7.0], {"keep": 1, "keep_best": 2}, [30, 40]),  # a model that fell apart is not the best
        ([1.0, 2.0], {"keep": 3, "keep_best": 0}, [10, 20]),
    ],
)
def test_the_newest_the_best_and_every_nth_are_kept_as_the_recipe_says(run, losses, policy, steps):
    assert left(run(losses), **policy) == steps


def test_the_best_has_the_lowest_loss_and_is_the_newest_of_equals():
    losses = {10: 2.0, 20: 1.5, 30: 1.5, 40: None, 50: math.nan, 60: 1.0, 70: math.inf}
    assert checkpoints.best_first([10, 20, 30, 40, 50, 70, 80], losses) == [30, 20, 10, 70]
    assert checkpoints.best_first([40, 80], losses) == []


def test_checkpoints_are_listed_by_their_steps_not_by_their_names(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        checkpoints.commit(checkpoints.folder_of(str(tmp_path), step), step, {}, {})
    (tmp_path / "checkpoints" / "step-00000007").mkdir()
    (tmp_path / "checkpoints" / "step-00000009.orbax-checkpoint-tmp").mkdir()
    assert list(checkpoints.folders(str(tmp_path)).items()) == [
        (5, True),
        (7, False),
        (99_999_999, True),
        (100_000_000, True),
    ]
    assert checkpoints.find_newest(str(tmp_path)).step == 100_000_000


def test_what_is_left_of_a_deleted_one_is_never_taken_for_whole(run, monkeypatch):
    folder = run([1.0, 2.0])
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before it could delete
    checkpoints.prune(folder, Run(keep=1, keep_best=0), upto=1000)
    assert checkpoints.folders(folder) == {10: False, 20: True}


def test_the_losses_lie_beside_the_checkpoints_not_in_them(run, tmp_path):
    folder = run([5.0, 3.0])
    assert json.loads((tmp_path / "checkpoints" / "scores.json").read_text()) == {"10": 5.0, "20": 3.0}
    assert checkpoints.newest_intact(folder)[0].step == 20  # a score that comes later alters no checkpoint
    assert checkpoints.val_losses(folder) == {10: 5.0, 20: 3.0}


def test_a_checkpoint_is_found_by_its_step(run, tmp_path):
    folder = run([5.0, 3.0])
    assert checkpoints.find(folder, 10).step == 10
    assert checkpoints.find(folder, None).step == 20
    with pytest.raises(RaygptError, match="has no checkpoint of step 15; there are: 10, 20"):
        checkpoints.find(folder, 15)
    (tmp_path / "checkpoints" / "step-00000030").mkdir()
    with pytest.raises(RaygptError, match="the checkpoint of step 30 is unfinished; there are: 10, 20"):
        checkpoints.find(folder, 30)
    (tmp_path / "checkpoints" / "step-00000010" / "state").write_text("stale 1")
    with pytest.raises(RaygptError, match=r"the checkpoint of step 10 is damaged \(state was altered\)"):
        checkpoints.find(folder, 10)


@pytest.fixture
def remote(tmp_path, s3, monkeypatch):
    """A run on S3 with checkpoints of a file at these steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(*steps):
        run, part = f"{s3}/{tmp_path.name}", tmp_path / "part"
        for step in steps:
            storage.write_bytes(str(part / "state"), b"state")
            folder = checkpoints.folder_of(run, step)
            checkpoints.commit(folder, step, {"engine": "jax"}, checkpoints.publish(part, folder))
        return run

    return make


def test_a_checkpoint_that_is_read_on_a_node_is_not_evicted_by_another(remote, tmp_path):
    run = remote(10, 20, 30)
    one, two, three = (checkpoints.find(run, step) for step in (10, 20, 30))
    with checkpoints.fetched_to_node(one) as first, checkpoints.fetched_to_node(two) as second:
        assert {storage.read_bytes(f"{folder}/state") for folder in (first, second)} == {b"state"}
    with checkpoints.fetched_to_node(three) as third:
        assert [str(path.parent) for path in (tmp_path / "cache").rglob("state")] == [third]


def test_a_storage_that_cannot_be_reached_is_no_damage(remote, monkeypatch):
    monkeypatch.setattr(checkpoints, "PAUSES_S", ())
    run = remote(10)

    def fail(uri, path):
        raise StorageError(f"{uri} cannot be reached")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "download", fail)
        with pytest.raises(StorageError, match="cannot be reached"):
            checkpoints.newest_intact(run)
    assert checkpoints.newest_intact(run)[0].step == 10
