"""The loop when it has to stop or to save: losses that are not finite, spikes, orders."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_loop import FakeEngine, kinds, make_spec, of, run, steps_of, texts_of  # noqa: F401

from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.testing.session import LocalSession
from raygpt.training.events import CheckpointSaved, Finished, Sampled, Stopped, Warned
from raygpt.training.loop import Loop
from raygpt.training.session import Orders

# Losses that are not finite, and spikes


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_ends_the_run_and_leaves_the_checkpoints_before_it(make_spec, bad):
    spec = make_spec(**{"training.checkpoint_every": 2})
    losses = dict.fromkeys(range(6, 11), bad)  # as it goes: what is not a number stays so
    with pytest.raises(RaygptError, match=r"not a number any more at step 6 .*on_nan: skip"):
        run(spec, FakeEngine(losses=losses))
    found, warnings = checkpoints.newest_intact(spec.run_folder)
    assert (found.step, warnings) == (4, [])


def test_a_bad_step_that_is_not_logged_is_found_before_its_checkpoint_counts(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 5, "training.log_every": 100, "training.eval_every": 100})
    with pytest.raises(RaygptError, match="at step 5 "):
        run(spec, FakeEngine(losses={5: float("nan")}))
    assert checkpoints.newest_intact(spec.run_folder)[0] is None


@pytest.mark.parametrize(("precision", "ends"), [("bf16", True), ("fp16", False)])
def test_a_gradient_that_overflows_ends_the_run_unless_its_step_was_left_out_as_in_fp16(make_spec, precision, ends):
    class Overflowing(FakeEngine):
        def read(self, metrics):
            skipped = float(metrics > 3)  # a spike has been left out before
            return {**super().read(metrics), "skipped": skipped, "grad_norm": float("inf") if metrics == 6 else 0.5}

        def describe(self):
            return {**super().describe(), "precision": precision}

    expected = pytest.raises(RaygptError, match="at step 6 ") if ends else contextlib.nullcontext()
    with expected:
        run(make_spec(), Overflowing())


def test_bad_steps_that_the_engine_leaves_out_do_not_end_the_run(make_spec):
    events = run(make_spec(**{"training.on_nan": "skip"}), FakeEngine(losses={6: float("nan")}))
    assert kinds(events)[-1] == ("val", 10)


@pytest.mark.parametrize(("policy", "warns", "ends"), [("warn", True, False), ("stop", False, True)])
def test_a_spike_is_told_of_or_ends_the_run(make_spec, policy, warns, ends):
    engine = FakeEngine(spikes=dict.fromkeys(range(5, 11), 2.0))
    expected = (
        pytest.raises(RaygptError, match=r"before step 6; .*on_spike: skip") if ends else contextlib.nullcontext()
    )
    events = []
    with expected:
        events = run(make_spec(**{"training.on_spike": policy}), engine)
    told = texts_of(events, Warned)
    assert told == (
        ["loss or gradient norm was 6 standard deviations above what is usual in 2 of the steps up to 6"] * warns
    )


def test_spikes_that_a_restored_state_has_counted_are_no_news(make_spec):
    changes = {"training.on_spike": "stop", "training.checkpoint_every": 4}
    spec = make_spec(**changes, **{"training.steps": 8})
    run(spec, FakeEngine())
    longer = replace(spec, recipe=load_recipe("gpt2-tiny", {**spec.recipe.to_dict(), "training.steps": 12}))
    events = run(longer, FakeEngine(spikes=dict.fromkeys(range(1, 13), 3.0)))
    assert events[-1] == Finished(12)


def test_a_spike_in_the_first_step_after_a_resume_is_found(make_spec):
    spec = make_spec(**{"training.on_spike": "stop", "training.checkpoint_every": 4})
    for _ in range(2):  # the same command again ends there again
        with pytest.raises(RaygptError, match="at or before step"):
            run(spec, FakeEngine(spikes=dict.fromkeys(range(5, 11), 1.0)))


def test_a_state_that_a_spike_has_spoilt_is_not_saved_where_one_is_to_stop_at_it(make_spec):
    spec = make_spec(**{"training.on_spike": "stop", "training.checkpoint_every": 2, "training.log_every": 10})
    with pytest.raises(RaygptError, match="standard deviations above what is usual, at or before step 6"):
        run(spec, FakeEngine(step_s=0.05, spikes=dict.fromkeys(range(5, 11), 1.0)))
    assert checkpoints.newest_intact(spec.run_folder)[0].step == 4


# Stopping, and saving when it is asked for


def test_a_run_that_is_told_to_stop_saves_and_goes_on_from_there(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 100, "training.eval_every": 100})
    events = run(
        spec, FakeEngine(), [Orders(), Orders(), Orders(), Orders(stop=True)]
    )  # asked in the validation, after steps 2, 3, 6
    assert events[-1] == Stopped(6)
    assert checkpoints.newest_intact(spec.run_folder)[0].step == 6
    engine = FakeEngine()
    assert run(spec, engine)[-1] == Finished(10)
    assert len(engine.batches) == 4


def test_a_validation_that_a_stop_left_out_is_made_up_for(make_spec):
    spec = make_spec(**{"training.eval_every": 3})
    assert ("val", 3) not in kinds(run(spec, FakeEngine(), [Orders(), Orders(), Orders(stop=True)]))
    assert ("val", 3) in kinds(run(spec, FakeEngine()))


def test_a_checkpoint_is_saved_when_it_is_asked_for_and_training_goes_on(make_spec):
    spec = make_spec(**{"training.checkpoint_every": 100})
    events = run(spec, FakeEngine(), [Orders(), Orders(), Orders(save=True)])
    assert steps_of(events, CheckpointSaved) == [3, 10]


def test_the_first_validation_is_left_where_all_are_to_stop(make_spec):
    spec, engine = make_spec(), FakeEngine()
    assert run(spec, engine, [Orders(stop=True)])[-1] == Stopped(0)
    assert (len(engine.scored), engine.batches) == (2, [])
    assert kinds(run(spec, FakeEngine()))[:2] == [("start", None), ("val", 0)]


def test_a_node_about_to_be_lost_during_the_first_validation_is_saved_for_after_the_first_step(make_spec):
    events = run(make_spec(**{"training.checkpoint_every": 100}), FakeEngine(), [Orders(save=True)])
    assert steps_of(events, CheckpointSaved) == [1, 10]


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
def test_a_validation_is_left_where_all_are_to_stop_and_made_up_for(make_spec, every):
    spec, engine = make_spec(**{"training.checkpoint_every": every}), FakeEngine()
    session = MidValidation(engine, Orders(stop=True))
    Loop(spec, engine, session).run()
    assert session.asked == 1
    assert session.events[-1] == Stopped(4)
    assert steps_of(session.events, CheckpointSaved) == [4]  # saved once, before the validation or for the stop
    assert ("val", 4) not in kinds(session.events)
    assert len(engine.scored) == 5
    assert kinds(run(spec, FakeEngine()))[:2] == [("start", None), ("val", 4)]


def test_an_evaluation_that_a_stop_ends_at_its_texts_is_made_up_for_with_them(make_spec):
    class AtTexts(LocalSession):
        def orders(self, steps_per_s):
            steps, parts = len(engine.batches), len(engine.scored)
            at_texts = (steps, parts) == (4, 1 + 1)  # a part before the first step, and one after step 4
            return Orders(stop=True) if at_texts else super().orders(steps_per_s)

    spec, engine = make_spec(**{"training.checkpoint_every": 4}), FakeEngine(micro_rows=10)
    session = AtTexts()
    Loop(spec, engine, session).run()
    assert session.events[-1] == Stopped(4)
    assert ("val", 4) not in kinds(session.events)
    again = run(spec, FakeEngine(micro_rows=10))
    assert kinds(again)[:2] == [("start", None), ("val", 4)]
    assert 4 in [event.step for event in again if isinstance(event, Sampled)]


def test_a_node_about_to_be_lost_is_saved_for_in_the_midst_of_a_validation(make_spec):
    class Noting(FakeEngine):
        parts = ()

        def save(self, state, folder):
            self.parts = (*self.parts, len(self.scored))
            super().save(state, folder)

    engine = Noting()
    session = MidValidation(engine, Orders(save=True, next_poll_in_steps=100))
    Loop(make_spec(**{"training.checkpoint_every": 100}), engine, session).run()
    assert steps_of(session.events, CheckpointSaved) == [4, 10]
    assert engine.parts[0] == 5  # with the third part still to come
    assert ("val", 4) in kinds(session.events)


def test_a_request_within_the_validation_of_a_step_that_is_saved_already_is_for_the_next_one(make_spec):
    spec, engine = make_spec(**{"training.checkpoint_every": 4}), FakeEngine()
    session = MidValidation(engine, Orders(save=True, next_poll_in_steps=100))
    Loop(spec, engine, session).run()
    assert steps_of(session.events, CheckpointSaved) == [4, 5, 8, 10]


def test_a_run_that_is_to_stop_after_a_step_is_saved_there_and_goes_on_with_the_schedule_of_all_steps(make_spec):
    spec, engine = make_spec(), FakeEngine()
    first = run(replace(spec, until=7), engine)
    assert first[-1] == Stopped(7)
    assert kinds(first)[-1] == ("train", 7)
    assert checkpoints.find_newest(spec.run_folder).step == 7
    assert len(engine.batches) == 7
    again = FakeEngine()
    assert run(spec, again)[-1] == Finished(10)
    assert len(again.batches) == 3


# When all workers ask what is wanted


class Asked(LocalSession):
    """Notes after which steps it was asked; `engine` says which step that was."""

    def __init__(self, engine, wanted=()):
        super().__init__(queued_orders=list(wanted))
        self.engine, self.after = engine, []

    def orders(self, steps_per_s):
        self.after.append(len(self.engine.batches))
        return super().orders(steps_per_s)


def test_orders_say_when_the_next_poll_is_due_at_the_latest(make_spec):
    rare = {"training.checkpoint_every": 100, "training.eval_every": 100}
    spec = make_spec(**{"training.log_every": 4, "training.steps": 12, **rare})
    engine, every_third = FakeEngine(micro_rows=10), Orders(next_poll_in_steps=3)
    save, save_now = Orders(save=True), Orders(save=True, next_poll_in_steps=1)
    session = Asked(engine, [Orders(), every_third, every_third, save_now, save])
    Loop(spec, engine, session).run()
    assert session.after == [0, 2, 4, 7, 8, 12, 12]  # 4, 8 and 12 are logged; 0 and 12 evaluated
    assert steps_of(session.events, CheckpointSaved) == [7, 8, 12]


@pytest.fixture
def asked_after(make_spec, monkeypatch):
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
        spec = make_spec(**{"training.log_every": 100, "training.steps": steps, "training.eval_every": 100})
        session = Asked(engine)
        Loop(spec, engine, session).run()
        return session.after

    return run


def test_steps_that_take_long_are_asked_after_though_few_are_logged(asked_after):
    after = asked_after(12, {0: 30}, then=2)  # the first is compiled
    assert after == [0, 2, 3, 5, 7, 9, 11, 12, 12]  # every 4 s: the next would make it more than 5


def test_a_few_quick_steps_do_not_put_off_the_next_time(asked_after):
    after = asked_after(30, {0: 30, 1: 0.001, 2: 0.001}, then=1)  # batches are read while the first is compiled
    assert after == [0, 2, 3, 5, 9, 14, 19, 24, 29, 30, 30]  # every 5 s, once that is known


def test_within_a_long_validation_orders_are_asked_for_as_often(make_spec, monkeypatch):
    class Timed(FakeEngine):
        now = 0.0

        def window_losses(self, state, windows):
            self.now += 2 if len(self.scored) % 10 else 30  # the first is compiled
            return super().window_losses(state, windows)

    class Noting(LocalSession):
        after = ()

        def orders(self, steps_per_s):
            self.after = (*self.after, len(engine.scored))
            return super().orders(steps_per_s)

    engine, session = Timed(micro_rows=1), Noting()
    monkeypatch.setattr("raygpt.training.clock.time", SimpleNamespace(perf_counter=lambda: engine.now))
    Loop(make_spec(**{"training.steps": 3, "training.log_every": 100}), engine, session).run()
    # Between two evaluations, each of ten parts and a text, after steps 2 and 3.
    assert session.after == (2, 3, 5, 7, 9, 10, 10, 10, 12, 13, 15, 17, 19, 20)
