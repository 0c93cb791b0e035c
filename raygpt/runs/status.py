"""The status of runs: one line for each below a storage path, or everything about one.

Reads only the run directories, so it works while a run trains, from another machine, and for runs on s3.
"""

from typing import Any

from raygpt import storage
from raygpt.config import PRESETS
from raygpt.errors import RaygptError, first_line
from raygpt.models import describe
from raygpt.runs import RECIPE, OpenRun, checkpoints, open_run, records
from raygpt.runs.lock import lock_owner
from raygpt.runs.metrics import latest, restarts
from raygpt.runs.planned import compare

Facts = dict[str, Any]
KEYS = ("step", "steps", "loss", "val_loss", "tokens_per_s", "mfu")


def status_of_all(home: str) -> list[Facts]:
    """A summary of each run directly below a path, the most recently active first."""
    home = storage.absolute(home).rstrip("/")
    found = [facts for name in storage.folders(home) if (facts := _status_or_reason(storage.join(home, name)))]
    if not found:
        hint = "; it is a run itself: raygpt show" if storage.exists(storage.join(home, RECIPE)) else ""
        raise RaygptError(f"there are no runs in {home}{hint or '; name the folder that raygpt train put them in'}")
    return sorted(found, key=lambda facts: facts["last_seen"] or 0, reverse=True)


def _status_or_reason(folder: str) -> Facts | None:
    """The summary of a run, or the reason if its files cannot be read; the other runs are still shown. None for a
    folder that is no run."""
    try:
        return status(open_run(folder)) if storage.exists(storage.join(folder, RECIPE)) else None
    except (RaygptError, OSError, ValueError, KeyError) as error:
        empty = dict.fromkeys(("engine", "model", *KEYS, "last_seen"))
        why = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        return {"name": folder.rpartition("/")[2], "folder": folder, **empty, "state": "unreadable", "why": why}


def status(run: OpenRun) -> Facts:
    """Name, engine, model, progress and state."""
    last = latest(run.metrics)
    state, why = _state(run, last)
    facts = {"name": run.name, "folder": run.folder, "engine": run.recipe.engine, "model": _model(run)}
    progress = {"step": last.get("step", 0), "steps": run.total_steps}
    metrics = {key: last.get(key) for key in KEYS[2:]}
    return {**facts, **progress, **metrics, "state": state, "why": why, "last_seen": last.get("time")}


def details(run: OpenRun) -> Facts:
    """The same, and recipe, checkpoints, restarts, the last sample, what it ran on, its plan and its disk use."""
    return {
        **status(run),
        "parameters": describe(run.recipe.model, run.tokenizer.vocab).count,
        "tokens": max((line["tokens"] for line in run.metrics if "tokens" in line), default=0),
        "checkpoints": [_checkpoint(run, step) for step in run.steps],
        "best": next(iter(checkpoints.best_first(run.steps, run.val_losses)), None),
        "restarts": [{"step": line["step"], "time": line.get("time")} for line in restarts(run.metrics)],
        "sample": run.samples[-1] if run.samples else None,
        "about": run.about,
        "plan": records.read_plan(run.folder),
        "compared": str(compared) if (compared := compare(run.folder)) else None,
        "disk_bytes": sum(storage.files(run.folder).values()),
        "recipe": run.recipe.to_dict(),
    }


def _checkpoint(run: OpenRun, step: int) -> Facts:
    folder = checkpoints.folder_of(run.folder, step)
    return {"step": step, "val_loss": run.val_losses.get(step), "bytes": sum(storage.files(folder).values())}


def _model(run: OpenRun) -> str:
    model = run.recipe.model
    size = f"{model.layers}×{model.width}"
    if model.preset is None:
        return size
    return model.preset if "layers" in PRESETS[model.preset] else f"{model.preset} {size}"


def _state(run: OpenRun, last: Facts) -> tuple[str, str]:
    """running, finished, stopped or failed; and why, where that is known.

    The lock is checked first: if there is one, an earlier driver's result is out of date.
    """
    owner = lock_owner(run.folder)
    if owner and not owner.is_gone:
        return "running", ""
    if owner:
        return "failed", f"its driver is gone without recording a result: {owner}"
    result = records.read_result(run.folder)
    if result:
        return result["state"], result.get("why", "")
    is_evaluated = run.total_steps in checkpoints.val_losses(run.folder)
    return ("finished", "") if is_evaluated and last.get("step", 0) >= (run.total_steps or 0) else ("stopped", "")
