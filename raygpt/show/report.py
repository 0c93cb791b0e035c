"""`raygpt report`: the page of some runs, and their losses as a picture."""

from collections.abc import Sequence

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.runs import OpenRun, open_run
from raygpt.show.chart import picture
from raygpt.show.curves import LOSSES, loss_curves, restart_marks
from raygpt.show.page import page

PAGE = "report.html"


def write_report(folders: Sequence[str], out: str | None = None, svg: str | None = None) -> dict[str, int]:
    """Write the page of some runs, and a picture if requested. Returns file -> bytes."""
    runs = [open_run(folder) for folder in folders]
    for run in runs:
        if not loss_curves([run], "step"):
            raise RaygptError(f"{run.folder} {_why_no_curve(run)}")
    contents = {storage.absolute(svg): loss_picture(runs).encode()} if svg else {}
    contents |= {storage.absolute(out or storage.join(runs[0].folder, PAGE)): page(runs).encode()}
    for file, content in contents.items():
        storage.write_bytes(file, content)
    return {file: len(content) for file, content in contents.items()}


def _why_no_curve(run: OpenRun) -> str:
    if any("loss" in line or "val_loss" in line for line in run.metrics):
        return "has logged no loss that is a number; begin another run with a lower optimizer.learning_rate"
    return "has not logged a loss yet; train it further: raygpt train"


def loss_picture(runs: Sequence[OpenRun]) -> str:
    """Training and validation losses over the steps, as an SVG file."""
    names = [run.name for run in runs]
    title = names[0] if len(runs) == 1 else "training loss (faint) and validation loss"
    legend = [f"{kind} loss" for kind in LOSSES] if len(runs) == 1 else names
    return picture(title, legend, loss_curves(runs, "step"), restart_marks(runs, "step"))
