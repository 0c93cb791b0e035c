"""The loop's checkpoints on storage that fails, and those that are damaged."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_loop import FakeEngine, jax_engine, make_engine, make_spec, of, run, steps_of, texts_of  # noqa: F401

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.errors import RaygptError, StorageError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.testing.session import LocalSession
from raygpt.training.events import CheckpointSaved, Finished, Resumed, StepLogged, Warned
from raygpt.training.loop import Loop
from raygpt.training.saving import Saving

# Saves that fail


class Unsaved(FakeEngine):
    """Cannot write the states of some steps."""

    def __init__(self, steps):
        super().__init__()
        self._bad = steps

    def save(self, state, folder):
        super().save(state, folder)
        self._state = state

    def wait_for_save(self):
        if self._state in self._bad:
            raise ValueError('RESOURCE_EXHAUSTED: Error writing "/runs/x/_sharding": No space left on device [code 28]')


def test_a_save_that_fails_costs_a_warning_and_no_older_checkpoint(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 2})
    events = run(spec, Unsaved([4, 6]))
    assert steps_of(events, CheckpointSaved) == [2, 8, 10]
    warnings = texts_of(events, Warned)
    assert len(warnings) == 2
    assert warnings[0].startswith("the checkpoint of step 4 could not be saved (No space left on device); training")
    assert checkpoints.newest_intact(spec.run_folder) == (checkpoints.find(spec.run_folder, 10), [])
    assert not list(checkpoints.parts_folder(spec.run_folder).glob("*"))[2:]  # at most what the two left


def test_what_a_failed_save_wrote_is_gone_before_the_next_one_needs_its_room(make_spec):
    class Looks(FakeEngine):
        def save(self, state, folder):
            super().save(state, folder)
            beside.append(sorted(Path(spec.run_folder, "checkpoints").glob("step-*")))

    def fail_to_commit(folder, step, *rest):
        if step in (4, 6):
            raise StorageError("No space left on device")
        return commit(folder, step, *rest)

    beside, commit = [], checkpoints.commit
    spec = make_spec(**{"training.checkpoint_every": 2, "run.keep": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "commit", fail_to_commit)
        run(spec, Looks())
    assert [[path.name for path in folders] for folders in beside] == [[], *[["step-00000002"]] * 3, ["step-00000008"]]


def test_a_last_save_that_ends_while_it_is_asked_for_is_not_made_again(make_spec, monkeypatch):
    spec, newest = make_spec(**{"training.checkpoint_every": 100, "run.keep": 1}), Saving._newest_after_waiting
    told = []

    def not_yet(saving):
        """At first that there is none, and then the save ends."""
        told.append(newest(saving) if told else 0)
        saving._thread.join()
        return told[-1]

    monkeypatch.setattr(Saving, "_newest_after_waiting", not_yet)
    events = run(spec, FakeEngine())
    assert told == [0, 10]
    assert steps_of(events, CheckpointSaved) == [10]


def test_several_saves_that_fail_in_a_row_end_the_run(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 2, "run.failed_saves": 2})
    with pytest.raises(
        RaygptError, match=r"step 6 could not be saved .* 2 times in a row; .* run the same command again"
    ):
        run(spec, Unsaved([4, 6]))
    assert checkpoints.newest_intact(spec.run_folder)[0].step == 2


def test_the_last_save_is_tried_again(make_spec, monkeypatch):
    monkeypatch.setattr("raygpt.training.saving.RETRY_PAUSE_S", 0)
    failing = [10, 10]

    class Recovers(FakeEngine):
        def wait_for_save(self):
            if self.last in failing:
                failing.pop()
                raise OSError(5, "Input/output error")

        def save(self, state, folder):
            super().save(state, folder)
            self.last = state

    spec = make_spec(**{"training.checkpoint_every": 5})
    events = run(spec, Recovers())
    assert len(of(events, Warned)) == 2
    assert checkpoints.newest_intact(spec.run_folder)[0].step == 10


def test_validation_losses_that_cannot_be_read_cost_warnings_and_no_checkpoint(make_spec, monkeypatch):
    monkeypatch.setattr(storage, "REREAD_S", (0.0, 0.0))
    spec = make_spec(**{"training.checkpoint_every": 2, "run.keep": 1, "run.keep_best": 0})
    storage.write_bytes(storage.join(spec.run_folder, "checkpoints", "scores.json"), b'{"0": 5.545177444219589,')
    events = run(spec, FakeEngine())
    assert steps_of(events, Finished) == [10]
    assert steps_of(events, CheckpointSaved) == [2, 4, 6, 8, 10]
    assert list(checkpoints.folders(spec.run_folder)) == [
        2,
        4,
        6,
        8,
        10,
    ]  # which is the best is not known: all are kept
    warnings = texts_of(events, Warned)
    assert any(text.startswith("the validation loss of step 4 could not be kept") for text in warnings)
    assert all("scores.json is damaged" in text for text in warnings)


# Disks and object stores that fail


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MB; what it gives remounts it with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size=8m,{options}", "tmpfs", folder], capture_output=True
        )

    if os.getuid() or shutil.which("mount") is None or mount("rw").returncode:
        pytest.skip("only root may mount a disk")
    yield folder, lambda options: mount(f"remount,{options}").check_returncode()
    subprocess.run(["umount", folder], check=True)


def struck(engine, happens):
    """An engine before some of whose steps something happens, when no save is going on."""
    step, numbers = engine.step, itertools.count(1)

    def strike(state, batch):
        number = next(numbers)
        if number in happens:
            settle()
            happens[number]()
        return step(state, batch)

    engine.step = strike
    return engine


def settle():
    """Until no save is going on."""
    for thread in threading.enumerate():
        if thread.name.startswith("save-"):
            thread.join()


def there(spec):
    """The newest whole checkpoint, by every checksum, and what is wrong with later ones."""
    found, warnings = checkpoints.newest_intact(spec.run_folder)
    return found.step, warnings


def on(folder, spec):
    """The same spec, its run in another place."""
    tokenizers.save(spec.tokenizer, str(folder))
    return replace(spec, run_folder=str(folder))


def fill(folder):
    """As much as there is room for."""
    with contextlib.suppress(OSError), Path(folder, "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


EVERY_SECOND = {"training.checkpoint_every": 2, "training.eval_every": 100, "run.keep": 1, "run.keep_best": 0}


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_disk_that_is_full_for_a_while_costs_warnings(make_spec, make_engine, disk, name):
    folder, _ = disk
    spec, seen = on(folder, make_spec(engine=name, **EVERY_SECOND)), []
    happens = {4: lambda: fill(folder), 8: lambda: (seen.append(there(spec)), (folder / "full").unlink())}
    events = run(spec, struck(make_engine(spec), happens))
    assert seen == [(2, [])]
    said = saves_that_failed(events)
    assert [step for step, _ in said] == [4, 6]
    assert all("No space left on device" in text for _, text in said)
    assert there(spec) == (10, [])


def test_a_disk_that_stays_full_ends_the_run_with_the_checkpoint_before(make_spec, disk):
    folder, _ = disk
    spec = on(folder, make_spec(**EVERY_SECOND, **{"run.failed_saves": 3}))
    engine = struck(FakeEngine(), {4: lambda: fill(folder), 7: lambda: None, 9: lambda: None})
    with pytest.raises(RaygptError, match=r"step 8 could not be saved \(.*No space left.* 3 times in a row"):
        run(spec, engine)
    assert len(engine.batches) < 10
    assert there(spec) == (2, [])


def test_a_disk_that_is_read_only_for_a_while_costs_warnings(make_spec, disk):
    folder, remount = disk
    spec, seen = on(folder, make_spec(**EVERY_SECOND)), []
    happens = {4: lambda: remount("ro"), 8: lambda: (seen.append(there(spec)), remount("rw"))}
    events = run(spec, struck(FakeEngine(), happens))
    assert seen == [(2, [])]
    said = saves_that_failed(events)
    assert [step for step, _ in said] == [4, 6]
    assert all("Read-only file system" in text for _, text in said)
    assert there(spec) == (10, [])


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_for_a_while_costs_warnings(make_spec):
    spec, seen = make_spec(**EVERY_SECOND), []
    folder = Path(spec.run_folder, "checkpoints")
    happens = {4: lambda: folder.chmod(0o500), 8: lambda: (seen.append(there(spec)), folder.chmod(0o700))}
    events = run(spec, struck(FakeEngine(), happens))
    assert seen == [(2, [])]
    assert [step for step, _ in saves_that_failed(events)] == [4, 6]
    assert there(spec) == (10, [])


def saves_that_failed(events):
    """(step, what was said of it)"""
    told = texts_of(events, Warned)
    found = (
        re.match(r"the checkpoint of step (\d+) could not be saved \((.*)\); training continues", text) for text in told
    )
    return [(int(match[1]), match[2]) for match in found if match]


def test_an_upload_that_fails_twice_is_tried_again_and_nothing_is_said(make_spec, s3, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "PAUSES_S", (0, 0, 0))
    spec = on(f"{s3}/twice", make_spec(**{**EVERY_SECOND, "training.checkpoint_every": 5, "run.keep": 2}))
    tries, real = [], storage._upload

    def upload(path, uri):
        tries.append(uri)
        if uri.endswith("/state") and tries.count(uri) < 3:
            raise StorageError(f"{uri} cannot be reached (503 Slow Down)")
        real(path, uri)

    monkeypatch.setattr(storage, "_upload", upload)
    events = run(spec, FakeEngine())
    assert steps_of(events, CheckpointSaved) == [5, 10]
    assert not texts_of(events, Warned)
    assert [tries.count(f"{checkpoints.folder_of(spec.run_folder, step)}/state") for step in (5, 10)] == [3, 3]
    assert there(spec) == (10, [])


def test_the_last_step_waits_for_the_save_before_it_and_is_not_called_left_out(make_spec, monkeypatch):
    spec, real = make_spec(**EVERY_SECOND), storage.move_file

    def move(path, uri):
        if "step-00000008" in uri:
            monkeypatch.setattr("raygpt.training.saving.PATIENCE_S", 0.05)
            time.sleep(1)
        real(path, uri)

    monkeypatch.setattr(storage, "move_file", move)
    events = run(spec, FakeEngine())
    assert not texts_of(events, Warned)
    assert steps_of(events, CheckpointSaved) == [2, 4, 6, 8, 10]


def test_an_upload_that_blocks_holds_up_no_step_and_the_next_save_is_left_out(make_spec, monkeypatch):
    spec, let_go, real = make_spec(**EVERY_SECOND), threading.Event(), storage.move_file

    def move(path, uri):
        if "step-00000004" in uri:
            monkeypatch.setattr("raygpt.training.saving.PATIENCE_S", 0.05)
            let_go.wait(60)
        real(path, uri)

    class Watched(FakeEngine):
        def step(self, state, batch):
            if state + 1 == 9:
                seen.append(there(spec))
                let_go.set()
                settle()
            return super().step(state, batch)

    seen = []
    monkeypatch.setattr(storage, "move_file", move)
    events = run(spec, Watched())
    assert seen == [(2, [])]
    said = texts_of(events, Warned)
    assert said == [
        f"the checkpoint of step {step} is skipped: the one before it is still being written" for step in (6, 8)
    ]
    assert steps_of(events, CheckpointSaved) == [2, 4, 10]
    assert there(spec) == (10, [])


def test_a_rank_deletes_what_its_own_saves_have_left_and_nobody_elses(make_spec):
    spec = make_spec()
    parts = checkpoints.parts_folder(spec.run_folder)
    ours = {"step-00000002-1", "step-00000002-1.orbax-checkpoint-tmp", "step-00000002-1.orbax-checkpoint-tmp-10"}
    theirs = {"step-00000002-10", "step-00000002-11.tmp", "step-00000001-0", "step-00000002-0.orbax-checkpoint-tmp-1"}
    for name in ours | theirs:
        Path(parts, name).mkdir(parents=True)
    engine = FakeEngine()
    saving = Saving(spec, engine, LocalSession(rank=1, workers=20), lambda step, metrics: None)
    assert saving.begin(5, 5, 5)
    settle()
    assert {path.name for path in parts.iterdir()} == theirs
    assert (Path(checkpoints.folder_of(spec.run_folder, 5)) / "state").read_text() == "5"


# Checkpoints that are damaged


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: Path(folder, "state").unlink(), "state is missing"),
        (lambda folder: Path(folder, "state").write_text(""), "state was altered"),  # cut off
        (lambda folder: Path(folder, "state").write_text("9"), "state was altered"),
        (lambda folder: Path(folder, "checkpoint.json").write_text('{"step": 8'), "checkpoint.json cannot be read"),
    ],
    ids=["missing", "truncated", "altered", "marker"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_for_the_one_before(make_spec, damage, reason):
    spec = make_spec(**{"training.checkpoint_every": 4, "training.steps": 8})
    run(spec, FakeEngine())
    damage(checkpoints.folder_of(spec.run_folder, 8))
    longer = replace(spec, recipe=load_recipe("gpt2-tiny", {**spec.recipe.to_dict(), "training.steps": 10}))
    engine = FakeEngine()
    events = run(longer, engine)
    warnings = texts_of(events, Warned)
    assert warnings == [f"checkpoint of step 8 is damaged ({reason}); the one before it is used"]
    assert steps_of(events, Resumed) == [4]
    assert len(engine.batches) == 6
    np.testing.assert_array_equal(engine.batches[0], spec.feed.rows(4, [0, 1, 2, 3]))
    assert [checkpoints.find(spec.run_folder, step).step for step in (8, 10)] == [8, 10]  # step 8's is whole again


def test_a_checkpoint_counts_when_the_steps_up_to_it_are_logged(make_spec):
    class Slow(LocalSession):
        def record(self, metrics):
            time.sleep(0.3 if isinstance(metrics, StepLogged) else 0)
            super().record(metrics)

    spec, session = make_spec(**{"training.checkpoint_every": 5, "training.log_every": 1}), Slow()
    Loop(spec, FakeEngine(), session).run()
    said = [(type(event), event.step) for event in of(session.events, StepLogged | CheckpointSaved)]
    assert said.index((CheckpointSaved, 5)) > said.index((StepLogged, 5))
    assert said.index((CheckpointSaved, 10)) > said.index((StepLogged, 10))


def test_a_worker_whose_disk_does_not_answer_costs_a_save_and_not_all_that_follow(make_spec, monkeypatch):
    monkeypatch.setattr("raygpt.training.saving.SAVE_TIMEOUT_S", 0.2)
    spec, session = make_spec(), LocalSession(workers=2)  # the other never tells
    saving = Saving(spec, FakeEngine(), session, lambda step, metrics: None)
    assert saving.begin(4, 4, 4)
    settle()
    assert saving.begin(6, 6, 6)
    settle()
    said = texts_of(session.events, Warned)
    assert [text.partition(" could")[0] for text in said] == [f"the checkpoint of step {step}" for step in (4, 6)]
    assert "not all workers have written their part" in said[0]
