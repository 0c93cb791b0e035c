"""Training on a corpus that Ray Data is still tokenising: the same run as on one that was prepared first."""

import json
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from raygpt.corpus import pipeline, prepare
from raygpt.corpus.feed import val_windows
from raygpt.corpus.growing import GrowingStream
from raygpt.corpus.mixture import growing_text
from raygpt.corpus.store import is_complete
from raygpt.engines.jax.engine import JaxEngine
from raygpt.errors import RaygptError, TransientError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.training.events import StepLogged
from raygpt.training.ray import launch

UNITS = 4
BATCH = 5 * 16  # tokens; a unit has some 2,000, so 25 batches


@pytest.fixture
def home(ray_cluster, tmp_path, monkeypatch):
    """Four files to train on, each a unit of its own, and one to validate on."""
    monkeypatch.setattr(prepare, "part_bytes", lambda source: 1)
    (tmp_path / "texts").mkdir()
    for number in range(UNITS):
        text = "".join(f"file {number} has a line {line % 9}\n" for line in range(100))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "own.txt").write_text("a text to validate on\n" * 20)
    return tmp_path


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Nothing but validation and the first unit is tokenised before this file is there."""
    path = tmp_path / "gate"
    real, waits_for = pipeline._tokenise, str(path)

    def tokenise(row, **options):  # a closure, because Ray sends it by value: its workers cannot import this file
        while row["unit"] in range(1, UNITS) and not Path(waits_for).exists():
            time.sleep(0.02)
        return real(row, **options)

    monkeypatch.setattr(pipeline, "_tokenise", tokenise)
    return path


def recipe(home, name, steps, **changes):
    small = {
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
        "data": {"source": str(home / "texts"), "val": str(home / "own.txt"), "tokenizer": "bytes"},
        "data.order": "sequential",
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "training": {"batch_tokens": BATCH, "log_every": 1, "eval_every": 10, "checkpoint_every": 20, "steps": steps},
        "cluster.workers": 2,
        "run": {"storage": str(home / "runs"), "name": name},
    }
    return load_recipe("gpt2-tiny", {**small, **changes})


def store_of(home):
    (folder,) = (home / "runs" / "stores").iterdir()
    return str(folder)


def losses(result):
    lines = [json.loads(line) for line in Path(result.path, "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): line[key] for line in lines for key in ("loss", "val_loss") if key in line}


def train(recipe, watch=lambda event: None):
    return launch.train(launch.prepare_run(recipe), watch)


def trained_while_tokenised(home, gate, steps):
    """A run that begins before its corpus is tokenised, and the corpus that it says it trained on."""
    run = launch.prepare_run(recipe(home, "streamed", steps))
    assert run.totals.train_tokens is None
    assert dict(run.totals.lines())["corpus"] == "tokenised while it trains, 441 to validate"
    was_whole, waits = [], []

    def watch(event):
        if isinstance(event, StepLogged):
            waits.append(event.values["data_wait_s"])
            if event.step == 25:
                was_whole.append(is_complete(store_of(home)))
                gate.touch()

    streamed = launch.train(run, watch)
    assert streamed.error is None
    assert was_whole == [False]
    assert max(waits) > 0.02  # for the second unit, which batch 25 needs
    marker = json.loads(Path(checkpoints.folder_of(streamed.path, steps), "checkpoint.json").read_text())
    assert marker["data"] == [run.corpus.stores[0].index.fingerprint]
    return streamed, marker["data"]


def on_whole_store(home, data, *settings, **changes):
    """A run on the same corpus after it was tokenised; preparing it finishes the store if training did not need it."""
    whole = launch.prepare_run(recipe(home, *settings, **changes))
    assert is_complete(store_of(home))
    assert whole.totals.train_tokens == len(whole.corpus.stores[0].train)
    assert data == [whole.corpus.stores[0].index.fingerprint]
    return whole


@pytest.mark.extended
def test_training_begins_before_the_corpus_is_tokenised_and_is_what_it_would_have_been(home, gate):
    _, data = trained_while_tokenised(home, gate, 30)
    whole = on_whole_store(home, data, "streamed", 35, **{"cluster.workers": 1})
    resumed, expected = losses(launch.train(whole)), losses_of_one_device(whole)
    assert sorted(resumed) == sorted(expected)
    assert resumed == pytest.approx(expected, rel=1e-4)


@pytest.mark.extended
def test_a_run_on_a_growing_store_has_the_bits_of_one_on_a_whole_store(home, gate):
    streamed, data = trained_while_tokenised(home, gate, 40)
    expected = losses(launch.train(on_whole_store(home, data, "whole", 45)))
    assert {key: loss for key, loss in expected.items() if key[0] <= 40} == losses(streamed)
    assert losses(train(recipe(home, "streamed", 45))) == expected  # resumed on the store that is whole by now


def losses_of_one_device(run):
    """Of the same recipe in a plain loop over its whole corpus."""
    engine = JaxEngine(run.recipe, run.corpus.tokenizer.vocab, devices=jax.devices()[:1])
    context, rows, training = run.recipe.model.context, run.recipe.rows, run.recipe.training
    feed = run.corpus.feed(context=context, batch_rows=rows, order="sequential", seed=training.seed)
    state, found = engine.start(), {}
    for step in range(training.steps + 1):
        if step:
            state, metrics = engine.step(state, engine.put(feed.rows(step - 1)))
            found[step, "loss"] = engine.read(metrics)["loss"]
        if step % 10 == 0 or step == training.steps:
            scores = [
                engine.window_losses(state, some) for some in val_windows([run.corpus.stores[0].val], context, rows)
            ]
            found[step, "val_loss"] = float(np.concatenate(scores).mean())
    return found


@pytest.mark.slow
def test_a_prepare_that_fails_while_training_runs_ends_the_run_with_its_reason(home, gate):
    bad = home / "texts" / "2.txt"
    bad.write_bytes(bad.read_bytes() + b"\xff")
    result = train(recipe(home, "broken", 80), lambda event: gate.touch() if isinstance(event, StepLogged) else None)
    assert isinstance(result.error, RaygptError)
    assert str(result.error).startswith(f"{bad}: invalid UTF-8 at byte ")
    assert "\n" not in str(result.error)


def test_a_prepare_that_fails_at_once_is_refused_before_workers_start(home):
    (home / "own.txt").write_bytes(b"\xff")
    with pytest.raises(RaygptError, match=r"own\.txt: invalid UTF-8 at byte 0"):
        launch.prepare_run(recipe(home, "refused", 5))
    assert not (home / "runs" / "refused").exists()


@pytest.mark.slow
def test_training_that_ends_first_ends_prepare_which_the_next_run_continues(home, monkeypatch):
    job, folder = growing_text(recipe(home, "any", 5).data, str(home / "stores"))
    first, seen = threading.Event(), []

    def watch(progress):
        seen.append(progress)
        first.set()
        background._stopped.wait()  # no second part before it is stopped

    background = prepare.Background(job, folder, watch)
    first.wait()
    background.stop()
    assert not is_complete(folder)
    assert len(seen) == 1
    with pytest.raises(TransientError, match="training ended first"):  # nobody waits for it any longer
        GrowingStream(folder).wait(10**9)
    store = prepare.run(job, folder)
    assert len(store.train) == sum(path.stat().st_size + 1 for path in (home / "texts").iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"data.order": "shuffled"},
        {"data.val": 0.1},
        {"cluster.workers": 4},  # all of the cluster's CPUs
    ],
)
def test_a_corpus_that_cannot_grow_is_prepared_first(home, changes):
    run = launch.prepare_run(recipe(home, "first", 5, **changes))
    assert run.corpus.growing is None
    assert is_complete(store_of(home))


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 5, "eval_every": "epoch"}])
def test_epochs_of_a_corpus_that_grows_are_refused_with_what_to_write(home, length):
    with pytest.raises(RaygptError) as caught:
        launch.prepare_run(recipe(home, "epochs", None, training={"batch_tokens": BATCH, **length}))
    asked = "training.epochs: 2" if "epochs" in length else "training.eval_every: epoch"
    assert str(caught.value) == (
        f"{asked} needs the whole corpus, but data.order: sequential trains while it is still being tokenised; "
        "give training.steps, eval_every and checkpoint_every in steps, or write data.order: shuffled"
    )
    assert not (home / "runs").exists()
