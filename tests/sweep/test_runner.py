"""Many runs at once: how many, what an error or a stop does to the others, and what is not trained again."""

import threading
import time

import pytest
from here import SMALL, Here, make_runner, write_text

from raygpt.errors import RaygptError, StoppedError
from raygpt.recipes import load_recipe
from raygpt.sweep.runner import Leg, Runner


@pytest.fixture
def legs(tmp_path):
    text = write_text(tmp_path / "tokens")
    changes = {**SMALL, "data.source": str(text), "run.storage": str(tmp_path), "training.steps": 20}
    return [Leg(load_recipe("tiny", {**changes, "run.name": f"run-{n}"})) for n in range(4)]


def test_as_many_are_trained_at_once_as_there_is_room_for(legs, tmp_path):
    both, here = threading.Barrier(2, timeout=60), Here()

    def train(recipe, watch, until):
        both.wait()  # nobody comes past unless two are there
        return here.train(recipe, watch, until)

    Runner(str(tmp_path), 2, lambda leg, event: None, lambda: None, threading.Event(), train).train(legs)
    assert sorted(name for name, _ in here.trained) == [f"run-{n}" for n in range(4)]
    assert all(leg.is_done for leg in legs)


def test_what_is_done_is_not_trained_again_and_a_run_goes_on_from_where_it_was_to_stop(legs, tmp_path):
    first = Leg(legs[0].recipe, until=10)
    here = Here()
    make_runner(str(tmp_path), here).train([first, legs[1]])
    assert first.is_done
    assert not legs[0].is_done
    here = Here()
    make_runner(str(tmp_path), here).train([first, *legs[:2]])
    assert here.trained == [("run-0", 20)]


def test_an_error_ends_the_others_and_is_raised_and_a_divergence_is_not(legs, tmp_path):
    here = Here()

    def train(recipe, watch, until):
        return RaygptError("the disk is full") if recipe.run.name == "run-1" else here.train(recipe, watch, until)

    runner = Runner(str(tmp_path), 1, lambda leg, event: None, lambda: None, threading.Event(), train)
    with pytest.raises(RaygptError, match="the disk is full"):
        runner.train(legs)
    assert here.trained == [("run-0", 20)]
    wild = {**legs[1].recipe.to_dict(), "optimizer": {"kind": "muon", "learning_rate": 1e5}}
    diverging = Leg(load_recipe("tiny", wild))
    runner = make_runner(str(tmp_path), here)
    runner.train([diverging, *legs[2:]])
    assert runner.diverged == {"run-1"}
    assert legs[3].is_done


def test_a_stop_lets_running_runs_save_and_begins_no_others(legs, tmp_path):
    here, stopping = Here(), threading.Event()

    def train(recipe, watch, until):
        stopping.set()
        deadline = time.monotonic() + 60
        while not request.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return here.train(recipe, watch, until)

    request = tmp_path / "run-0" / "stop"  # how `raygpt train` in the thread hears of it
    runner = Runner(str(tmp_path), 1, lambda leg, event: None, lambda: None, stopping, train)
    with pytest.raises(StoppedError, match="the same command goes on"):
        runner.train(legs)
    assert here.trained == [("run-0", 20)]
    assert request.exists()
