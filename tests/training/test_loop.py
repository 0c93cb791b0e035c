"""The loop in this process: what it logs, what it trains on and validates, and how it resumes."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from small_loop import (  # noqa: F401
    CONTEXT,
    PATTERN,
    ROWS,
    VOCAB,
    FakeEngine,
    jax_engine,
    kinds,
    lines_of,
    make_spec,
    of,
    run,
    steps_of,
    texts_of,
)

from raygpt.corpus.feed import val_windows
from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.testing.session import LocalSession
from raygpt.training.events import Resumed, Sampled, Started, StepLogged, Validated, Warned
from raygpt.training.loop import Loop
from raygpt.training.spec import RunSpec

# What it logs


def test_it_logs_and_validates_when_the_recipe_says_and_at_the_end(make_spec):
    assert kinds(run(make_spec(), FakeEngine())) == [
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
def test_every_logged_step_is_logged_once_and_in_order(make_spec, steps, log_every, eval_every):
    training = {"steps": steps, "log_every": log_every, "eval_every": eval_every, "batch_tokens": ROWS * CONTEXT}
    events = run(make_spec(training=training), FakeEngine())
    logged = lines_of(events, StepLogged)
    every = [step for step in range(1, steps + 1) if step % log_every == 0 or step == steps]
    assert [event["step"] for event in logged] == every
    assert [event["loss"] for event in logged] == every  # each with its own metrics
    validated = [0, *(step for step in range(1, steps + 1) if step % eval_every == 0 or step == steps)]
    assert steps_of(events, Validated) == validated


def test_a_log_event_has_loss_rate_norm_tokens_speed_and_wait_and_no_mfu_on_a_cpu(make_spec):
    logged = lines_of(run(make_spec(), FakeEngine()), StepLogged)
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_s"}
    assert [set(event) for event in logged] == [keys] * 4
    assert [event["tokens"] for event in logged] == [3 * 64, 6 * 64, 9 * 64, 10 * 64]


def test_on_a_known_device_a_log_event_has_mfu(make_spec):
    class H200(FakeEngine):
        device_count = 2

        def describe(self):
            return {**super().describe(), "device": "NVIDIA H200"}

    spec = make_spec()
    for event in lines_of(run(spec, H200()), StepLogged):
        expected = event["tokens_per_s"] * describe(spec.recipe.model, VOCAB).flops_per_token / (2 * 989e12)
        assert event["mfu"] == pytest.approx(expected)


def test_the_start_says_what_computes_and_every_validation_shows_a_sample(make_spec):
    events = run(make_spec(), FakeEngine())
    start = next(event for event in events if isinstance(event, Started))
    assert (start.about["device"], start.about["devices"]) == ("cpu", "1")
    assert steps_of(events, Sampled) == [0, 4, 8, 10]
    assert all(isinstance(text, str) and text for text in texts_of(events, Sampled))


def test_speed_is_that_of_the_steps_alone(make_spec, monkeypatch):
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
    loop = Loop(make_spec(training=training), engine, session)
    logged = loop._log._waiting
    loop.run()
    speeds = [event["tokens_per_s"] for event in lines_of(session.events, StepLogged)]
    assert speeds == [ROWS * CONTEXT / 2] * 6


def test_what_was_waited_for_batches_is_logged_but_for_the_first_step(make_spec, monkeypatch):
    monkeypatch.setattr("raygpt.training.loop.prefetch", lambda items, ahead: ((item, 0.25) for item in items))
    training = {"steps": 12, "log_every": 4, "eval_every": 100, "batch_tokens": ROWS * CONTEXT}
    events = run(make_spec(training=training), FakeEngine())
    assert [event["data_wait_s"] for event in lines_of(events, StepLogged)] == [0.75, 1.0, 1.0]


# What it trains on and validates


def test_step_n_trains_on_the_engines_rows_of_batch_n_minus_1_each_once(make_spec):
    spec, engine = make_spec(), FakeEngine(rows=[1, 3])
    run(spec, engine)
    assert len(engine.batches) == 10
    for number, batch in enumerate(engine.batches):
        np.testing.assert_array_equal(batch, spec.feed.rows(number, [1, 3]))


@pytest.mark.parametrize("micro_rows", [1, 4, 10, 100])
def test_validation_is_the_mean_over_all_windows_of_all_streams(make_spec, micro_rows):
    spec = make_spec()
    spec = RunSpec(spec.recipe, spec.feed, spec.val * 2, spec.run_folder)
    engine = FakeEngine(micro_rows=micro_rows)
    first = lines_of(run(spec, engine), Validated)[0]
    ids = np.resize(PATTERN[::-1], 10 * CONTEXT + 9)
    windows = np.stack([ids[n * CONTEXT : (n + 1) * CONTEXT + 1] for n in range(10)])
    assert first["val_loss"] == pytest.approx(windows.mean())
    scored = np.concatenate(engine.scored)
    np.testing.assert_array_equal(scored[:20], np.concatenate([windows, windows]))
    assert len(scored) == 4 * 20  # at 0, 4, 8 and 10
    assert max(map(len, engine.scored)) == min(micro_rows, 10)


def test_tasks_are_scored_with_each_validation(make_spec):
    texts = [{"text": "ab c"}, {"text": "ab d"}]  # the word is " c" or " d": bytes 32 and 99, or 100
    spec = replace(make_spec(), eval_items={"lambada": texts})
    engine = FakeEngine()
    lines = [line for line in lines_of(run(spec, engine), Validated) if "lambada_acc" in line]
    assert [line["step"] for line in lines] == [0, 4, 8, 10]
    assert all("val_loss" in line for line in lines)  # one line for both
    assert lines[0]["lambada_acc"] == 1.0
    assert lines[0]["lambada_perplexity"] == pytest.approx(np.exp(32 + 99.5))
    assert len(engine.graded) == 4
    np.testing.assert_array_equal(engine.graded[0], [[97, 98, 32, 99], [97, 98, 32, 100]])


@pytest.mark.parametrize(
    ("limit", "chosen"), [(1, [0]), (4, [0, 5, 10, 15]), (6, [0, 3, 6, 10, 13, 16]), (50, range(20))]
)
def test_a_part_of_the_validation_set_is_evenly_spread_and_always_the_same(make_spec, limit, chosen):
    streams = make_spec().val * 2
    every = np.concatenate(list(val_windows(streams, CONTEXT, 4)))
    for _ in range(2):
        np.testing.assert_array_equal(
            np.concatenate(list(val_windows(streams, CONTEXT, 3, limit))), every[list(chosen)]
        )


def test_the_recipe_says_how_many_windows_are_validated(make_spec):
    engine = FakeEngine()
    run(make_spec(**{"training.eval_rows": 3}), engine)
    assert [len(windows) for windows in engine.scored] == [3, 3, 3, 3]


def test_windows_of_a_stream_that_is_too_short_are_none(make_spec):
    stream = make_spec().val[0]
    assert list(val_windows([stream], len(stream), 4)) == []
    assert [len(windows) for windows in val_windows([stream], len(stream) - 1, 4)] == [1]


def test_a_feed_that_fails_in_its_thread_fails_the_run(make_spec):
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
        run(make_spec(Broken()), engine)
    assert len(engine.batches) == 5  # what was read before it is trained on


def test_metrics_that_cannot_be_read_fail_the_run(make_spec):
    class Broken(FakeEngine):
        def read(self, metrics):
            if metrics > 1:
                raise RuntimeError("the device is gone")
            return super().read(metrics)

    with pytest.raises(RuntimeError, match="the device is gone"):
        run(make_spec(), Broken())


def test_a_worker_that_waits_for_its_store_is_not_hung(make_spec):
    beats = []

    class Session(LocalSession):
        def beat(self, step):
            beats.append(step)

    class AwayAtBatch3:
        streams = ()

        def read_ahead(self, report):
            self._report = report

        def rows(self, batch, rows):
            while batch == 3 and 3 not in beats:  # the loop has taken all steps before, and waits
                time.sleep(0.001)
            if batch == 3:
                self._report("waiting for s3://bucket/store for 60 s")
                beats.append("waited")
            return np.zeros((len(rows), CONTEXT + 1), np.int32)

    session = Session()
    Loop(make_spec(AwayAtBatch3()), FakeEngine(), session).run()
    assert beats[beats.index("waited") - 1] == 3
    assert beats.count(3) == 2
    assert texts_of(session.events, Warned) == ["waiting for s3://bucket/store for 60 s"]


# Resuming


def test_it_goes_on_after_the_newest_checkpoint_with_the_batch_that_follows(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 4, "training.steps": 8})
    run(spec, FakeEngine())
    longer = replace(spec, recipe=load_recipe("gpt2-tiny", {**spec.recipe.to_dict(), "training.steps": 10}))
    engine = FakeEngine()
    events = run(longer, engine)
    assert Resumed(8, checkpoints.folder_of(spec.run_folder, 8), is_fork=False) in events
    assert len(engine.batches) == 2
    np.testing.assert_array_equal(engine.batches[0], spec.feed.rows(8, [0, 1, 2, 3]))


def test_a_validation_that_was_not_reached_after_its_save_is_made_up_for(make_spec):
    class Killed(FakeEngine):
        def window_losses(self, state, windows):
            if state == 8:
                raise RuntimeError("killed")
            return super().window_losses(state, windows)

    spec = make_spec(**{"training.checkpoint_every": 4})
    with pytest.raises(RuntimeError, match="killed"):
        run(spec, Killed())
    while checkpoints.find_newest(spec.run_folder).step < 8:  # its saving goes on behind
        time.sleep(0.01)
    assert kinds(run(spec, FakeEngine())) == [("start", None), ("val", 8), ("train", 9), ("train", 10), ("val", 10)]


def test_a_fork_begins_with_the_state_and_the_step_of_another_run(make_spec):
    first = make_spec(**{"training.checkpoint_every": 4, "run.keep": 3})
    run(first, FakeEngine())
    fork = replace(make_spec(), start_from=checkpoints.find(first.run_folder, 4))
    engine = FakeEngine()
    told = kinds(run(fork, engine))
    assert told[:3] == [("start", None), ("val", 4), ("train", 6)]
    assert len(engine.batches) == 6
    np.testing.assert_array_equal(engine.batches[0], first.feed.rows(4, [0, 1, 2, 3]))


# With the JAX engine


def test_a_repeating_text_is_learned_and_another_is_not(make_spec, jax_engine):
    training = {"steps": 60, "log_every": 10, "eval_every": 100, "batch_tokens": ROWS * CONTEXT}
    spec = make_spec(training=training)
    engine, session = jax_engine(spec), LocalSession()
    state = Loop(spec, engine, session).run()
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


def test_a_spec_shows_no_secrets_where_ray_shows_it(make_spec):
    spec = make_spec(**{"cluster.runtime_env": {"env_vars": {"HF_TOKEN": "hf_31415926"}}})
    assert spec.recipe.cluster.runtime_env["env_vars"]["HF_TOKEN"] == "hf_31415926"
    assert f"{spec!r} {spec}" == f"RunSpec({spec.run_folder!r}) RunSpec({spec.run_folder!r})"
