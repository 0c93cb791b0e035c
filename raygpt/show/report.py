"""`raygpt report`: the page of some runs, and a picture of their curves."""

from collections.abc import Sequence

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.runs import open_run

PAGE = "report.html"


def write_report(folders: Sequence[str], out: str | None = None, png: str | None = None) -> dict[str, int]:
    """Write the page of some runs, and a picture where one is asked for: file -> bytes."""
    from raygpt.show import page, picture

    runs = [open_run(folder) for folder in folders]
    empty = next((run for run in runs if not any("loss" in line or "val_loss" in line for line in run.metrics)), None)
    if empty:
        raise RaygptError(f"{empty.folder} has not logged a loss yet; train it further: raygpt train")
    contents = {storage.absolute(png): picture.draw(runs)} if png else {}
    contents |= {storage.absolute(out or storage.join(runs[0].folder, PAGE)): page.page(runs).encode()}
    for file, content in contents.items():
        storage.write_bytes(file, content)
    return {file: len(content) for file, content in contents.items()}
