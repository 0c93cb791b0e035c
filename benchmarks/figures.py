"""The figures of a run, from the events that it sent."""

from itertools import pairwise
from typing import Any

from raygpt.training.events import CheckpointSaved, Event, Sampled, Started, StepLogged, Validated
from raygpt.training.mfu import mfu
from raygpt.training.prepared import Prepared


def measured(events: list[Event], run: Prepared, began: float) -> dict[str, Any]:
    """The figures of a run that began then, from what it said."""
    about = next(event.about for event in events if isinstance(event, Started))
    logged = [event.line() for event in events if isinstance(event, StepLogged | Validated)]
    trained = [pair for pair in pairwise(logged) if all("loss" in line for line in pair)]
    if not trained:
        raise ValueError("no two steps are logged in a row: training.log_every must be less than half of eval_every")
    seconds = sum(after["time"] - before["time"] for before, after in trained)
    speed = sum(after["tokens"] - before["tokens"] for before, after in trained) / seconds
    share = mfu(speed, run.totals.flops_per_token, about["device"], int(about["devices"]))
    return {
        **about,
        "parameters": run.totals.parameters,
        "batch": f"{run.totals.rows} × {run.totals.context}",
        "steps": run.totals.steps,
        "checkpoints": sum(isinstance(event, CheckpointSaved) for event in events),
        "first_logged": {"step": trained[0][0]["step"], "after_s": round(trained[0][0]["time"] - began, 1)},
        "seconds": seconds,
        "round_ms": [round(1e3 * _seconds_per_step(*pair), 2) for pair in trained],
        "tokens_per_s": speed,
        "seconds_of_steps": run.totals.rows * run.totals.context * run.totals.steps / speed,
        **({"mfu": share} if share else {}),
        "data_wait_s": sum(after["data_wait_s"] for _, after in trained),
        "losses": {line["step"]: round(line["loss"], 4) for line in logged if "loss" in line},
        "val_losses": {line["step"]: round(line["val_loss"], 4) for line in logged if "val_loss" in line},
        "sample": next((event.text for event in reversed(events) if isinstance(event, Sampled)), ""),
    }


def _seconds_per_step(before: dict[str, Any], after: dict[str, Any]) -> float:
    return float((after["time"] - before["time"]) / (after["step"] - before["step"]))
