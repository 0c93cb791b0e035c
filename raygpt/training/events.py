"""Events of a run, one small class for each kind. The console, the trackers and the driver receive them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Event:
    """Base of all events."""


# Metrics: the lines of metrics.jsonl


@dataclass(frozen=True)
class Metrics(Event):
    """A line of metrics.jsonl."""

    step: int
    values: Mapping[str, Any] = field(default_factory=dict)
    time: float | None = None  # when it was recorded, in seconds since 1970

    def line(self) -> dict[str, Any]:
        """The line as a dict, as it is written."""
        return {"step": self.step, **self.values, **({} if self.time is None else {"time": self.time})}


@dataclass(frozen=True)
class StepLogged(Metrics):
    """A step of training: loss, grad_norm, lr, tokens, data_wait_s; some of skipped, spikes, tokens_per_s, mfu."""

    @property
    def loss(self) -> float:
        return float(self.values["loss"])


@dataclass(frozen=True)
class Validated(Metrics):
    """An evaluation: val_loss where there is text to validate on, and the scores of tasks."""

    @property
    def val_loss(self) -> float | None:
        return self.values.get("val_loss")


@dataclass(frozen=True)
class Restarted(Metrics):
    """The run was resumed after this step."""

    values: Mapping[str, Any] = field(default_factory=lambda: {"restart": True})


# The course of a run


@dataclass(frozen=True)
class Started(Event):
    """Workers have started; a description of what they compute with."""

    about: Mapping[str, str]


@dataclass(frozen=True)
class BatchSplit(Event):
    """How a batch is split to fit the devices."""

    text: str


@dataclass(frozen=True)
class Resumed(Event):
    """The run was restored from a checkpoint, its own or another run's."""

    step: int
    folder: str
    is_fork: bool


@dataclass(frozen=True)
class Sampled(Event):
    """Text that the model generated at a step, from a prompt of the recipe if it has any."""

    step: int
    text: str
    prompt: str = ""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was committed; how long that took."""

    step: int
    folder: str
    seconds: float


@dataclass(frozen=True)
class ProfileWritten(Event):
    """The profile of some steps was written to a file."""

    file: str


@dataclass(frozen=True)
class Stopped(Event):
    """The run was stopped after this step, and saved."""

    step: int


@dataclass(frozen=True)
class Finished(Event):
    """The last step was taken, saved and evaluated."""

    step: int


# Messages for the console


@dataclass(frozen=True)
class Message(Event):
    """Text to show immediately."""

    text: str


class Warned(Message):
    """A problem that does not end the run."""


class FaultHandled(Message):
    """Workers were lost or are about to be replaced; they start again."""


class Waiting(Message):
    """The cluster has no room yet."""


@dataclass(frozen=True)
class StopRequested(Message):
    """A signal or `raygpt stop` asked the run to save and end."""

    by_signal: bool = False


class GivenUp(Message):
    """Why the workers are not started again; this becomes the run's error."""


# User functions


@dataclass(frozen=True)
class Reported(Event):
    """Metrics that a user function reported, and the path of its checkpoint if there was one."""

    metrics: Mapping[str, Any]
