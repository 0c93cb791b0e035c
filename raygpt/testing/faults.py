"""Faults on purpose, to see what a run survives.

    RAYGPT_FAULTS="kill@20:1 hang@35 raise@50:0:always" raygpt train tiny cluster.workers=2

Each is KIND@STEP, then the rank it strikes (0 unless said), `save` for the moment when the step's checkpoint is
written but not yet committed, and `always` for one that strikes again whenever its step comes again.
"""

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raygpt import storage
from raygpt.errors import RaygptError

VARIABLE = "RAYGPT_FAULTS"
Kind = Literal["kill", "segfault", "raise", "hang"]
Moment = Literal["step", "save"]


@dataclass(frozen=True)
class Fault:
    """What happens when a worker comes to a step."""

    kind: Kind
    step: int
    rank: int = 0
    when: Moment = "step"
    once: bool = True

    def happen(self) -> None:
        """Do it to this process."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # also what an operating system does that is out of memory
        if self.kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.kind == "raise":
            raise RuntimeError(f"a fault was asked for at step {self.step}")
        while True:
            time.sleep(60)


@dataclass(frozen=True)
class Faults:
    """All that are to strike a run; what has struck is noted in its directory, since the worker may not live on."""

    faults: tuple[Fault, ...] = ()
    run_folder: str = ""

    def strike(self, step: int, rank: int, when: Moment = "step") -> None:
        """A worker comes to a step."""
        for number, fault in enumerate(self.faults):
            if (fault.step, fault.rank, fault.when) == (step, rank, when) and self._is_due(number, fault):
                fault.happen()

    def _is_due(self, number: int, fault: Fault) -> bool:
        note = storage.join(self.run_folder, "faults", str(number))
        if fault.once and storage.exists(note):
            return False
        storage.write_bytes(note, b"struck")
        return True


def from_environment(run_folder: str) -> Faults:
    """The faults that the environment asks for; mostly none."""
    return Faults(tuple(map(parse, os.environ.get(VARIABLE, "").split())), run_folder)


def parse(text: str) -> Fault:
    """A fault of its text, e.g. kill@20:1:always."""
    found = re.fullmatch(r"([a-z]+)@([0-9]+)((?::(?:[0-9]+|save|always))*)", text)
    if not found or found[1] not in get_args(Kind):
        raise RaygptError(
            f"{VARIABLE}: {text!r} is no fault; write {'|'.join(get_args(Kind))}@STEP[:RANK][:save][:always]"
        )
    words = found[3].split(":")[1:]
    details: dict[str, Any] = {"rank": next((int(word) for word in words if word.isdecimal()), 0)}
    details |= {"when": "save" if "save" in words else "step", "once": "always" not in words}
    return Fault(found[1], int(found[2]), **details)  # type: ignore[arg-type]
