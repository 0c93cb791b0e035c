"""Trackers, each told for real and read back by something other than what wrote it; and what a restart does."""

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import also

from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.runs import metrics
from raygpt.training import tracking
from raygpt.training.ray.metrics import RayMetrics
from raygpt.training.tracking import LoggedNumbers, Mlflow, TensorBoard, Tracking, Wandb, require


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine").mkdir()
    return str(tmp_path / "mine")


@pytest.fixture
def recipe(tmp_path):
    return load_recipe("tiny", {"run.name": "mine", "run.storage": str(tmp_path)})


def events(first, last):
    """Lines of metrics: each step's loss is a quarter of its number, step 4 is validated."""
    for step in range(first, last + 1):
        yield {"step": step, "loss": step / 4, "lr": 1e-3, "tokens": step * 4096, "time": 1.7e9 + step, "skipped": 0.0}
        if step == 4:
            yield {"step": step, "val_loss": 9.5, "time": 1.7e9 + step}


def log(folder, first, last):
    """metrics.jsonl of a run that went on after the step before the first."""
    file = Path(folder) / "metrics.jsonl"
    kept = [line for line in metrics.read(folder) if line["step"] < first]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*kept, *events(first, last)]))


def tell(make, folder, first, last):
    """A process of its own, as far as a tracker can see: made, told of some steps, closed."""
    warnings = []
    log(folder, first, last)
    told = Tracking({"it": make}, folder, warnings.append)
    told.begin(after=first - 1)
    for event in events(first, last):
        told.record(event)
    told.close()
    assert warnings == []
    assert not any(sender.is_alive() for sender in told._senders)


TOLD_AND_KILLED = """
import os, signal, sys
from raygpt.recipes import load_recipe
from raygpt.runs import metrics
from raygpt.training.tracking import Mlflow, TensorBoard, Tracking, Wandb

make, folder, home = sys.argv[1:]
recipe = load_recipe("tiny", {"run.name": "mine", "run.storage": home})

class Killed:
    def __init__(self, tracker):
        self.last_steps, self.tracker = tracker.last_steps, tracker

    def send(self, lines):
        self.tracker.send([line for line in lines if line.step <= LAST])
        if lines[-1].step >= LAST:
            os.kill(os.getpid(), signal.SIGKILL)

told = Tracking({"it": lambda after: Killed(eval(make))}, folder, print)
lines = metrics.read(folder)
told.begin(0)
for line in lines:
    told.record(line)
told.close()
"""


def tell_and_kill(make, folder, tmp_path, last=6):
    """A real process that logs six steps, and is killed as soon as a tracker was told of the last."""
    log(folder, 1, 6)
    code = TOLD_AND_KILLED.replace("LAST", str(last))
    run = subprocess.run([sys.executable, "-c", code, make, folder, tmp_path], check=False)
    assert run.returncode == -signal.SIGKILL


@pytest.fixture
def tensorboard_events(folder):
    """Steps and values of a tag, as TensorBoard's own reader has them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(tag):
        found = reader.EventAccumulator(f"{folder}/tensorboard")
        found.Reload()
        return [(event.step, event.value) for event in found.Scalars(tag)]

    return read


def test_tensorboard_has_every_step_once_after_a_kill(folder, tensorboard_events, tmp_path):
    pytest.importorskip("tensorboardX")
    tell_and_kill("TensorBoard(folder, after)", folder, tmp_path)
    tell(lambda after: TensorBoard(folder, after), folder, 5, 8)  # killed after step 6, gone on after step 4
    assert tensorboard_events("loss") == [(step, step / 4) for step in range(1, 9)]
    assert tensorboard_events("val_loss") == [(4, 9.5)]
    assert tensorboard_events("lr")[0][1] == pytest.approx(1e-3)


def test_a_tracker_that_is_new_to_a_run_gets_all_of_it(folder, tensorboard_events):
    pytest.importorskip("tensorboardX")
    log(folder, 1, 6)
    tell(lambda after: TensorBoard(folder, after), folder, 7, 8)
    assert tensorboard_events("loss") == [(step, step / 4) for step in range(1, 9)]


@pytest.mark.extended
@pytest.mark.parametrize("last", [6, *also(2)])  # of what is gone on with it lacked step 3; it had all, and more
def test_mlflow_goes_on_with_the_same_run_and_has_every_step_once(last, folder, recipe, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    tell_and_kill("Mlflow(True, recipe, folder)", folder, tmp_path, last=last)
    tell(lambda after: Mlflow(True, recipe, folder), folder, 4, 8)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("raygpt").experiment_id])
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert history == [(step, step / 4) for step in range(1, 9)]
    assert client.get_metric_history(run.info.run_id, "val_loss")[0].timestamp == 1700000004000
    assert run.data.params["model.width"] == "128"
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")


def test_mlflow_writes_plain_files_where_that_is_asked_for(folder, recipe, tmp_path):
    pytest.importorskip("mlflow")
    tell(lambda after: Mlflow(f"file://{tmp_path}/mlruns", recipe, folder), folder, 1, 2)
    (losses,) = (tmp_path / "mlruns").rglob("metrics/loss")
    assert [line.split()[1:3] for line in losses.read_text().splitlines()] == [["0.25", "1"], ["0.5", "2"]]


def wandb_history(file):
    """(step, {metric: value}) of an offline run's file: LevelDB's log format around protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    raw, at, whole = file.read_bytes(), 7, b""  # seven bytes that say whose file it is
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:  # no header fits: the next block
            at += left
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        whole += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or the last part of one
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                yield items["_step"], items


def test_wandb_offline_has_every_step_once_in_the_newest_folder(folder, recipe, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell_and_kill("Wandb('a-project', recipe, folder)", folder, tmp_path)
    time.sleep(1)  # its folders are named by the second
    tell(lambda after: Wandb("a-project", recipe, folder), folder, 4, 8)
    killed, newest = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert killed.name == newest.name  # one id: the same run
    history = list(wandb_history(newest))
    assert [(step, items["loss"]) for step, items in history if "loss" in items] == [(n, n / 4) for n in range(1, 9)]
    assert [(step, items["val_loss"]) for step, items in history if "val_loss" in items] == [(4, 9.5)]


def test_wandb_online_is_told_what_its_server_lacks(folder, recipe, monkeypatch):
    """A killed process had sent the steps until 4; its own file says 6, and the run went on after 5."""
    wandb, sent = pytest.importorskip("wandb"), []

    class Run:
        starting_step = 5

        def log(self, metrics, step):
            sent.append((step, metrics["loss"]))

        def finish(self, exit_code):
            sent.append(f"finished with {exit_code}")

    monkeypatch.setattr(wandb, "init", lambda **settings: Run())
    log(folder, 1, 6)
    tell(lambda after: Wandb("a-project", recipe, folder), folder, 6, 7)
    assert sent == [(5, 5 / 4), (6, 6 / 4), (7, 7 / 4), "finished with 0"]


class Broken:
    """Fails as soon as it is told something."""

    def __init__(self, after):
        self.last_steps = {}

    def send(self, lines):
        raise ConnectionError("server is down\nwith a traceback")

    def close(self, succeeded):
        raise AssertionError("it was left out before")


class Patient(Broken):
    """Takes everything, as slowly as the test says."""

    def __init__(self):
        super().__init__(after=0)
        self.got, self.go_on = [], threading.Event()

    def send(self, lines):
        self.go_on.wait(60)
        self.got += [(line.step, line.metrics) for line in lines]

    def close(self, succeeded):
        self.got.append("closed" if succeeded else "failed")


FAR_OFF = {"skipped": 1.0, "spikes": 4.0, "lambada_acc": 0.5}


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_training_waits_for_none(folder):
    warnings, patient = [], Patient()

    def cannot_start(after):
        raise OSError("no such host")

    told = Tracking({"a": Broken, "b": lambda after: patient, "c": cannot_start}, folder, warnings.append)
    told.begin(0)
    told.record({"step": 1, "loss": 2.0, "time": 5.0, "mfu": None})
    told.record({"step": 1, "restart": True})
    told.record({"step": 2, **FAR_OFF})
    assert patient.got == []  # nobody waited for it
    patient.go_on.set()
    told.close()
    assert patient.got == [(1, {"loss": 2.0}), (1, {"restarts": 1.0}), (2, FAR_OFF), "closed"]
    assert sorted(warnings) == [
        "a failed (server is down) and gets no more metrics; the run continues",
        "c failed (no such host) and gets no more metrics; the run continues",
    ]


def test_a_tracker_hears_that_the_run_failed_and_what_waited_comes_at_once(folder):
    patient, calls = Patient(), []
    patient.send = lambda lines: (patient.go_on.wait(60), calls.append([line.step for line in lines]))
    told = Tracking({"it": lambda after: patient}, folder, print)
    told.begin(0)
    for step in range(1, 6):
        told.record({"step": step, "loss": 1.0})
    patient.go_on.set()
    told.close(succeeded=False)
    assert [step for steps in calls for step in steps] == [1, 2, 3, 4, 5]
    assert len(calls) <= 3  # while the first was waited for, the others came
    assert patient.got == ["failed"]


def test_a_log_that_cannot_be_read_is_no_reason_to_end(folder, monkeypatch):
    warnings = []

    def broken(run_folder):
        raise RaygptError("s3 does not answer")

    monkeypatch.setattr(metrics, "read", broken)
    told = Tracking({"it": Broken}, folder, warnings.append)
    told.begin(5)
    told.close()
    assert warnings[0] == "what was logged so far is not sent to trackers (s3 does not answer)"


@pytest.mark.parametrize(("name", "value"), [("tensorboard", True), ("wandb", "p"), ("mlflow", True)])
def test_a_missing_extra_is_named_in_one_line(name, value, monkeypatch):
    track = load_recipe("tiny", {f"track.{name}": value}).track
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(RaygptError) as caught:
        require(track, "/runs/tiny")
    assert str(caught.value) == f"track.{name} needs the extra {name}: pip install 'raygpt[{name}]'"


def test_what_cannot_be_on_s3_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: sys)
    with pytest.raises(RaygptError, match=r"track\.tensorboard: its files cannot be appended to on s3"):
        require(load_recipe("tiny", ["track.tensorboard=true"]).track, "s3://bucket/runs/tiny")
    with pytest.raises(RaygptError, match=r"track\.mlflow: true writes a file beside the runs"):
        require(load_recipe("tiny", ["track.mlflow=true"]).track, "s3://bucket/runs/tiny")
    require(load_recipe("tiny", ["track.mlflow=http://h:5000", "track.wandb=p"]).track, "s3://bucket/runs/tiny")


@pytest.mark.parametrize(
    ("override", "value"),
    [("true", True), ("false", False), ("http://host:5000", "http://host:5000"), ("databricks", "databricks")],
)
def test_mlflow_is_a_flag_or_an_address_and_survives_the_runs_recipe(override, value, tmp_path):
    recipe = load_recipe("tiny", [f"track.mlflow={override}"])
    assert recipe.track.mlflow == value
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "recipe.yaml").track == recipe.track


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "track.mlflow=somewhere",
            "track.mlflow: 'somewhere' is neither true nor an address; write true, or e.g. http",
        ),
        ("track.mlflow=http://me:secret@host", "track.mlflow: an address with a password in it would be written into"),
        ("track.tensorbord=true", "did you mean 'track.tensorboard'"),
    ],
)
def test_a_wrong_tracker_is_refused_in_one_line(override, message):
    with pytest.raises(RaygptError, match=message.replace(".", r"\.")):
        load_recipe("tiny", [override])


def test_ray_metrics_count_the_restarts_of_a_runs_whole_life(folder, monkeypatch):
    """Gauges as they are set; the endpoint is scraped in test_ray_metrics.py."""
    seen = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name = name.removeprefix("raygpt_")

        def set_default_tags(self, tags):
            assert tags == {"run": "mine"}

        def set(self, value):
            seen[self.name] = value

    monkeypatch.setattr("raygpt.training.ray.metrics.Gauge", Gauge)
    gauges = RayMetrics(folder, after=5)
    assert seen == {"step": 5, "restarts": 0}
    gauges.send(
        [
            LoggedNumbers(3, {"restarts": 1.0}, 0.0),
            LoggedNumbers(5, {"loss": 2.5}, 0.0),
            LoggedNumbers(5, {"restarts": 1.0}, 0.0),
        ]
    )
    assert seen == {"step": 5, "restarts": 2, "loss": 2.5}
    gauges.send([LoggedNumbers(6, {"loss": 2.25, "mfu": 0.4}, 0.0)])
    assert seen == {"step": 6, "restarts": 2, "loss": 2.25, "mfu": 0.4}
    gauges.send(
        [LoggedNumbers(7, dict.fromkeys((*tracking.SENT, *tracking.METRIC_NAMES), 3.0), 0.0)]
    )  # each has a gauge
    assert (seen["skipped"], seen["spikes"], seen["hellaswag_acc_norm"]) == (3.0, 3.0, 3.0)


def test_a_recipe_starts_what_it_names_beside_others(folder, monkeypatch):
    made = []
    monkeypatch.setattr(tracking, "Tracking", lambda makers, run_folder, warn: made.extend(makers))
    recipe = load_recipe("tiny", ["track.tensorboard=true", "track.wandb=p", "track.mlflow=true"])
    tracking.start_tracking(recipe, folder, print, {"Ray metrics": lambda after: None})
    assert made == ["Ray metrics", "track.tensorboard", "track.wandb", "track.mlflow"]
