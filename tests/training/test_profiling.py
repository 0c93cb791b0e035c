"""A profile of some steps: written by each engine's profiler, and what Perfetto needs is in it."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import gzip
import json
from pathlib import Path

import pytest
from small_loop import FakeEngine, make_spec, run, steps_of, texts_of  # noqa: F401

from raygpt.errors import RaygptError, StorageError
from raygpt.training.events import CheckpointSaved, Warned
from raygpt.training.profiling import Profile, parse_steps


def named(engine, name):
    """A piece of work that the engine's profiler writes down under a name."""
    if engine == "torch":
        import torch

        return torch.profiler.record_function(name)
    import jax

    return jax.profiler.TraceAnnotation(name)


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_the_named_steps_are_traced_and_no_others(engine, tmp_path):
    profile, waited, files = Profile(2, 3, str(tmp_path), engine), [], []
    for step in range(1, 6):
        profile.before(step)
        with named(engine, f"work of step {step}"):
            pass
        files.append(profile.after(step, lambda step=step: waited.append(step)))
    assert profile.close() is None
    file = str(tmp_path / "profile" / "steps-2-3.json.gz")
    assert files == [None, None, file, None, None]
    assert waited == [3]
    events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {name for name in names if name.startswith("work of")} == {"work of step 2", "work of step 3"}
    if engine == "jax":  # TensorBoard's plugin finds its own
        assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))


class Tracer:
    """Notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def start(self, folder):
        self.asked.append("start")

    def stop(self, folder):
        self.asked.append("stop")
        (folder / "it.gz").write_bytes(b"trace")
        return folder / "it.gz"


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        (range(1, 5), []),  # ended before
        (range(9, 12), []),  # resumed behind
        (range(7, 12), ["start", "stop"]),  # resumed among them
        (range(1, 7), ["start", "stop"]),  # ended among them
    ],
)
def test_a_run_that_begins_or_ends_elsewhere_keeps_what_there_is(steps, asked, tmp_path):
    profile = Profile(5, 8, str(tmp_path), "torch")
    tracer = profile._tracer = Tracer()
    for step in steps:
        profile.before(step)
        profile.after(step)
    profile.close()
    assert tracer.asked == asked
    assert Path(tmp_path, "profile", "steps-5-8.json.gz").is_file() == bool(asked)


def test_a_profile_that_cannot_be_written_costs_a_warning(make_spec, monkeypatch):
    def refuse(profile):
        raise StorageError("No space left on device")

    monkeypatch.setattr(Profile, "close", refuse)
    events = run(make_spec(), FakeEngine())
    assert texts_of(events, Warned) == ["the profile could not be kept (No space left on device); training continues"]
    assert steps_of(events, CheckpointSaved) == [10]


@pytest.mark.parametrize("text", ["20", "25:20", "0:3", "a:b", "1:2:3", "-1:3", ""])
def test_steps_that_are_none_are_refused_in_one_line(text):
    with pytest.raises(RaygptError) as caught:
        parse_steps(text)
    assert str(caught.value) == (
        f"--profile {text!r} is not FIRST:LAST, two steps from 1 on; write e.g. --profile 20:25"
    )
    assert parse_steps("20:25") == (20, 25)
