"""`raygpt scaling`: trains a ladder of small models of a recipe's family, and fits the law by which its loss falls.

RUN_STORAGE/NAME/            trials.json: which family
    2x64-300                 a rung, an ordinary run: 2 layers of width 64, 300 steps
    scaling.json             the law, for `raygpt plan`, as raygpt/planning/loss.py describes it
    scaling.html             a page that draws it
"""

from dataclasses import asdict, dataclass
from typing import Any

from raygpt import storage
from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.planning.loss import FEWEST_RUNGS, FORMAT, SCALING, Law, Loss, Measured, family_of
from raygpt.sweep.grid import KEPT, claim
from raygpt.sweep.ladder import FAR, Rung, choose_rungs, cost, error_of, share_to_come_near
from raygpt.sweep.law import Goal, fit_law
from raygpt.sweep.runner import Leg, Runner
from raygpt.training.prepared import run_folder_of

EARLY = 0.95  # of the loss of token frequencies: a rung that ends above had hardly begun to learn


@dataclass(frozen=True)
class Ladder:
    """The rungs of a run whose loss is to be known."""

    folder: str
    recipe: Recipe  # of the run, in steps
    rungs: tuple[Rung, ...]
    parameters: int  # of the run: N of the law
    bytes_per_token: float  # of the text
    unigram_loss: float  # of a model that only knows how frequent each of its tokens is
    flops: float  # of the run
    enough: float | None  # share of the run's compute that would come near to it; None if no ladder does

    @property
    def tokens(self) -> int:
        """Of the run."""
        return self.recipe.steps * self.recipe.training.batch_tokens

    @property
    def share(self) -> float:
        """Compute of the rungs over that of the run."""
        return cost(self.rungs) / self.flops

    @property
    def expected_error(self) -> float:
        """Of the prediction, relative, by what is assumed of the law before anything is measured."""
        return error_of(self.rungs, self.parameters, self.recipe)

    @property
    def is_far(self) -> bool:
        """Whether the run is so much larger that the prediction is little more than a guess."""
        return self.expected_error > FAR


@dataclass(frozen=True)
class ScalingAnswer:
    """The law, and the loss that it predicts for the run."""

    law: Law
    loss: Loss
    early: tuple[Measured, ...]  # rungs that had hardly begun to learn, which the law leaves out


def plan_ladder(recipe: Recipe, vocab: int, share: float, bytes_per_token: float, unigram_loss: float) -> Ladder:
    """The ladder of a recipe, whose run is named for the ladder; refuses a share of the compute that is too small."""
    if not bytes_per_token:
        raise RaygptError("data.val: holds out no text, so there would be no loss to predict; write e.g. 0.05")
    description = describe(recipe.model, vocab)
    flops = float(description.flops_per_token) * recipe.steps * recipe.training.batch_tokens
    rungs = choose_rungs(recipe, vocab, share)
    enough = share_to_come_near(recipe, vocab)
    return Ladder(
        run_folder_of(recipe),
        recipe,
        tuple(rungs),
        description.block_parameters,
        bytes_per_token,
        unigram_loss,
        flops,
        enough,
    )


def run_ladder(ladder: Ladder, runner: Runner) -> ScalingAnswer:
    """Train the rungs, the cheapest first, and fit the law."""
    legs = [Leg(_as_run(rung, ladder.folder)) for rung in ladder.rungs]
    runner.train(legs)
    sound = [(rung, leg) for rung, leg in zip(ladder.rungs, legs, strict=True) if rung.name not in runner.diverged]
    measured = [Measured(rung.name, rung.parameters, rung.tokens, leg.loss) for rung, leg in sound]
    if len(measured) < len(ladder.rungs):
        raise RaygptError(
            f"{ladder.folder}: {', '.join(sorted(runner.diverged))} diverged, so there is no law; write a lower "
            "optimizer.learning_rate"
        )
    goal = Goal(ladder.parameters, ladder.tokens, ladder.recipe.training.batch_tokens, ladder.bytes_per_token)
    early = _early(ladder, measured)
    law = fit_law([rung for rung in measured if rung not in early], ladder.folder.rsplit("/", 1)[-1], goal)
    return ScalingAnswer(law, law.predict(ladder.parameters, ladder.tokens), early)


def _early(ladder: Ladder, measured: list[Measured]) -> tuple[Measured, ...]:
    """Rungs that had hardly begun to learn: until a model knows more than token frequencies its loss follows no law of
    size and tokens. Refuses a ladder with too few others."""
    early = tuple(rung for rung in measured if rung.loss > EARLY * ladder.unigram_loss)
    if len(measured) - len(early) >= FEWEST_RUNGS:
        return early
    losses = sorted(rung.loss for rung in early)
    raise RaygptError(
        f"{ladder.folder}: {len(early)} of {len(measured)} rungs had hardly begun to learn: they ended at "
        f"{losses[0]:.2f} to {losses[-1]:.2f}, and token frequencies alone give {ladder.unigram_loss:.2f}; write a "
        "recipe whose small models learn sooner, e.g. with a higher optimizer.learning_rate or optimizer.kind: muon"
    )


def write_law(ladder: Ladder, answer: ScalingAnswer) -> None:
    """scaling.json, for `raygpt plan`."""
    storage.write_json(storage.join(ladder.folder, SCALING), as_dict(ladder, answer))


def as_dict(ladder: Ladder, answer: ScalingAnswer) -> dict[str, Any]:
    """The law in its format."""
    return {
        "format": FORMAT,
        "family": family_of(ladder.recipe),
        "law": answer.law.terms,
        "samples": answer.law.samples.tolist(),
        "noise": answer.law.noise,
        "rungs": [asdict(rung) for rung in answer.law.rungs],
        "early": [asdict(rung) for rung in answer.early],
    }


def claim_ladder(ladder: Ladder) -> None:
    """Write what the folder is for; refuses that of another family. A larger ladder uses the rungs that are there."""
    claim(ladder.folder, {"family": family_of(ladder.recipe)})


def _as_run(rung: Rung, folder: str) -> Recipe:
    """Validated at its end only: nothing on the way is used."""
    run = rung.recipe.run.model_copy(update={"name": rung.name, "storage": folder, **KEPT})
    training = rung.recipe.training.model_copy(
        update={"eval_every": rung.recipe.steps, "eval_tasks": (), "eval_items": None, "prompts": ()}
    )
    return Recipe.model_validate(dict(rung.recipe) | {"run": run, "training": training})
