"""Which small models a ladder trains: a rung is a model of the recipe's family, smaller or as large, for some steps.

Of all rungs that the compute allows, those are taken that leave the least doubt about the run's loss, by what is
assumed of the law before anything is measured (law.py): they differ in size and length, and the largest are near the
run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.sweep.law import expected_error, information_of

FEWEST_STEPS = 300  # of a rung: shorter runs mostly show how they begin
SCALES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of width, heads and layers; and the run's own model
FEWEST_RUNGS, MOST_RUNGS = 5, 12
FAR = 0.025  # expected error, relative, from which on a ladder is far from its run
SHARES = (0.1, 0.15, 0.2, 0.3, 0.5)  # of a run's compute, that might be enough
FEWEST_LAYERS = 2  # a model of one layer cannot look for what followed the same token before: it is no small version
HEAD_MULTIPLE = 8  # of a head's size: matrix units need multiples, RoPE even numbers


@dataclass(frozen=True)
class Rung:
    """A model of the ladder and its length."""

    recipe: Recipe
    parameters: int  # N of the law
    flops: float

    @property
    def tokens(self) -> int:
        return self.recipe.steps * self.recipe.training.batch_tokens

    @property
    def name(self) -> str:
        model = self.recipe.model
        return f"{model.layers}x{model.width}-{self.recipe.steps}"


@dataclass(frozen=True)
class _Candidate:
    """A rung beside the run whose ladder it may belong to."""

    rung: Rung
    share: float  # of the run's compute
    size: float  # of the run's
    tokens: float
    step: float  # a step's share of the run's tokens

    @cached_property
    def information(self) -> Any:
        return information_of(self.size, self.tokens, self.step)


def choose_rungs(recipe: Recipe, vocab: int, share: float) -> list[Rung]:
    """The ladder of a run, for at most this share of its compute; refuses a share that is too small for one."""
    check_recipe(recipe)
    candidates = _candidates(recipe, vocab)
    if len({one.size for one in candidates}) < 3:
        model = recipe.model
        raise RaygptError(
            f"model: {model.layers} layers of width {model.width} are too small for a ladder of smaller ones; write a "
            "larger model"
        )
    needed = sum(one.share for one in _cheapest(candidates))
    if needed > share:
        raise RaygptError(
            f"--share: {share:g} of the run's compute is too little for a ladder of rungs with {FEWEST_STEPS} steps or "
            f"more; write --share {math.ceil(1000 * needed) / 1000:g}, or a longer run"
        )
    chosen = _best(candidates, share)
    return sorted((one.rung for one in chosen), key=lambda rung: rung.flops)


def share_to_come_near(recipe: Recipe, vocab: int) -> float | None:
    """A share of the compute with which a ladder is not far from the run; None if none is."""
    candidates = _candidates(recipe, vocab)
    return next((share for share in SHARES if _error(_best(candidates, share)) <= FAR), None)


def error_of(rungs: Sequence[Rung], parameters: int, recipe: Recipe) -> float:
    """The relative error to expect of the prediction for such a run."""
    step = 1 / recipe.steps
    sizes = [(rung.parameters / parameters, rung.recipe.steps * step) for rung in rungs]
    return expected_error([information_of(*size, step) for size in sizes], step)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a run that no ladder is for: one that starts from another, or is too short, if its length is in steps."""
    if recipe.run.start_from is not None:
        raise RaygptError(
            "run.start_from: the models of a ladder have other sizes than the run, and begin at step 0; leave it out"
        )
    steps, fewest = recipe.training.steps, 4 * FEWEST_STEPS + 1
    if steps is not None and steps < fewest:
        raise RaygptError(
            f"training.steps: {steps} are too few for a ladder, whose rungs have {FEWEST_STEPS} steps or more and are "
            f"much shorter than the run; write {fewest} or more"
        )


def cost(rungs: Sequence[Rung]) -> float:
    """FLOPs of all of them."""
    return sum(rung.flops for rung in rungs)


def _candidates(recipe: Recipe, vocab: int) -> list[_Candidate]:
    """All sizes with all lengths that are shorter than the run."""
    run = _rung(recipe, vocab)
    doublings = range(int(math.log2(max(1, recipe.steps / FEWEST_STEPS))) + 1)
    lengths = [steps for n in doublings for steps in (FEWEST_STEPS * 2**n, FEWEST_STEPS * 3 * 2**n // 2)]
    rungs = [
        _rung(_with_steps(model, steps, recipe), vocab)
        for model in [*_smaller(recipe, vocab), recipe]
        for steps in lengths
        if steps < recipe.steps
    ]
    return [
        _Candidate(
            rung, rung.flops / run.flops, rung.parameters / run.parameters, rung.tokens / run.tokens, 1 / recipe.steps
        )
        for rung in rungs
    ]


def _cheapest(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=lambda one: one.share)[:FEWEST_RUNGS]


def _best(candidates: Sequence[_Candidate], share: float) -> list[_Candidate]:
    """From the cheapest rungs on, add or exchange one at a time, whatever helps most, for as long as one does and the
    share allows it."""
    chosen = _cheapest(candidates)
    while True:
        others = [one for one in candidates if one not in chosen]
        tries = [[*chosen, one] for one in others if len(chosen) < MOST_RUNGS]
        tries += [[*chosen[:n], one, *chosen[n + 1 :]] for n in range(len(chosen)) for one in others]
        fitting = [one for one in tries if sum(each.share for each in one) <= share]
        best = min(fitting, key=_error, default=chosen)
        if _error(best) > 0.999 * _error(chosen):
            return chosen
        chosen = best


def _error(chosen: Sequence[_Candidate]) -> float:
    return expected_error([one.information for one in chosen], chosen[0].step)


def _rung(recipe: Recipe, vocab: int) -> Rung:
    description = describe(recipe.model, vocab)
    flops = float(description.flops_per_token) * recipe.steps * recipe.training.batch_tokens
    return Rung(recipe, description.block_parameters, flops)


def _smaller(recipe: Recipe, vocab: int) -> list[Recipe]:
    """Smaller models of the family, the smallest first, each larger than the one before."""
    models: list[Recipe] = []
    for share in SCALES:
        model = _scaled(recipe, share)
        sizes = [describe(other.model, vocab).count for other in [*models, recipe]]
        count = describe(model.model, vocab).count
        is_divisible = not model.indivisible(model.cluster.mesh.sizes())
        if is_divisible and count < sizes[-1] and all(count > 1.15 * size for size in sizes[:-1]):
            models.append(model)
    return models


def _scaled(recipe: Recipe, share: float) -> Recipe:
    """The model with this share of its width, heads and layers."""
    model = recipe.model
    heads = max(1, round(model.heads * share))
    head = max(1, round(model.width * share / heads / HEAD_MULTIPLE)) * HEAD_MULTIPLE
    layers = max(min(FEWEST_LAYERS, model.layers), round(model.layers * share))
    sizes = {"depth": None, "layers": layers, "heads": heads, "width": heads * head, "head_size": None}
    if model.head_size:
        sizes["head_size"] = (
            max(1, round(model.head_size * share * model.heads / heads / HEAD_MULTIPLE)) * HEAD_MULTIPLE
        )
    if model.kv_heads:
        sizes["kv_heads"] = math.gcd(heads, max(1, round(model.kv_heads * share)))
    if model.hidden:
        sizes["hidden"] = max(1, round(model.hidden * share / HEAD_MULTIPLE)) * HEAD_MULTIPLE
    sizes["value_embeddings"] = min(model.value_embeddings, layers // 2)
    return recipe.model_copy(update={"model": model.model_copy(update=sizes)})


def _with_steps(model: Recipe, steps: int, recipe: Recipe) -> Recipe:
    """So many steps, with as large a part of them for the warm-up."""
    warmup = recipe.schedule.warmup_steps * steps // recipe.steps
    return model.model_copy(
        update={
            "training": model.training.model_copy(update={"steps": steps}),
            "schedule": model.schedule.model_copy(update={"warmup_steps": warmup}),
        }
    )
