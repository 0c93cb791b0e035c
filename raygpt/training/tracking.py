"""Who else is told of a run's metrics: TensorBoard, Weights & Biases, MLflow, and Ray's own metrics.

    tracking = start_tracking(recipe, run_folder, warn)   # in one worker
    tracking.begin(after=100)                             # as the run begins, or goes on after a step
    tracking.record({"step": 110, "loss": 3.2, …})        # each line of metrics.jsonl, as it is logged
    tracking.close()

A thread does the telling, so training never waits for a server. A tracker that fails is left out from there on, with
a warning: no run ends because somebody who watches it could not be reached. After a restart the same tracker's run is
gone on with, found by the run's folder: it is told again from metrics.jsonl what it may have lost with the process that
was killed, and no step twice.
"""

import hashlib
import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from raygpt import storage
from raygpt.config import Recipe, Track
from raygpt.errors import RaygptError, first_line
from raygpt.evaluation.tasks import SCORES
from raygpt.recipes.explain import flat
from raygpt.runs import metrics as logged
from raygpt.training.session import Event

SENT = ("loss", "val_loss", "lr", "grad_norm", "skipped", "spikes", "tokens", "tokens_per_s", "mfu", "data_wait_s")
EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # the extra's name and its module
CLOSING_S = 60.0  # what is left unsent after that is not worth waiting for


class Tracker(Protocol):
    """One of those who are told."""

    sent: dict[str, int]  # metric -> the last step that it has of it

    def begin(self, after: int) -> bool:
        """What comes next is of the steps after this one; whether it may lack some of what was logged until there."""
        ...

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None: ...

    def close(self) -> None: ...


def require(track: Track, run_folder: str) -> None:
    """Refuse, before anything is prepared, what is not installed or cannot be where the run lies."""
    for name, module in EXTRAS.items():
        if getattr(track, name) and importlib.util.find_spec(module) is None:
            raise RaygptError(f"track.{name} needs the extra {name}: pip install 'raygpt[{name}]'")
    if track.tensorboard and storage.is_remote(run_folder):
        raise RaygptError(
            "track.tensorboard: its files only grow on a disk; use a folder for run.storage, or track.mlflow"
        )
    if track.mlflow is True and storage.is_remote(run_folder):
        raise RaygptError("track.mlflow: true is a file beside the runs, which s3 has not; write a server's address")


def start_tracking(recipe: Recipe, run_folder: str, warn: Callable[[str], None]) -> "Tracking":
    """All that a recipe asks for, and Ray's metrics."""
    makers: dict[str, Callable[[], Tracker]] = {"Ray metrics": lambda: RayMetrics(run_folder)}
    if recipe.track.tensorboard:
        makers["track.tensorboard"] = lambda: TensorBoard(run_folder)
    if project := recipe.track.wandb:
        makers["track.wandb"] = lambda: Wandb(project, recipe, run_folder)
    if uri := recipe.track.mlflow:
        makers["track.mlflow"] = lambda: Mlflow(uri, recipe, run_folder)
    return Tracking(makers, run_folder, warn)


class Tracking:
    """Tells all trackers, in a thread of its own."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], run_folder: str, warn: Callable[[str], None]):
        self._makers, self._run_folder, self._warn = makers, run_folder, warn
        self._trackers: dict[str, Tracker] = {}
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def begin(self, after: int) -> None:
        def begin(tracker: Tracker) -> None:
            lines = logged.read(self._run_folder) if tracker.begin(after) else []
            for line in lines:
                if line["step"] <= after:
                    _tell(tracker, line)

        self._waiting.put(begin)

    def record(self, event: Event) -> None:
        self._waiting.put(lambda tracker: _tell(tracker, event))

    def close(self) -> None:
        """Until everything is told, or a minute has passed."""
        self._waiting.put(lambda tracker: tracker.close())
        self._waiting.put(None)
        self._thread.join(CLOSING_S)

    def _work(self) -> None:
        for name, make in self._makers.items():
            self._try(name, lambda name=name, make=make: self._trackers.update({name: make()}))  # type: ignore[misc]
        while (tell := self._waiting.get()) is not None:
            for name, tracker in list(self._trackers.items()):
                self._try(name, lambda tell=tell, tracker=tracker: tell(tracker))  # type: ignore[misc]

    def _try(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            self._trackers.pop(name, None)
            self._warn(f"{name} failed ({first_line(error)}) and is not told any more; the run goes on")


def _tell(tracker: Tracker, event: Event) -> None:
    """A line of metrics, less what the tracker has of that step already."""
    step = int(event["step"])
    metrics = {name: float(event[name]) for name in (*SENT, *SCORES) if event.get(name) is not None}
    metrics |= {"restarts": 1.0} if event.get("restart") else {}
    new = {name: value for name, value in metrics.items() if step > tracker.sent.get(name, -1)}
    if new:
        tracker.send(step, new, float(event.get("time", 0.0)))
        tracker.sent |= dict.fromkeys(new, step)


class TensorBoard:
    """Event files in RUN/tensorboard: tensorboard --logdir RUN. Each line is in them at once: a kill costs none."""

    def __init__(self, run_folder: str):
        self.sent: dict[str, int] = {}
        self._folder = Path(storage.join(run_folder, "tensorboard"))
        self._writer: Any = None

    def begin(self, after: int) -> bool:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        is_new = not self._folder.is_dir()
        self._folder.mkdir(exist_ok=True)
        # Files are named by the second, and read in the order of their names.
        self._writer = EventsWriter(str(self._folder / "events"), f".{after:012d}")
        if not is_new:  # what older files say of later steps does not count any more
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=after + 1, session_log=start))
        return is_new

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.write_event(Event(wall_time=time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class Wandb:
    """A run of a Weights & Biases project; offline with WANDB_MODE=offline, its files then lie in RUN/wandb.

    Lines wait in memory before they are written or sent, and are lost with a process that is killed. Online, W&B says
    where its run ends; an offline run cannot know, so each process's folder gets the whole run: the newest counts.
    """

    def __init__(self, project: str, recipe: Recipe, run_folder: str):
        import wandb

        self._run: Any = wandb.init(
            project=project,
            id=_id_of(run_folder),
            name=recipe.run.name,
            config=flat(recipe.to_dict()),
            dir=None if storage.is_remote(run_folder) else run_folder,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self.sent = dict.fromkeys((*SENT, *SCORES, "restarts"), self._run.starting_step - 1)

    def begin(self, after: int) -> bool:
        return True

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({**metrics, "time": time}, step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service writes the end of the file after that, and is waited for here


class Mlflow:
    """A run of the MLflow experiment `raygpt`: on a server, or in mlflow.db beside the runs."""

    def __init__(self, uri: str | bool, recipe: Recipe, run_folder: str):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a file: address is asked for by name
        from mlflow import MlflowClient

        home = run_folder.rpartition("/")[0]
        self._client: Any = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db" if uri is True else str(uri))
        self._run = self._find(run_folder) or self._make(recipe, run_folder)
        names = self._client.get_run(self._run).data.metrics
        self.sent = {name: max(m.step for m in self._client.get_metric_history(self._run, name)) for name in names}

    def _find(self, run_folder: str) -> str | None:
        experiment = self._client.get_experiment_by_name("raygpt")
        mine = f"tags.`raygpt.run` = '{_id_of(run_folder)}'"
        found = self._client.search_runs([experiment.experiment_id], mine) if experiment else []
        return str(found[0].info.run_id) if found else None

    def _make(self, recipe: Recipe, run_folder: str) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name("raygpt")
        number = experiment.experiment_id if experiment else self._client.create_experiment("raygpt")
        tags = {"raygpt.run": _id_of(run_folder), "raygpt.folder": run_folder}
        run = self._client.create_run(number, tags=tags, run_name=recipe.run.name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(recipe.to_dict()).items()]
        for first in range(0, len(params), 100):  # as many as a request may hold
            self._client.log_batch(run, params=params[first : first + 100])
        return str(run)

    def begin(self, after: int) -> bool:
        self._client.update_run(self._run, status="RUNNING")
        return True

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(
            self._run, metrics=[Metric(name, value, int(time * 1000), step) for name, value in metrics.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


class RayMetrics:
    """ray_raygpt_… in Ray's Prometheus endpoint and dashboard, by the tag `run`."""

    DESCRIPTIONS = {  # noqa: RUF012
        "step": "Steps done.",
        "loss": "Training loss of the last logged step.",
        "val_loss": "Last validation loss.",
        "lr": "Learning rate.",
        "grad_norm": "Norm of the gradient before clipping.",
        "skipped": "Steps that were left out so far.",
        "spikes": "Steps whose loss or gradient norm was far above what is usual, so far.",
        "tokens": "Tokens trained on.",
        "tokens_per_s": "Tokens per second since the last log line.",
        "mfu": "Share of the devices' peak that the model's arithmetic takes.",
        "data_wait_s": "Seconds waited for data since the last log line.",
        "restarts": "How often the run was started anew.",
    }

    def __init__(self, run_folder: str):
        from ray.util.metrics import Gauge

        self.sent: dict[str, int] = {}
        tags = {"run": run_folder.rstrip("/").rsplit("/", 1)[-1]}
        self._gauges = {
            name: Gauge(f"raygpt_{name}", description=text, tag_keys=("run",))
            for name, text in {**self.DESCRIPTIONS, **{name: f"Last {name}." for name in SCORES}}.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)
        self._restarts = len(logged.restarts(logged.read(run_folder)))

    def begin(self, after: int) -> bool:
        """A gauge, not a counter: a counter would begin at zero in each new process."""
        self._gauges["step"].set(after)
        self._gauges["restarts"].set(self._restarts)
        return False

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._restarts += int(metrics.get("restarts", 0))
        for name, value in {**metrics, "step": step, "restarts": self._restarts}.items():
            self._gauges[name].set(value)

    def close(self) -> None:
        """They go with the process."""


def _id_of(run_folder: str) -> str:
    """The same for the same folder, whoever asks: what a tracker's run is found by after a restart."""
    return hashlib.blake2b(storage.absolute(run_folder).encode(), digest_size=8).hexdigest()
