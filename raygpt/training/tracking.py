"""Sends a run's metrics to TensorBoard, Weights & Biases and MLflow. ray/metrics.py does the same for Ray's metrics.

    tracking = start_tracking(recipe, run_folder, warn, {})   # in one worker
    tracking.begin(after=100)                             # as the run starts, or resumes after a step
    tracking.record({"step": 110, "loss": 3.2, …})        # each line of metrics.jsonl, as it is logged
    tracking.close()

Threads send the metrics, so training never waits for a server. A tracker that fails is dropped with a warning, and the
run continues. After a restart the same tracker's run is continued (found by the run's folder): it gets from
metrics.jsonl what it may have lost with the killed process, and no step twice.
"""

import functools
import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raygpt import storage
from raygpt.config import Recipe, Track
from raygpt.errors import RaygptError, first_line
from raygpt.evaluation.tasks import METRIC_NAMES
from raygpt.recipes.explain import flat
from raygpt.runs import metrics as logged
from raygpt.runs.metrics import Line

SENT = ("loss", "val_loss", "lr", "grad_norm", "skipped", "spikes", "tokens", "tokens_per_s", "mfu", "data_wait_s")
NAMES = (*SENT, *METRIC_NAMES, "restarts")
EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # the extra's name and its module
CLOSING_S = 60.0  # how long to wait for unsent metrics at the end
FAILED_S = 10.0  # the same if an error ends the run


class LoggedNumbers(NamedTuple):
    """The numbers of a line of metrics, as a tracker gets them."""

    step: int
    metrics: dict[str, float]
    time: float


class Tracker(Protocol):
    """A destination of metrics."""

    last_steps: dict[str, int]  # metric -> the last step of it that the tracker had when it was opened

    def send(self, lines: Sequence[LoggedNumbers]) -> None: ...

    def close(self, succeeded: bool) -> None: ...


Make = Callable[[int], Tracker]  # opens a tracker for a run that starts, or resumes after a step


def require(track: Track, run_folder: str) -> None:
    """Refuse trackers that are not installed or do not work with the run's storage, before anything is prepared."""
    for name, module in EXTRAS.items():
        if getattr(track, name) and importlib.util.find_spec(module) is None:
            raise RaygptError(f"track.{name} needs the extra {name}: pip install 'raygpt[{name}]'")
    if track.tensorboard and storage.is_remote(run_folder):
        raise RaygptError(
            "track.tensorboard: its files cannot be appended to on s3; use a folder for run.storage, or track.mlflow"
        )
    if track.mlflow is True and storage.is_remote(run_folder):
        raise RaygptError(
            "track.mlflow: true writes a file beside the runs, which s3 cannot hold; write a server's address"
        )


def start_tracking(
    recipe: Recipe, run_folder: str, warn: Callable[[str], None], others: Mapping[str, Make]
) -> "Tracking":
    """Start the recipe's trackers, and others by name."""
    makers = dict(others)
    if recipe.track.tensorboard:
        makers["track.tensorboard"] = lambda after: TensorBoard(run_folder, after)
    if project := recipe.track.wandb:
        makers["track.wandb"] = lambda after: Wandb(project, recipe, run_folder)
    if uri := recipe.track.mlflow:
        makers["track.mlflow"] = lambda after: Mlflow(uri, recipe, run_folder)
    return Tracking(makers, run_folder, warn)


class Tracking:
    """Sends metrics to all trackers, each in its own thread, so that none waits for another."""

    def __init__(self, makers: Mapping[str, Make], run_folder: str, warn: Callable[[str], None]):
        self._makers, self._run_folder, self._warn = makers, run_folder, warn
        self._senders: list[_Sender] = []

    def begin(self, after: int) -> None:
        try:
            lines = [line for line in logged.read(self._run_folder) if line["step"] <= after]
        except (OSError, RaygptError) as error:
            self._warn(f"what was logged so far is not sent to trackers ({first_line(error)})")
            lines = []
        self._senders = [
            _Sender(name, functools.partial(make, after), lines, self._warn) for name, make in self._makers.items()
        ]

    def record(self, line: Line) -> None:
        for sender in self._senders:
            sender.waiting.put(line)

    def close(self, succeeded: bool = True) -> None:
        """Wait until everything is sent, or time is up."""
        until = time.monotonic() + (CLOSING_S if succeeded else FAILED_S)
        for sender in self._senders:
            sender.waiting.put(succeeded)
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))


class _Sender(threading.Thread):
    """Sends lines to one tracker: first those that it missed earlier, then the queue, several at a time."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], lines: Sequence[Line], warn: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._make, self._lines, self._warn = make, lines, warn
        self.waiting: queue.SimpleQueue[Line | bool] = queue.SimpleQueue()  # the last item: whether the run ended well
        self.start()

    def run(self) -> None:
        try:
            tracker, end = self._make(), None
            _send(tracker, self._lines)
            while end is None:
                waiting = [self.waiting.get()]
                while not self.waiting.empty():
                    waiting.append(self.waiting.get())
                end = next((one for one in waiting if isinstance(one, bool)), None)
                _send(tracker, [one for one in waiting if not isinstance(one, bool)])
            tracker.close(end)
        except (Exception, SystemExit) as error:  # W&B exits if its service has failed
            self._warn(f"{self.name} failed ({first_line(error)}) and gets no more metrics; the run continues")


def _send(tracker: Tracker, lines: Sequence[Line]) -> None:
    """Send lines of metrics, without what the tracker already has."""
    numbers = []
    for line in lines:
        step = int(line["step"])
        metrics = {name: float(line[name]) for name in (*SENT, *METRIC_NAMES) if line.get(name) is not None}
        metrics |= {"restarts": 1.0} if line.get("restart") else {}
        new = {name: value for name, value in metrics.items() if step > tracker.last_steps.get(name, -1)}
        if new:
            numbers.append(LoggedNumbers(step, new, float(line.get("time", 0.0))))
    if numbers:
        tracker.send(numbers)


class TensorBoard:
    """Event files in RUN/tensorboard: tensorboard --logdir RUN. Each line is in them at once: a kill costs none.

    The messages are made here because tensorboardX's SummaryWriter hands them to a queue that its flush() does not wait
    for: a process that was killed after flush() had lost 1 or 2 lines of 100 (tensorboardX 2.6.5). EventsWriter, below
    it, writes at once.
    """

    def __init__(self, run_folder: str, after: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = Path(storage.join(run_folder, "tensorboard"))
        is_new = not folder.is_dir()
        folder.mkdir(exist_ok=True)
        # Files are named by the second, and read in the order of their names.
        self._writer: Any = EventsWriter(str(folder / "events"), f".{after:012d}")
        self.last_steps: dict[str, int] = {}
        if not is_new:  # what older files say of this step, which may be validated again, and of later ones is void
            self.last_steps = dict.fromkeys(NAMES, after - 1)
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=after, session_log=start))

    def send(self, lines: Sequence[LoggedNumbers]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for line in lines:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.metrics.items()]
            self._writer.write_event(Event(wall_time=line.time, step=line.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, succeeded: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of a Weights & Biases project; offline with WANDB_MODE=offline, its files then lie in RUN/wandb.

    W&B buffers lines in memory, and a killed process loses them. Online, W&B reports the last step that it has; offline
    that is unknown, so each process's folder gets the whole run, and the newest counts.
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
        self.last_steps = dict.fromkeys(NAMES, self._run.starting_step - 1)

    def send(self, lines: Sequence[LoggedNumbers]) -> None:
        for line in lines:
            self._run.log({**line.metrics, "time": line.time}, step=line.step)

    def close(self, succeeded: bool) -> None:
        import wandb

        self._run.finish(exit_code=0 if succeeded else 1)
        wandb.teardown()  # waits for its service, which writes the end of the file


class Mlflow:
    """A run of the MLflow experiment `raygpt`: on a server, or in mlflow.db beside the runs."""

    def __init__(self, uri: str | bool, recipe: Recipe, run_folder: str):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # needed for a file: address
        from mlflow import MlflowClient

        home = run_folder.rpartition("/")[0]
        self._client: Any = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db" if uri is True else str(uri))
        self._run = self._find(run_folder) or self._make(recipe, run_folder)
        self._client.update_run(self._run, status="RUNNING")
        latest = self._client.get_run(self._run).data._metric_objs  # by their steps; `metrics` has only the values
        self.last_steps = {metric.key: metric.step for metric in latest}

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
        for first in range(0, len(params), 100):  # the most that one request may have
            self._client.log_batch(run, params=params[first : first + 100])
        return str(run)

    def send(self, lines: Sequence[LoggedNumbers]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(line.time * 1000), line.step)
            for line in lines
            for name, value in line.metrics.items()
        ]
        for first in range(0, len(metrics), 1000):  # the most that one request may have
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, status="FINISHED" if succeeded else "FAILED")


def _id_of(run_folder: str) -> str:
    """An id that depends on the folder alone: after a restart the tracker's run is found by it."""
    return storage.digest(storage.absolute(run_folder))
