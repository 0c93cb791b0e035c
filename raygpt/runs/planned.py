"""How a run and its plan compared."""

import statistics
from dataclasses import dataclass

from raygpt.formatting import short_time, size
from raygpt.runs import metrics, records


@dataclass(frozen=True)
class Compared:
    """Seconds of a step and bytes of a device: planned, and as they were."""

    planned_s: float
    taken_s: float | None  # None before a step was logged
    planned_bytes: int
    peak_bytes: int  # 0 where it is unknown, as on a CPU

    def __str__(self) -> str:
        step = f"{short_time(self.planned_s)} a step planned"
        if self.taken_s:
            step += f", {short_time(self.taken_s)} taken ({self.taken_s / self.planned_s - 1:+.0%})"
        memory = f"{size(self.planned_bytes)} planned on a device"
        if self.peak_bytes:
            memory += f", {size(self.peak_bytes)} at most in use ({self.peak_bytes / self.planned_bytes - 1:+.0%})"
        return f"{step}; {memory}"


def compare(run_folder: str) -> Compared | None:
    """The last start's plan beside what the run logged; None if it has no plan, as on a device that is not known."""
    plan = records.read_plan(run_folder)
    if plan is None:
        return None
    lines = metrics.since_start(metrics.read(run_folder))
    speeds = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]
    batch = plan["tokens"] / plan["steps"]
    taken = batch / statistics.median(speeds) if speeds else None
    return Compared(plan["step_s"]["total"], taken, plan["memory"]["total"], plan.get("peak_bytes", 0))
