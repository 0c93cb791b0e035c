"""Exports a run's metrics through Ray's, which Prometheus and Ray's dashboard read."""

from collections.abc import Mapping, Sequence

from ray.util.metrics import Gauge

from raygpt.evaluation.tasks import METRIC_NAMES
from raygpt.training.tracking import LoggedNumbers


class RayMetrics:
    """ray_raygpt_… in Ray's Prometheus endpoint and dashboard, by the tag `run`."""

    DESCRIPTIONS = {  # noqa: RUF012
        "step": "Steps done.",
        "loss": "Training loss of the last logged step.",
        "val_loss": "Last validation loss.",
        "lr": "Learning rate.",
        "grad_norm": "Norm of the gradient before clipping.",
        "skipped": "Skipped steps so far.",
        "spikes": "Steps whose loss or gradient norm was far above what is usual, so far.",
        "tokens": "Tokens trained on.",
        "tokens_per_s": "Tokens per second since the last log line.",
        "mfu": "Share of the devices' peak that the model's arithmetic takes.",
        "data_wait_s": "Seconds waited for data since the last log line.",
        "restarts": "How often the run was started anew.",
    }

    def __init__(self, run_folder: str, after: int):
        self.last_steps: dict[str, int] = {}
        tags = {"run": run_folder.rstrip("/").rsplit("/", 1)[-1]}
        self._gauges = {
            name: Gauge(f"raygpt_{name}", description=text, tag_keys=("run",))
            for name, text in {**self.DESCRIPTIONS, **{name: f"Last {name}." for name in METRIC_NAMES}}.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)
        self._restarts = 0.0  # a gauge, not a counter: a counter would begin at zero in each new process
        self._set({"step": after})

    def send(self, lines: Sequence[LoggedNumbers]) -> None:
        last: dict[str, float] = {}
        for line in lines:
            last |= {**line.metrics, "step": line.step}
            self._restarts += line.metrics.get("restarts", 0.0)
        self._set(last)

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in {**values, "restarts": self._restarts}.items():
            self._gauges[name].set(value)

    def close(self, succeeded: bool) -> None:
        """Nothing to do: the gauges end with the process."""
