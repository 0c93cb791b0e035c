"""Console output of `raygpt scaling`: what it will take, and the answer."""

from typing import TYPE_CHECKING

from raygpt.show import chart
from raygpt.show.console import note, out, relative_path, table_of
from raygpt.show.scaling_page import law_text
from raygpt.sweep.ladder import MOST_RUNGS

if TYPE_CHECKING:
    from raygpt.sweep.scaling import Ladder, ScalingAnswer


def show_plan(ladder: "Ladder", at_once: int) -> None:
    """The rungs, and their compute beside that of the run."""
    rows = [
        (
            rung.name,
            f"{chart.short(rung.parameters)} parameters in blocks, {rung.recipe.steps:,} steps, {rung.flops:.1e} FLOPs",
        )
        for rung in ladder.rungs
    ]
    rows.append(("compute", f"{ladder.share:.1%} of the run's {ladder.flops:.2e} FLOPs; {at_once} at once"))
    rows.append(("folder", relative_path(ladder.folder)))
    out.print(table_of(rows))
    if ladder.is_far:
        nearer = f"--share {ladder.enough:.2g}" if ladder.enough else f"no ladder of up to {MOST_RUNGS} runs"
        off = f"{ladder.expected_error:.1%}"
        note(f"the run is far from its ladder, whose prediction may be {off} off; {nearer} would come nearer")


def show_answer(ladder: "Ladder", answer: "ScalingAnswer", page: str) -> None:
    """The law, and the loss that it predicts."""
    loss = answer.loss
    rows = [
        ("law", law_text(answer)),
        ("predicted", f"validation loss {loss.loss:.4f} after {ladder.recipe.steps:,} steps"),
        ("interval", f"{loss.low:.4f} to {loss.high:.4f} in four runs of five; it rests on {loss.rests_on}"),
        ("page", f"{relative_path(page)}; open it in a browser"),
    ]
    out.print()
    out.print(table_of(rows))
    if answer.early:
        names, frequencies = ", ".join(rung.run for rung in answer.early), f"{ladder.unigram_loss:.2f}"
        note(f"{names} had hardly begun to learn and are left out: token frequencies alone give {frequencies}")
