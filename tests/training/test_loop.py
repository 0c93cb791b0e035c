"""The loop in this process: what it tells, what it trains on, and that nothing is lost between its threads."""

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
from types import SimpleNamespace

import numpy as np
import pytest

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.feed import Feed, val_windows
from raygpt.corpus.nanogpt import open_nanogpt
from raygpt.errors import RaygptError, StorageError
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.testing.session import LocalSession
from raygpt.training.events import (
    CheckpointSaved,
    Finished,
    Resumed,
    Sampled,
    Started,
    StepLogged,
    Stopped,
    Validated,
    Warned,
)
from raygpt.training.loop import Loop
from raygpt.training.saving import Saving
from raygpt.training.session import Orders
from raygpt.training.task import Task

CONTEXT, ROWS, VOCAB = 16, 4, 257
PATTERN = np.frombuffer(b"the cat sat on the mat; ", dtype=np.uint8)  # 24 tokens: no window is like the next


@pytest.fixture
def make_task(tmp_path_factory):
    """A task on a text that repeats itself, with a validation part of 10 windows and a rest."""

    def make(feed=None, **changes):
        store, run = (tmp_path_factory.mktemp(name) for name in ("store", "run"))
        np.resize(PATTERN, 2000).astype("<u2").tofile(store / "train.bin")
        np.resize(PATTERN[::-1], 10 * CONTEXT + 9).astype("<u2").tofile(store / "val.bin")
        opened = open_nanogpt(str(store), "bytes")
        tokenizers.save(opened.tokenizer, str(run))
        settings = {
            "model": {"layers": 1, "heads": 2, "width": 32, "context": CONTEXT},
            "optimizer.learning_rate": 0.01,
            "schedule.warmup_steps": 0,
            "training": {"batch_tokens": ROWS * CONTEXT, "steps": 10, "log_every": 3, "eval_every": 4},
        }
        recipe = load_recipe("gpt2-tiny", {**settings, **changes})
        feed = feed or Feed([opened.train], context=CONTEXT, batch_rows=ROWS, seed=recipe.training.seed)
        return Task(recipe, feed, (opened.val,), str(run))

    return make


class FakeEngine:
    """Computes nothing, in its own time, and notes what it is given. A step's metrics are the number of the step."""

    context, device_count = CONTEXT, 1

    def __init__(self, rows=(0, 1, 2, 3), step_s=0.0, micro_rows=4, losses=None, spikes=None):
        self.rows, self._step_s, self.micro_rows = list(rows), step_s, micro_rows
        self.batches, self.scored, self.graded = [], [], []
        self._losses, self._spikes = losses or {}, spikes or {}

    def start(self):
        return 0

    def restore(self, folder):
        return int(Path(folder, "state").read_text())

    def load(self, weights):
        return weights.step

    def save(self, state, folder):
        Path(folder).mkdir(parents=True)
        Path(folder, "state").write_text(str(state))

    def wait_for_save(self):
        pass

    def put(self, windows):
        return windows

    def step(self, state, batch):
        time.sleep(self._step_s)
        self.batches.append(batch)
        return state + 1, state + 1

    def read(self, metrics):
        loss = self._losses.get(metrics, float(metrics))
        return {"loss": loss, "grad_norm": 0.5, "lr": 0.1, "skipped": 0.0, "spikes": self._spikes.get(metrics, 0.0)}

    def window_losses(self, state, windows):
        self.scored.append(windows)
        return windows.mean(1) + state

    def token_logprobs(self, state, windows):
        """Every token is as likely as it is large, and the likeliest after it is itself where the state is even."""
        self.graded.append(windows)
        return -windows[:, 1:].astype(float), np.full(windows[:, 1:].shape, state % 2 == 0)

    def prefill(self, state, ids):
        return np.zeros((len(ids), VOCAB)), None

    def decode(self, state, ids, start, cache):
        return np.zeros((len(ids), VOCAB)), None

    def describe(self):
        return {"device": "cpu", "devices": "1"}


def run(task, engine, orders=()):
    """The events of a run: of the start, of train and of validation; others may come between."""
    session = LocalSession(queued_orders=list(orders))
    Loop(task, engine, session).run()
    return session.events


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def lines_of(events, kind):
    """As metrics.jsonl has them."""
    return [event.line() for event in of(events, kind)]


def steps_of(events, kind):
    return [event.step for event in of(events, kind)]


def texts_of(events, kind):
    return [event.text for event in of(events, kind)]


def kinds(events):
    """[("train", 3), ("val", 4), …]"""
    told = []
    for event in events:
        match event:
            case Started():
                told.append(("start", None))
            case StepLogged(step):
                told.append(("train", step))
            case Validated(step):
                told.append(("val", step))
    return told


# What it tells


def test_it_logs_and_validates_when_the_recipe_says_and_at_the_end(make_task):
    assert kinds(run(make_task(), FakeEngine())) == [
        ("start", None),
        ("val", 0),
        ("train", 3),
        ("val", 4),
        ("train", 6),
        ("val", 8),
        ("train", 9),
        ("train", 10),
        ("val", 10),
    ]


@pytest.mark.parametrize(("steps", "log_every", "eval_every"), [(1, 1, 1), (7, 1, 100), (6, 2, 3), (5, 100, 100)])
def test_every_logged_step_is_logged_once_and_in_order(make_task, steps, log_every, eval_every):
    training = {"steps": steps, "log_every": log_every, "eval_every": eval_every, "batch_tokens": ROWS * CONTEXT}
    events = run(make_task(training=training), FakeEngine())
    logged = lines_of(events, StepLogged)
    every = [step for step in range(1, steps + 1) if step % log_every == 0 or step == steps]
    assert [event["step"] for event in logged] == every
    assert [event["loss"] for event in logged] == every  # each with its own metrics
    validated = [0, *(step for step in range(1, steps + 1) if step % eval_every == 0 or step == steps)]
    assert steps_of(events, Validated) == validated


def test_a_log_event_has_loss_rate_norm_tokens_speed_and_wait_and_no_mfu_on_a_cpu(make_task):
    logged = lines_of(run(make_task(), FakeEngine()), StepLogged)
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_s"}
    assert [set(event) for event in logged] == [keys] * 4
    assert [event["tokens"] for event in logged] == [3 * 64, 6 * 64, 9 * 64, 10 * 64]


def test_on_a_known_device_a_log_event_has_mfu(make_task):
    class H200(FakeEngine):
        device_count = 2

        def describe(self):
            return {"device": "NVIDIA H200"}

    task = make_task()
    for event in lines_of(run(task, H200()), StepLogged):
        expected = event["tokens_per_s"] * describe(task.recipe.model, VOCAB).flops_per_token / (2 * 989e12)
        assert event["mfu"] == pytest.approx(expected)


def test_the_start_says_what_computes_and_every_validation_shows_a_sample(make_task):
    events = run(make_task(), FakeEngine())
    start = next(event for event in events if isinstance(event, Started))
    assert (start.about["device"], start.about["devices"]) == ("cpu", "1")
    assert steps_of(events, Sampled) == [0, 4, 8, 10]
    assert all(isinstance(text, str) and text for text in texts_of(events, Sampled))


def test_speed_is_that_of_the_steps_alone(make_task, monkeypatch):
    class Timed(FakeEngine):
        """On a clock of its own: a step takes 2 s, the first, which is compiled, 30, a validation's part 5."""

        now = 0.0

        def step(self, state, batch):
            logged.join()  # the thread that logs has seen the clock
            self.now += 2 if state else 30
            return super().step(state, batch)

        def window_losses(self, state, windows):
            self.now += 5
            return super().window_losses(state, windows)

    engine = Timed()
    monkeypatch.setattr(
        "raygpt.training.clock.time", SimpleNamespace(perf_counter=lambda: engine.now, sleep=time.sleep)
    )
    training = {"steps": 24, "log_every": 4, "eval_every": 12, "batch_tokens": ROWS * CONTEXT}
    session = LocalSession()
    loop = Loop(make_task(training=training), engine, session)
    logged = loop._log._waiting
    loop.run()
    speeds = [event["tokens_per_s"] for event in lines_of(session.events, StepLogged)]
    assert speeds == [ROWS * CONTEXT / 2] * 6


def test_what_was_waited_for_batches_is_logged_but_for_the_first_step(make_task, monkeypatch):
    monkeypatch.setattr("raygpt.training.loop.prefetch", lambda items, ahead: ((item, 0.25) for item in items))
    training = {"steps": 12, "log_every": 4, "eval_every": 100, "batch_tokens": ROWS * CONTEXT}
    events = run(make_task(training=training), FakeEngine())
    assert [event["data_wait_s"] for event in lines_of(events, StepLogged)] == [0.75, 1.0, 1.0]


# What it trains on and validates


def test_step_n_trains_on_the_engines_rows_of_batch_n_minus_1_each_once(make_task):
    task, engine = make_task(), FakeEngine(rows=[1, 3])
    run(task, engine)
    assert len(engine.batches) == 10
    for number, batch in enumerate(engine.batches):
        np.testing.assert_array_equal(batch, task.feed.rows(number, [1, 3]))


@pytest.mark.parametrize("micro_rows", [1, 4, 10, 100])
def test_validation_is_the_mean_over_all_windows_of_all_streams(make_task, micro_rows):
    task = make_task()
    task = Task(task.recipe, task.feed, task.val * 2, task.run_folder)
    engine = FakeEngine(micro_rows=micro_rows)
    first = lines_of(run(task, engine), Validated)[0]
    ids = np.resize(PATTERN[::-1], 10 * CONTEXT + 9)
    windows = np.stack([ids[n * CONTEXT : (n + 1) * CONTEXT + 1] for n in range(10)])
    assert first["val_loss"] == pytest.approx(windows.mean())
    scored = np.concatenate(engine.scored)
    np.testing.assert_array_equal(scored[:20], np.concatenate([windows, windows]))
    assert len(scored) == 4 * 20  # at 0, 4, 8 and 10
    assert max(map(len, engine.scored)) == min(micro_rows, 10)


def test_tasks_are_scored_with_each_validation(make_task):
    texts = [{"text": "ab c"}, {"text": "ab d"}]  # the word is " c" or " d": bytes 32 and 99, or 100
    task = replace(make_task(), eval_items={"lambada": texts})
    engine = FakeEngine()
    lines = [line for line in lines_of(run(task, engine), Validated) if "lambada_acc" in line]
    assert [line["step"] for line in lines] == [0, 4, 8, 10]
    assert all("val_loss" in line for line in lines)  # one line for both
    assert lines[0]["lambada_acc"] == 1.0
    assert lines[0]["lambada_perplexity"] == pytest.approx(np.exp(32 + 99.5))
    assert len(engine.graded) == 4
    np.testing.assert_array_equal(engine.graded[0], [[97, 98, 32, 99], [97, 98, 32, 100]])


@pytest.mark.parametrize(
    ("limit", "chosen"), [(1, [0]), (4, [0, 5, 10, 15]), (6, [0, 3, 6, 10, 13, 16]), (50, range(20))]
)
def test_a_part_of_the_validation_set_is_evenly_spread_and_always_the_same(make_task, limit, chosen):
    streams = make_task().val * 2
    every = np.concatenate(list(val_windows(streams, CONTEXT, 4)))
    for _ in range(2):
        np.testing.assert_array_equal(
            np.concatenate(list(val_windows(streams, CONTEXT, 3, limit))), every[list(chosen)]
        )


def test_the_recipe_says_how_many_windows_are_validated(make_task):
    engine = FakeEngine()
    run(make_task(**{"training.eval_rows": 3}), engine)
    assert [len(windows) for windows in engine.scored] == [3, 3, 3, 3]


def test_windows_of_a_stream_that_is_too_short_are_none(make_task):
    stream = make_task().val[0]
    assert list(val_windows([stream], len(stream), 4)) == []
    assert [len(windows) for windows in val_windows([stream], len(stream) - 1, 4)] == [1]


def test_a_feed_that_fails_in_its_thread_fails_the_run(make_task):
    class Broken:
        streams = ()

        def read_ahead(self, report):
            pass

        def rows(self, batch, rows):
            if batch == 5:
                raise RaygptError("the store is gone")
            return np.zeros((len(rows), CONTEXT + 1), np.int32)

    engine = FakeEngine()
    with pytest.raises(RaygptError, match="the store is gone"):
        run(make_task(Broken()), engine)
    assert len(engine.batches) == 5  # what was read before it is trained on


def test_metrics_that_cannot_be_read_fail_the_run(make_task):
    class Broken(FakeEngine):
        def read(self, metrics):
            if metrics > 1:
                raise RuntimeError("the device is gone")
            return super().read(metrics)

    with pytest.raises(RuntimeError, match="the device is gone"):
        run(make_task(), Broken())


# Numbers that are none


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_ends_the_run_and_leaves_the_checkpoints_before_it(make_task, bad):
    task = make_task(**{"training.checkpoint_every": 2})
    losses = dict.fromkeys(range(6, 11), bad)  # as it goes: what is not a number stays so
    with pytest.raises(RaygptError, match=r"not a number any more at step 6 .*on_nan: skip"):
        run(task, FakeEngine(losses=losses))
    found, warnings = checkpoints.newest_intact(task.run_folder)
    assert (found.step, warnings) == (4, [])


def test_a_bad_step_that_is_not_logged_is_found_before_its_checkpoint_counts(make_task):
    task = make_task(**{"training.checkpoint_every": 5, "training.log_every": 100, "training.eval_every": 100})
    with pytest.raises(RaygptError, match="at step 5 "):
        run(task, FakeEngine(losses={5: float("nan")}))
    assert checkpoints.newest_intact(task.run_folder)[0] is None


@pytest.mark.parametrize(("skipped", "ends"), [(0.0, True), (1.0, False)])
def test_a_gradient_that_overflows_ends_the_run_unless_its_step_was_left_out_as_in_fp16(make_task, skipped, ends):
    class Overflowing(FakeEngine):
        def read(self, metrics):
            said = super().read(metrics)
            return {**said, "grad_norm": float("inf"), "skipped": skipped} if metrics == 6 else said

    expected = pytest.raises(RaygptError, match="at step 6 ") if ends else contextlib.nullcontext()
    with expected:
        run(make_task(), Overflowing())


def test_bad_steps_that_the_engine_leaves_out_do_not_end_the_run(make_task):
    events = run(make_task(**{"training.on_nan": "skip"}), FakeEngine(losses={6: float("nan")}))
    assert kinds(events)[-1] == ("val", 10)


@pytest.mark.parametrize(("policy", "warns", "ends"), [("warn", True, False), ("stop", False, True)])
def test_a_spike_is_told_of_or_ends_the_run(make_task, policy, warns, ends):
    engine = FakeEngine(spikes=dict.fromkeys(range(5, 11), 2.0))
    expected = (
        pytest.raises(RaygptError, match=r"before step 6; .*on_spike: skip") if ends else contextlib.nullcontext()
    )
    events = []
    with expected:
        events = run(make_task(**{"training.on_spike": policy}), engine)
    told = texts_of(events, Warned)
    assert told == (
        ["loss or gradient norm was 6 standard deviations above what is usual in 2 of the steps up to 6"] * warns
    )


# Stopping, and saving when it is asked for


def test_a_run_that_is_told_to_stop_saves_and_goes_on_from_there(make_task):
    task = make_task(**{"training.checkpoint_every": 100, "training.eval_every": 100})
    events = run(task, FakeEngine(), [Orders(), Orders(), Orders(stop=True)])  # asked after steps 2, 3 and 6
    assert events[-1] == Stopped(6)
    assert checkpoints.newest_intact(task.run_folder)[0].step == 6
    engine = FakeEngine()
    assert run(task, engine)[-1] == Finished(10)
    assert len(engine.batches) == 4


def test_a_validation_that_a_stop_left_out_is_made_up_for(make_task):
    task = make_task(**{"training.eval_every": 3})
    assert ("val", 3) not in kinds(run(task, FakeEngine(), [Orders(), Orders(stop=True)]))
    assert ("val", 3) in kinds(run(task, FakeEngine()))


def test_a_checkpoint_is_saved_when_it_is_asked_for_and_training_goes_on(make_task):
    task = make_task(**{"training.checkpoint_every": 100})
    events = run(task, FakeEngine(), [Orders(), Orders(save=True)])
    assert steps_of(events, CheckpointSaved) == [3, 10]


class MidValidation(LocalSession):
    """Wants something when it is asked within the validation after step 4, of whose three parts two are done."""

    def __init__(self, engine, wanted):
        super().__init__()
        self.engine, self.mid, self.asked = engine, wanted, 0

    def orders(self, steps_per_s):
        is_midst = (len(self.engine.batches), len(self.engine.scored)) == (4, 3 + 2)  # three parts before step 1
        self.asked += is_midst
        return self.mid if is_midst else super().orders(steps_per_s)


@pytest.mark.parametrize("every", [100, 4])
def test_a_validation_is_left_where_all_are_to_stop_and_made_up_for(make_task, every):
    task, engine = make_task(**{"training.checkpoint_every": every}), FakeEngine()
    session = MidValidation(engine, Orders(stop=True))
    Loop(task, engine, session).run()
    assert session.asked == 1
    assert session.events[-1] == Stopped(4)
    assert steps_of(session.events, CheckpointSaved) == [4]  # saved once, before the validation or for the stop
    assert ("val", 4) not in kinds(session.events)
    assert len(engine.scored) == 5
    assert kinds(run(task, FakeEngine()))[:2] == [("start", None), ("val", 4)]


def test_a_node_about_to_be_lost_is_saved_for_in_the_midst_of_a_validation(make_task):
    class Noting(FakeEngine):
        parts = ()

        def save(self, state, folder):
            self.parts = (*self.parts, len(self.scored))
            super().save(state, folder)

    engine = Noting()
    session = MidValidation(engine, Orders(save=True, next_poll_in_steps=100))
    Loop(make_task(**{"training.checkpoint_every": 100}), engine, session).run()
    assert steps_of(session.events, CheckpointSaved) == [4, 10]
    assert engine.parts[0] == 5  # with the third part still to come
    assert ("val", 4) in kinds(session.events)


def test_a_request_within_the_validation_of_a_step_that_is_saved_already_is_for_the_next_one(make_task):
    task, engine = make_task(**{"training.checkpoint_every": 4}), FakeEngine()
    session = MidValidation(engine, Orders(save=True, next_poll_in_steps=100))
    Loop(task, engine, session).run()
    assert steps_of(session.events, CheckpointSaved) == [4, 5, 8, 10]


# Storage that fails


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


def test_a_save_that_fails_costs_a_warning_and_no_older_checkpoint(make_task):
    task = make_task(**{"training.checkpoint_every": 2})
    events = run(task, Unsaved([4, 6]))
    assert steps_of(events, CheckpointSaved) == [2, 8, 10]
    warnings = texts_of(events, Warned)
    assert len(warnings) == 2
    assert warnings[0].startswith("the checkpoint of step 4 could not be saved (No space left on device); training")
    assert checkpoints.newest_intact(task.run_folder) == (checkpoints.find(task.run_folder, 10), [])
    assert not list(checkpoints.parts_of(task.run_folder).glob("*"))[2:]  # at most what the two left


def test_several_saves_that_fail_in_a_row_end_the_run(make_task):
    task = make_task(**{"training.checkpoint_every": 2, "run.failed_saves": 2})
    with pytest.raises(
        RaygptError, match=r"step 6 could not be saved .* 2 times in a row; .* run the same command again"
    ):
        run(task, Unsaved([4, 6]))
    assert checkpoints.newest_intact(task.run_folder)[0].step == 2


def test_the_last_save_is_tried_again(make_task, monkeypatch):
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

    task = make_task(**{"training.checkpoint_every": 5})
    events = run(task, Recovers())
    assert len(of(events, Warned)) == 2
    assert checkpoints.newest_intact(task.run_folder)[0].step == 10


def test_validation_losses_that_cannot_be_read_cost_warnings_and_no_checkpoint(make_task, monkeypatch):
    monkeypatch.setattr(storage, "REREAD_S", (0.0, 0.0))
    task = make_task(**{"training.checkpoint_every": 2, "run.keep": 1, "run.keep_best": 0})
    storage.write_bytes(storage.join(task.run_folder, "checkpoints", "scores.json"), b'{"0": 5.545177444219589,')
    events = run(task, FakeEngine())
    assert steps_of(events, Finished) == [10]
    assert steps_of(events, CheckpointSaved) == [2, 4, 6, 8, 10]
    assert list(checkpoints.folders(task.run_folder)) == [
        2,
        4,
        6,
        8,
        10,
    ]  # which is the best is not known: all are kept
    warnings = texts_of(events, Warned)
    assert any(text.startswith("the validation loss of step 4 could not be kept") for text in warnings)
    assert all("scores.json is damaged" in text for text in warnings)


# Going on


def test_it_goes_on_after_the_newest_checkpoint_with_the_batch_that_follows(make_task):
    task = make_task(**{"training.checkpoint_every": 4, "training.steps": 8})
    run(task, FakeEngine())
    longer = replace(task, recipe=load_recipe("gpt2-tiny", {**task.recipe.to_dict(), "training.steps": 10}))
    engine = FakeEngine()
    events = run(longer, engine)
    assert Resumed(8, checkpoints.folder_of(task.run_folder, 8), is_fork=False) in events
    assert len(engine.batches) == 2
    np.testing.assert_array_equal(engine.batches[0], task.feed.rows(8, [0, 1, 2, 3]))


def test_a_validation_that_was_not_reached_after_its_save_is_made_up_for(make_task):
    class Killed(FakeEngine):
        def window_losses(self, state, windows):
            if state == 8:
                raise RuntimeError("killed")
            return super().window_losses(state, windows)

    task = make_task(**{"training.checkpoint_every": 4})
    with pytest.raises(RuntimeError, match="killed"):
        run(task, Killed())
    while checkpoints.find_newest(task.run_folder).step < 8:  # its saving goes on behind
        time.sleep(0.01)
    assert kinds(run(task, FakeEngine())) == [("start", None), ("val", 8), ("train", 9), ("train", 10), ("val", 10)]


def test_a_fork_begins_with_the_state_and_the_step_of_another_run(make_task):
    first = make_task(**{"training.checkpoint_every": 4, "run.keep": 3})
    run(first, FakeEngine())
    fork = replace(make_task(), start_from=checkpoints.find(first.run_folder, 4))
    engine = FakeEngine()
    told = kinds(run(fork, engine))
    assert told[:3] == [("start", None), ("val", 4), ("train", 6)]
    assert len(engine.batches) == 6
    np.testing.assert_array_equal(engine.batches[0], first.feed.rows(4, [0, 1, 2, 3]))


# With the JAX engine


@pytest.fixture
def jax_engine():
    """Of a task, on one device."""
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine

    jax.config.update("jax_disable_most_optimizations", True)
    yield lambda task: JaxEngine(task.recipe, VOCAB, devices=jax.devices()[:1])
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def make_engine(jax_engine):
    """Of a task, by its recipe."""

    def make(task):
        if task.recipe.engine == "jax":
            return jax_engine(task)
        pytest.importorskip("torch", reason="needs the extra torch")
        from raygpt.engines.torch.engine import TorchEngine

        return TorchEngine(task.recipe, vocab=VOCAB)

    return make


def test_a_repeating_text_is_learned_and_another_is_not(make_task, jax_engine):
    training = {"steps": 60, "log_every": 10, "eval_every": 100, "batch_tokens": ROWS * CONTEXT}
    task = make_task(training=training)
    engine, session = jax_engine(task), LocalSession()
    state = Loop(task, engine, session).run()
    losses = {event["step"]: event["loss"] for event in lines_of(session.events, StepLogged)}
    assert list(losses) == [10, 20, 30, 40, 50, 60]
    assert losses[60] < 0.7  # from log(257) = 5.5; the first tokens of a window can only be guessed
    validated = {event["step"]: event["val_loss"] for event in lines_of(session.events, Validated)}
    assert validated[0] == pytest.approx(np.log(VOCAB), abs=0.1)
    ids = np.resize(PATTERN[::-1], 10 * CONTEXT + 9)
    windows = np.stack([ids[n * CONTEXT : (n + 1) * CONTEXT + 1] for n in range(10)]).astype(np.int32)
    losses = [engine.window_losses(state, one[None])[0] for one in windows]
    assert validated[60] == pytest.approx(np.mean(losses), rel=1e-5)
    assert validated[60] > 3  # it reads backwards
    text = next(event.text for event in of(session.events, Sampled) if event.step == 60)
    assert len(text) == CONTEXT - 1


# When all workers ask what is wanted


class Asked(LocalSession):
    """Notes after which steps it was asked; `engine` says which step that was."""

    def __init__(self, engine, wanted=()):
        super().__init__(queued_orders=list(wanted))
        self.engine, self.after = engine, []

    def orders(self, steps_per_s):
        self.after.append(len(self.engine.batches))
        return super().orders(steps_per_s)


def test_orders_say_when_the_next_poll_is_due_at_the_latest(make_task):
    task = make_task(**{"training.log_every": 4, "training.steps": 12, "training.checkpoint_every": 100})
    engine = FakeEngine(micro_rows=10)  # a validation of one part, after which nobody asks
    every_third = Orders(next_poll_in_steps=3)
    session = Asked(engine, [every_third, every_third, Orders(save=True, next_poll_in_steps=1), Orders(save=True)])
    Loop(task, engine, session).run()
    assert session.after == [2, 4, 7, 8, 12]  # 4, 8 and 12 are logged
    assert steps_of(session.events, CheckpointSaved) == [7, 8, 12]


@pytest.fixture
def asked_after(make_task, monkeypatch):
    """After which of so many steps the workers ask, few being logged; the first ones take these seconds, then each so
    many."""

    def run(steps, first, then):
        class Timed(FakeEngine):
            now = 0.0

            def step(self, state, batch):
                self.now += first.get(state, then)
                return super().step(state, batch)

        engine = Timed(micro_rows=10)
        monkeypatch.setattr("raygpt.training.clock.time", SimpleNamespace(perf_counter=lambda: engine.now))
        task = make_task(**{"training.log_every": 100, "training.steps": steps, "training.eval_every": 100})
        session = Asked(engine)
        Loop(task, engine, session).run()
        return session.after

    return run


def test_steps_that_take_long_are_asked_after_though_few_are_logged(asked_after):
    after = asked_after(12, {0: 30}, then=2)  # the first is compiled
    assert after == [2, 3, 5, 7, 9, 11, 12]  # every 4 s: the next would make it more than 5


def test_a_few_quick_steps_do_not_put_off_the_next_time(asked_after):
    after = asked_after(30, {0: 30, 1: 0.001, 2: 0.001}, then=1)  # batches are read while the first is compiled
    assert after == [2, 3, 5, 9, 14, 19, 24, 29, 30]  # every 5 s, once that is known


def test_within_a_long_validation_orders_are_asked_for_as_often(make_task, monkeypatch):
    class Timed(FakeEngine):
        now = 0.0

        def window_losses(self, state, windows):
            self.now += 2 if len(self.scored) % 10 else 30  # the first is compiled
            return super().window_losses(state, windows)

    class Noting(LocalSession):
        after = ()

        def orders(self, steps_per_s):
            self.after = (*self.after, len(engine.scored) - 10)  # ten before step 1
            return super().orders(steps_per_s)

    engine, session = Timed(micro_rows=1), Noting()
    monkeypatch.setattr("raygpt.training.clock.time", SimpleNamespace(perf_counter=lambda: engine.now))
    Loop(make_task(**{"training.steps": 3, "training.log_every": 100}), engine, session).run()
    assert session.after == (0, 0, 2, 3, 5, 7, 9)  # after steps 2 and 3, then within the validation


# Storage that fails, as it does


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


def there(task):
    """The newest whole checkpoint, by every checksum, and what is wrong with later ones."""
    found, warnings = checkpoints.newest_intact(task.run_folder)
    return found.step, warnings


def on(folder, task):
    """The same task, its run in another place."""
    tokenizers.save(task.tokenizer, str(folder))
    return replace(task, run_folder=str(folder))


def fill(folder):
    """As much as there is room for."""
    with contextlib.suppress(OSError), Path(folder, "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


EVERY_SECOND = {"training.checkpoint_every": 2, "training.eval_every": 100, "run.keep": 1, "run.keep_best": 0}


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_disk_that_is_full_for_a_while_costs_warnings(make_task, make_engine, disk, name):
    folder, _ = disk
    task, seen = on(folder, make_task(engine=name, **EVERY_SECOND)), []
    happens = {4: lambda: fill(folder), 8: lambda: (seen.append(there(task)), (folder / "full").unlink())}
    events = run(task, struck(make_engine(task), happens))
    assert seen == [(2, [])]
    said = saves_that_failed(events)
    assert [step for step, _ in said] == [4, 6]
    assert all("No space left on device" in text for _, text in said)
    assert there(task) == (10, [])


def test_a_disk_that_stays_full_ends_the_run_with_the_checkpoint_before(make_task, disk):
    folder, _ = disk
    task = on(folder, make_task(**EVERY_SECOND, **{"run.failed_saves": 3}))
    engine = struck(FakeEngine(), {4: lambda: fill(folder), 7: lambda: None, 9: lambda: None})
    with pytest.raises(RaygptError, match=r"step 8 could not be saved \(.*No space left.* 3 times in a row"):
        run(task, engine)
    assert len(engine.batches) < 10
    assert there(task) == (2, [])


def test_a_disk_that_is_read_only_for_a_while_costs_warnings(make_task, disk):
    folder, remount = disk
    task, seen = on(folder, make_task(**EVERY_SECOND)), []
    happens = {4: lambda: remount("ro"), 8: lambda: (seen.append(there(task)), remount("rw"))}
    events = run(task, struck(FakeEngine(), happens))
    assert seen == [(2, [])]
    said = saves_that_failed(events)
    assert [step for step, _ in said] == [4, 6]
    assert all("Read-only file system" in text for _, text in said)
    assert there(task) == (10, [])


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_for_a_while_costs_warnings(make_task):
    task, seen = make_task(**EVERY_SECOND), []
    folder = Path(task.run_folder, "checkpoints")
    happens = {4: lambda: folder.chmod(0o500), 8: lambda: (seen.append(there(task)), folder.chmod(0o700))}
    events = run(task, struck(FakeEngine(), happens))
    assert seen == [(2, [])]
    assert [step for step, _ in saves_that_failed(events)] == [4, 6]
    assert there(task) == (10, [])


def saves_that_failed(events):
    """(step, what was said of it)"""
    told = texts_of(events, Warned)
    found = (
        re.match(r"the checkpoint of step (\d+) could not be saved \((.*)\); training continues", text) for text in told
    )
    return [(int(match[1]), match[2]) for match in found if match]


def test_an_upload_that_fails_twice_is_tried_again_and_nothing_is_said(make_task, s3, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "PAUSES_S", (0, 0, 0))
    task = on(f"{s3}/twice", make_task(**{**EVERY_SECOND, "training.checkpoint_every": 5, "run.keep": 2}))
    tries, real = [], storage._upload

    def upload(path, uri):
        tries.append(uri)
        if uri.endswith("/state") and tries.count(uri) < 3:
            raise StorageError(f"{uri} cannot be reached (503 Slow Down)")
        real(path, uri)

    monkeypatch.setattr(storage, "_upload", upload)
    events = run(task, FakeEngine())
    assert steps_of(events, CheckpointSaved) == [5, 10]
    assert not texts_of(events, Warned)
    assert [tries.count(f"{checkpoints.folder_of(task.run_folder, step)}/state") for step in (5, 10)] == [3, 3]
    assert there(task) == (10, [])


def test_the_last_step_waits_for_the_save_before_it_and_is_not_called_left_out(make_task, monkeypatch):
    task, real = make_task(**EVERY_SECOND), storage.move_file

    def move(path, uri):
        if "step-00000008" in uri:
            monkeypatch.setattr("raygpt.training.saving.PATIENCE_S", 0.05)
            time.sleep(1)
        real(path, uri)

    monkeypatch.setattr(storage, "move_file", move)
    events = run(task, FakeEngine())
    assert not texts_of(events, Warned)
    assert steps_of(events, CheckpointSaved) == [2, 4, 6, 8, 10]


def test_an_upload_that_blocks_holds_up_no_step_and_the_next_save_is_left_out(make_task, monkeypatch):
    task, let_go, real = make_task(**EVERY_SECOND), threading.Event(), storage.move_file

    def move(path, uri):
        if "step-00000004" in uri:
            monkeypatch.setattr("raygpt.training.saving.PATIENCE_S", 0.05)
            let_go.wait(60)
        real(path, uri)

    class Watched(FakeEngine):
        def step(self, state, batch):
            if state + 1 == 9:
                seen.append(there(task))
                let_go.set()
                settle()
            return super().step(state, batch)

    seen = []
    monkeypatch.setattr(storage, "move_file", move)
    events = run(task, Watched())
    assert seen == [(2, [])]
    said = texts_of(events, Warned)
    assert said == [
        f"the checkpoint of step {step} is skipped: the one before it is still being written" for step in (6, 8)
    ]
    assert steps_of(events, CheckpointSaved) == [2, 4, 10]
    assert there(task) == (10, [])


def test_a_rank_deletes_what_its_own_saves_have_left_and_nobody_elses(make_task):
    task = make_task()
    parts = checkpoints.parts_of(task.run_folder)
    ours = {"step-00000002-1", "step-00000002-1.orbax-checkpoint-tmp", "step-00000002-1.orbax-checkpoint-tmp-10"}
    theirs = {"step-00000002-10", "step-00000002-11.tmp", "step-00000001-0", "step-00000002-0.orbax-checkpoint-tmp-1"}
    for name in ours | theirs:
        Path(parts, name).mkdir(parents=True)
    engine = FakeEngine()
    saving = Saving(task, engine, LocalSession(rank=1, workers=20), lambda step, metrics: None)
    assert saving.begin(5, 5, 5)
    settle()
    assert {path.name for path in parts.iterdir()} == theirs
    assert (Path(checkpoints.folder_of(task.run_folder, 5)) / "state").read_text() == "5"


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
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_for_the_one_before(make_task, damage, reason):
    task = make_task(**{"training.checkpoint_every": 4, "training.steps": 8})
    run(task, FakeEngine())
    damage(checkpoints.folder_of(task.run_folder, 8))
    longer = replace(task, recipe=load_recipe("gpt2-tiny", {**task.recipe.to_dict(), "training.steps": 10}))
    engine = FakeEngine()
    events = run(longer, engine)
    warnings = texts_of(events, Warned)
    assert warnings == [f"checkpoint of step 8 is damaged ({reason}); the one before it is used"]
    assert steps_of(events, Resumed) == [4]
    assert len(engine.batches) == 6
    np.testing.assert_array_equal(engine.batches[0], task.feed.rows(4, [0, 1, 2, 3]))
    assert [checkpoints.find(task.run_folder, step).step for step in (8, 10)] == [8, 10]  # step 8's is whole again


def test_a_task_shows_no_secrets_where_ray_shows_it(make_task):
    task = make_task(**{"cluster.runtime_env": {"env_vars": {"HF_TOKEN": "hf_31415926"}}})
    assert task.recipe.cluster.runtime_env["env_vars"]["HF_TOKEN"] == "hf_31415926"
    assert f"{task!r} {task}" == f"Task({task.run_folder!r}) Task({task.run_folder!r})"


def test_spikes_that_a_restored_state_has_counted_are_no_news(make_task):
    changes = {"training.on_spike": "stop", "training.checkpoint_every": 4}
    task = make_task(**changes, **{"training.steps": 8})
    run(task, FakeEngine())
    longer = replace(task, recipe=load_recipe("gpt2-tiny", {**task.recipe.to_dict(), "training.steps": 12}))
    events = run(longer, FakeEngine(spikes=dict.fromkeys(range(1, 13), 3.0)))
    assert events[-1] == Finished(12)


def test_a_state_that_a_spike_has_spoilt_is_not_saved_where_one_is_to_stop_at_it(make_task):
    task = make_task(**{"training.on_spike": "stop", "training.checkpoint_every": 2, "training.log_every": 10})
    with pytest.raises(RaygptError, match="standard deviations above what is usual, at or before step 6"):
        run(task, FakeEngine(step_s=0.05, spikes=dict.fromkeys(range(5, 11), 1.0)))
    assert checkpoints.newest_intact(task.run_folder)[0].step == 4


def test_a_checkpoint_counts_when_the_steps_up_to_it_are_logged(make_task):
    class Slow(LocalSession):
        def record(self, metrics):
            time.sleep(0.3 if isinstance(metrics, StepLogged) else 0)
            super().record(metrics)

    task, session = make_task(**{"training.checkpoint_every": 5, "training.log_every": 1}), Slow()
    Loop(task, FakeEngine(), session).run()
    said = [(type(event), event.step) for event in of(session.events, StepLogged | CheckpointSaved)]
    assert said.index((CheckpointSaved, 5)) > said.index((StepLogged, 5))
    assert said.index((CheckpointSaved, 10)) > said.index((StepLogged, 10))


def test_a_worker_whose_disk_does_not_answer_costs_a_save_and_not_all_that_follow(make_task, monkeypatch):
    monkeypatch.setattr("raygpt.training.saving.SAVE_TIMEOUT_S", 0.2)
    task, session = make_task(), LocalSession(workers=2)  # the other never tells
    saving = Saving(task, FakeEngine(), session, lambda step, metrics: None)
    assert saving.begin(4, 4, 4)
    settle()
    assert saving.begin(6, 6, 6)
    settle()
    said = texts_of(session.events, Warned)
    assert [text.partition(" could")[0] for text in said] == [f"the checkpoint of step {step}" for step in (4, 6)]
    assert "not all workers have written their part" in said[0]


def test_a_run_that_is_to_stop_after_a_step_is_saved_there_and_goes_on_with_the_schedule_of_all_steps(make_task):
    task, engine = make_task(), FakeEngine()
    first = run(replace(task, until=7), engine)
    assert first[-1] == Stopped(7)
    assert kinds(first)[-1] == ("train", 7)
    assert checkpoints.find_newest(task.run_folder).step == 7
    assert len(engine.batches) == 7
    again = FakeEngine()
    assert run(task, again)[-1] == Finished(10)
    assert len(again.batches) == 3
