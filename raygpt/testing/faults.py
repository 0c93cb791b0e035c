"""Injects faults, to test what a run survives.

    RAYGPT_FAULTS="kill@20:1 hang@35 raise@50:0:always" raygpt train tiny cluster.workers=2

Each is KIND@STEP, then the rank (default 0), `save` for the moment when a checkpoint is written but not yet committed,
and `always` for a fault that repeats whenever its step is reached again. A save may be skipped if the previous one
takes long, so a fault in a save happens in the first save at or after its step.
"""

import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from raygpt import storage
from raygpt.errors import RaygptError

VARIABLE = "RAYGPT_FAULTS"
Kind = Literal["kill", "segfault", "raise", "hang"]
Moment = Literal["step", "save"]


@dataclass(frozen=True)
class Fault:
    """What happens to a worker at a step."""

    kind: Kind
    step: int
    rank: int = 0
    when: Moment = "step"
    once: bool = True

    def is_met(self, step: int, rank: int, when: Moment) -> bool:
        """Whether the fault applies to a worker at this step."""
        has_come = step >= self.step if when == "save" else step == self.step
        return has_come and (rank, when) == (self.rank, self.when)

    def happen(self) -> None:
        """Apply the fault to this process."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # as the operating system does when out of memory
        if self.kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.kind == "raise":
            raise RuntimeError(f"an injected fault at step {self.step}")
        while True:
            time.sleep(60)


@dataclass(frozen=True)
class Strike:
    """A fault that has happened; its last time, if it repeats."""

    number: int  # index of the fault among the requested ones
    step: int  # that the worker reached, or that was being saved
    reached: int  # the last step that the worker had taken: training continues while a checkpoint is written
    time: float  # in seconds since 1970, as in the metrics


@dataclass
class Faults:
    """The faults of a run; those that happened are recorded in its directory, since the worker may die."""

    faults: tuple[Fault, ...] = ()
    run_folder: str = ""
    _reached: int = 0  # the last step that this worker has taken

    def strike(self, step: int, rank: int, when: Moment = "step") -> None:
        """Apply the faults of a step: a worker reached it, or has written its part of that step's checkpoint."""
        self._reached = step - 1 if when == "step" else max(step, self._reached)
        for number, fault in enumerate(self.faults):
            if fault.is_met(step, rank, when) and not (fault.once and storage.exists(self._note(number))):
                self._write_down(Strike(number, step, self._reached, time.time()))
                fault.happen()

    def struck(self) -> list[Strike]:
        """The faults that have happened, in order."""
        notes = [note for note in map(self._note, range(len(self.faults))) if storage.exists(note)]
        return sorted((Strike(**storage.read_json(note)) for note in notes), key=lambda strike: strike.time)

    def _note(self, number: int) -> str:
        return storage.join(self.run_folder, "faults", str(number))

    def _write_down(self, strike: Strike) -> None:
        storage.write_json(self._note(strike.number), asdict(strike))


def from_environment(run_folder: str) -> Faults:
    """The faults that the environment variable requests; usually none."""
    return Faults(tuple(map(parse, os.environ.get(VARIABLE, "").split())), run_folder)


def parse(text: str) -> Fault:
    """Parse a fault, e.g. kill@20:1:always."""
    found = re.fullmatch(r"([a-z]+)@([0-9]+)((?::(?:[0-9]+|save|always))*)", text)
    if not found or found[1] not in get_args(Kind):
        raise RaygptError(
            f"{VARIABLE}: {text!r} is no fault; write {'|'.join(get_args(Kind))}@STEP[:RANK][:save][:always]"
        )
    words = found[3].split(":")[1:]
    details: dict[str, Any] = {"rank": next((int(word) for word in words if word.isdecimal()), 0)}
    details |= {"when": "save" if "save" in words else "step", "once": "always" not in words}
    return Fault(found[1], int(found[2]), **details)  # type: ignore[arg-type]
