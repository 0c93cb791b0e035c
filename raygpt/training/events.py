"""What a run tells those who watch it: one small class for each kind of event."""

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
    time: float | None = None  # seconds since 1970, when it was recorded

    def line(self) -> dict[str, Any]:
        """As it is written."""
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
    """The run went on after this step."""

    values: Mapping[str, Any] = field(default_factory=lambda: {"restart": True})


# The course of a run


@dataclass(frozen=True)
class Started(Event):
    """Workers have started; what they compute with, for people."""

    about: Mapping[str, str]


@dataclass(frozen=True)
class BatchSplit(Event):
    """How a batch is cut to fit the devices."""

    text: str


@dataclass(frozen=True)
class Resumed(Event):
    """The run goes on from a checkpoint, or begins from another run's."""

    step: int
    folder: str
    is_fork: bool


@dataclass(frozen=True)
class Sampled(Event):
    """What the model writes at a step, from a prompt of the recipe where it has any."""

    step: int
    text: str
    prompt: str = ""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is whole; how long that took."""

    step: int
    folder: str
    seconds: float


@dataclass(frozen=True)
class ProfileWritten(Event):
    """A trace of some steps is in a file."""

    file: str


@dataclass(frozen=True)
class Stopped(Event):
    """The run was stopped after this step, and saved."""

    step: int


@dataclass(frozen=True)
class Finished(Event):
    """The last step is taken, saved and evaluated."""

    step: int


# Messages for people


@dataclass(frozen=True)
class Message(Event):
    """Text to show at once."""

    text: str


class Warned(Message):
    """Something that is no reason to end."""


class FaultHandled(Message):
    """Workers were lost, or are about to be replaced, and start again."""


class Waiting(Message):
    """The cluster has no room yet."""


class StopRequested(Message):
    """A signal or `raygpt stop` asked the run to save and end."""


class GivenUp(Message):
    """Why the workers are not started again: it becomes the run's error."""


# User functions


@dataclass(frozen=True)
class Reported(Event):
    """What a user function reported, with the path of its checkpoint where there was one."""

    metrics: Mapping[str, Any]
