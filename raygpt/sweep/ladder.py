"""Which small models a ladder trains: a smaller model of the recipe's family is a rung for each of some lengths.

The law that is fitted adds a term of the size to a term of the tokens. So the ladder is a cross: one arm has several
sizes, all trained for the shortest length; the other has one small size, trained for several lengths. That reaches much
nearer to the run in both than a full table of the same cost. What is left of the compute fills in the table.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.models import describe

FEWEST_STEPS = 300  # of a rung: shorter runs mostly show how they begin
SIZES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of width, heads and layers
ARM = (3, 6)  # rungs of an arm: at least, at most
MOST_RUNGS = 12
NEAR = 2.5  # doublings of size or tokens over which a law may be trusted to a few percent
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


def choose_rungs(recipe: Recipe, vocab: int, share: float) -> list[Rung]:
    """The ladder of a run, for at most this share of its compute; refuses a share that is too small for one."""
    check_length(recipe)
    target = _rung(recipe, vocab)
    crosses = list(_crosses(recipe, vocab, _smaller(recipe, vocab)))
    if not crosses:
        model = recipe.model
        raise RaygptError(
            f"model: {model.layers} layers of width {model.width} are too small for a ladder of smaller ones; write a "
            "larger model"
        )
    fitting = [cross for cross in crosses if cost(cross) <= share * target.flops]
    if not fitting:
        needed = min(cost(cross) for cross in crosses) / target.flops
        raise RaygptError(
            f"--share: {share:g} of the run's compute is too little for a ladder of rungs with {FEWEST_STEPS} steps or "
            f"more; write --share {math.ceil(1000 * needed) / 1000:g}, or a longer run"
        )
    chosen = min(fitting, key=lambda cross: (round(distance(cross, target.parameters, target.tokens), 1), -len(cross)))
    return _filled(chosen, share * target.flops, recipe, vocab)


def share_to_come_near(recipe: Recipe, vocab: int) -> float | None:
    """The share of the compute with which a ladder reaches within NEAR doublings of the run; None if none does."""
    target = _rung(recipe, vocab)
    crosses = _crosses(recipe, vocab, _smaller(recipe, vocab))
    near = [
        cost(cross) / target.flops for cross in crosses if distance(cross, target.parameters, target.tokens) <= NEAR
    ]
    return min(near, default=None)


def check_length(recipe: Recipe) -> None:
    """Refuse a run that is too short for a ladder, if its length is in steps."""
    steps, fewest = recipe.training.steps, 2 ** (ARM[0] - 1) * FEWEST_STEPS + 1
    if steps is not None and steps < fewest:
        raise RaygptError(
            f"training.steps: {steps} are too few for a ladder, whose rungs have {FEWEST_STEPS} steps, twice and four "
            f"times as many, and are shorter than the run; write {fewest} or more"
        )


def cost(rungs: Sequence[Rung]) -> float:
    """FLOPs of all of them."""
    return sum(rung.flops for rung in rungs)


def distance(rungs: Sequence[Rung], parameters: int, tokens: int) -> float:
    """How far a ladder is from such a run, in doublings: the larger of size and tokens."""
    size = math.log2(parameters / max(rung.parameters for rung in rungs))
    return max(size, math.log2(tokens / max(rung.tokens for rung in rungs)))


def _crosses(recipe: Recipe, vocab: int, models: Sequence[Recipe]) -> Iterator[list[Rung]]:
    """Every ladder of two arms: the sizes, the size of the lengths' arm, the shortest and the longest length."""
    fewest, most = ARM
    doublings = range(int(math.log2(max(1, recipe.steps / FEWEST_STEPS))) + 1)
    shortest = [FEWEST_STEPS * 2**n for n in doublings if FEWEST_STEPS * 2**n <= recipe.steps / 4]
    for first, count in itertools.product(range(len(models)), range(fewest, most + 1)):
        sizes = models[first : first + count]
        if len(sizes) < count:
            continue
        for base, lengths in itertools.product(shortest, range(fewest, most + 1)):
            longest = base * 2 ** (lengths - 1)
            if longest < recipe.steps:
                arm = [_rung(_with_steps(model, base, recipe), vocab) for model in sizes]
                for small in sizes[:2]:
                    steps = [base * 2**n for n in range(1, lengths)]
                    yield [*arm, *(_rung(_with_steps(small, count, recipe), vocab) for count in steps)]


def _filled(cross: Sequence[Rung], flops: float, recipe: Recipe, vocab: int) -> list[Rung]:
    """With more sizes at more lengths, the cheapest first, as far as the compute allows."""
    chosen = list(cross)
    models = {rung.recipe.model.model_dump_json(): rung.recipe for rung in cross}.values()
    steps = {rung.recipe.steps for rung in cross}
    table = [_rung(_with_steps(model, count, recipe), vocab) for model, count in itertools.product(models, steps)]
    for rung in sorted(table, key=lambda rung: rung.flops):
        is_new = rung.name not in [other.name for other in chosen]
        if is_new and len(chosen) < MOST_RUNGS and cost(chosen) + rung.flops <= flops:
            chosen.append(rung)
    return sorted(chosen, key=lambda rung: rung.flops)


def _rung(recipe: Recipe, vocab: int) -> Rung:
    description = describe(recipe.model, vocab)
    flops = float(description.flops_per_token) * recipe.steps * recipe.training.batch_tokens
    return Rung(recipe, description.multiplied, flops)


def _smaller(recipe: Recipe, vocab: int) -> list[Recipe]:
    """Smaller models of the family, the smallest first, each larger than the one before."""
    models: list[Recipe] = []
    for share in SIZES:
        model = _scaled(recipe, share)
        sizes = [describe(other.model, vocab).count for other in [*models, recipe]]
        count = describe(model.model, vocab).count
        if count < sizes[-1] and all(count > 1.15 * size for size in sizes[:-1]):
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
