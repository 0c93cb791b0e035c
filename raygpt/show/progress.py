"""A run's progress from its directory, in the lines of `raygpt train`: for runs whose console is elsewhere."""

import json
import time

from rich.markup import escape

from raygpt.runs import OpenRun, open_run
from raygpt.runs.metrics import Line
from raygpt.runs.status import status
from raygpt.show.console import out, printable
from raygpt.show.training import TrainingProgress
from raygpt.training.events import Event, Resumed, StepLogged, Validated

POLL_S = 2.0


def show_progress(name: str, follow: bool) -> str:
    """Print what a run has logged, and with `follow` what it logs until it ends; returns its state."""
    shown: set[str] = set()
    while True:
        run = open_run(name)  # what it has read is cached, so it is opened again
        facts = status(run)
        watch = TrainingProgress(run.total_steps, None)
        for line in run.metrics:
            text = json.dumps(line)
            if text not in shown:  # not by number: a run that starts again drops the lines after its checkpoint
                watch(_event(run, line))
                shown.add(text)
        if not follow or facts["state"] != "running":
            why = f": {printable(facts['why'])}" if facts["why"] else ""
            out.print(f"{facts['state']}{escape(why)}", soft_wrap=True)
            return str(facts["state"])
        time.sleep(POLL_S)


def _event(run: OpenRun, line: Line) -> Event:
    values = {name: value for name, value in line.items() if name not in ("step", "time")}
    if "restart" in line:
        return Resumed(line["step"], run.folder, is_fork=False)
    return (StepLogged if "loss" in line else Validated)(line["step"], values, line.get("time"))
