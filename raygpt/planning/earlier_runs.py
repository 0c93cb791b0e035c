"""Finished runs beside a run, of the same family and text: what they came to says more than any law about a run of
about their size and length."""

from pathlib import Path

from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.planning.loss import Measured, OfFamily, family_of
from raygpt.recipes import read_recipe
from raygpt.runs import RECIPE, checkpoints, records

MOST = 30  # the latest: reading one took 4 ms on a disk


def read_earlier_runs(home: str) -> tuple[OfFamily[Measured], ...]:
    """Those in `home` that began at step 0 and finished, each with its family. Of an object store none: reading many
    small files would take longer than a plan may."""
    if storage.is_remote(home):
        return ()
    found = []
    ended = sorted(Path(storage.absolute(home)).glob(f"*/{records.RESULT}"), key=_changed)
    for result in ended[-MOST:]:
        try:
            run = _finished(str(result.parent))
        except (RaygptError, OSError):
            continue  # other runs are no reason to refuse
        if run:
            found.append(run)
    return tuple(found)


def _changed(file: Path) -> float:
    """When it was written; 0 if it is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _finished(folder: str) -> OfFamily[Measured] | None:
    """A finished run with its last validation loss; None if it is none, or began from another."""
    result = records.read_result(folder)
    if result is None or result["state"] != "finished":
        return None
    recipe, losses = read_recipe(storage.join(folder, RECIPE)), checkpoints.val_losses(folder)
    last = max(losses, default=0)
    loss = losses.get(last)
    if recipe.run.start_from or not last or loss is None:
        return None
    parameters = describe(recipe.model, vocab=1).block_parameters  # without any table
    measured = Measured(folder.rpartition("/")[2], parameters, last * recipe.training.batch_tokens, loss)
    return family_of(recipe), measured
