"""Who else is told of a run's metrics: TensorBoard, Weights & Biases, MLflow, and Ray's own metrics.

    tracking = start_tracking(recipe, run_folder, warn)   # in one worker
    tracking.begin(after=100)                             # as the run begins, or goes on after a step
    tracking.record({"step": 110, "loss": 3.2, …})        # each line of metrics.jsonl, as it is logged
    tracking.close()

A thread does the telling, so training never waits for a server. A tracker that fails is left out from there on, with
a warning: no run ends because somebody who watches it could not be reached. After a restart the same tracker's run is
gone on with, found by the run's folder, and a step is not told twice.
"""

import hashlib
import importlib.util
import json
import os
import queue
import threading
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

    def begin(self, after: int) -> None:
        """What comes next is of the steps after this one."""
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
    return Tracking(makers, warn)


class Tracking:
    """Tells all trackers, in a thread of its own."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], warn: Callable[[str], None]):
        self._makers, self._warn = makers, warn
        self._trackers: dict[str, Tracker] = {}
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def begin(self, after: int) -> None:
        self._waiting.put(lambda tracker: tracker.begin(after))

    def record(self, event: Event) -> None:
        """A line of metrics; what a tracker has of that step already is left out."""
        metrics = {name: float(event[name]) for name in (*SENT, *SCORES) if event.get(name) is not None}
        metrics |= {"restarts": 1.0} if event.get("restart") else {}
        step, moment = int(event["step"]), float(event.get("time", 0.0))

        def tell(tracker: Tracker) -> None:
            new = {name: value for name, value in metrics.items() if step > tracker.sent.get(name, -1)}
            if new:
                tracker.send(step, new, moment)

        self._waiting.put(tell)

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


class TensorBoard:
    """Event files in RUN/tensorboard: tensorboard --logdir RUN."""

    def __init__(self, run_folder: str):
        self.sent: dict[str, int] = {}
        self._folder = storage.join(run_folder, "tensorboard")
        self._writer: Any = None

    def begin(self, after: int) -> None:
        """From here on what older files say of later steps does not count."""
        from tensorboardX import SummaryWriter

        self.close()
        is_new = not Path(self._folder).is_dir()
        purge = None if is_new else after + 1
        # Files are named by the second, and read in the order of their names.
        self._writer = SummaryWriter(self._folder, purge_step=purge, filename_suffix=f".{after:012d}", flush_secs=10)

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class Wandb:
    """A run of a Weights & Biases project; offline with WANDB_MODE=offline, its files then lie in RUN/wandb.

    An offline run cannot ask what an earlier process sent, so that is kept beside it.
    """

    def __init__(self, project: str, recipe: Recipe, run_folder: str):
        import wandb

        self._marks = storage.join(run_folder, "wandb-sent.json")
        self.sent: dict[str, int] = json.loads(storage.read_bytes(self._marks)) if storage.exists(self._marks) else {}
        self._run: Any = wandb.init(
            project=project,
            id=_id_of(run_folder),
            name=recipe.run.name,
            config=flat(recipe.to_dict()),
            dir=None if storage.is_remote(run_folder) else run_folder,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )

    def begin(self, after: int) -> None:
        """It has the steps that it has: they are the same when they come again."""

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({**metrics, "time": time}, step=step)
        self.sent |= dict.fromkeys(metrics, step)
        storage.write_bytes(self._marks, json.dumps(self.sent).encode())

    def close(self) -> None:
        self._run.finish()


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

    def begin(self, after: int) -> None:
        self._client.update_run(self._run, status="RUNNING")

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

    def begin(self, after: int) -> None:
        """A gauge, not a counter: a counter would begin at zero in each new process."""
        self._gauges["step"].set(after)
        self._gauges["restarts"].set(self._restarts)

    def send(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._restarts += int(metrics.get("restarts", 0))
        for name, value in {**metrics, "step": step, "restarts": self._restarts}.items():
            self._gauges[name].set(value)

    def close(self) -> None:
        """They go with the process."""


def _id_of(run_folder: str) -> str:
    """The same for the same folder, whoever asks: what a tracker's run is found by after a restart."""
    return hashlib.blake2b(storage.absolute(run_folder).encode(), digest_size=8).hexdigest()
