"""The loss that a run will come to, by a law that was fitted to smaller runs of the same family on the same text.

    L(N, D) = E + ((A / N^a)^p + (B / (D - S)^b)^p)^(1/p)

What a model lacks in size and what it lacks in text add up with p = 1, as in Hoffmann's law. With a larger p the larger
of the two counts more, as in Kaplan's: a model that is too small gains less from more text. S are the tokens of the
first steps, in which a model only learns token frequencies; it is fitted for the batches of the ladder.

N is `description.block_parameters`, D the tokens that a run trains on, repeated or not; L the validation loss at the
end of the schedule, in nats per token. A law is a file in a folder beside the runs, RUN_STORAGE/NAME/scaling.json:

    {"format": 3,
     "family": {...},                       what `family_of(recipe)` returned for the recipe of the ladder
     "law": {"E": 1.2, "A": 8.0, "a": 0.09, "B": 19.0, "b": 0.15, "S": 4e4, "p": 2.5},
     "samples": [[E, A, a, B, b, S, p], …], the same fitted again to varied rungs, 100 or more: its uncertainty
     "noise": 0.004,                        relative standard deviation of a run's loss around the law (seeds, misfit)
     "rungs": [{"run": "NAME", "parameters": N, "tokens": D, "loss": L}, ...]}

The interval covers four runs of five: for every sample of the law, its prediction times a normal deviate of `noise`
and of what a law may miss so far from its rungs; the 10th and the 90th percentile of these. It lies around the law's
own prediction: the samples' predictions, whose priors vary, are 1 % higher in the middle, and losses are not. A law
whose rungs are fewer than FEWEST_RUNGS is not used.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raygpt import storage
from raygpt.config import Recipe
from raygpt.errors import RaygptError, first_line

SCALING = "scaling.json"
FORMAT = 3
TERMS = ("E", "A", "a", "B", "b", "S", "p")
FEWEST_RUNGS = 4
LEAST_COUNTED = 0.05  # of all tokens: for runs that are hardly longer than S
MISFIT = 0.001  # by which a rung's loss may be off its law, relative, for each doubling of size or tokens to the run
FARTHER = 0.0035  # the same of the run's loss, to the nearest rung: root mean square of five tests
SEEDS = 0.009  # standard deviation of a run's loss by its seed, relative: of eight runs of tiny for 4,000 steps
DEVIATES = 64  # drawn for every sample of a law
COVERED = (10, 90)  # percentiles: four runs of five
# Keys of a model that change along a ladder of sizes, or do not decide the loss.
SIZES = ("preset", "depth", "layers", "width", "heads", "head_size", "kv_heads", "hidden")
TEXT = ("source", "column", "tokenizer", "val", "split", "split_seed", "limit", "dedup")  # keys of data that decide it
OTHER_THAN_FAMILY = (*SIZES, "precision", "implementation")
T = TypeVar("T")
OfFamily = tuple[Mapping[str, Any], T]  # with what `family_of` returned for it


@dataclass(frozen=True)
class Loss:
    """A loss to expect, and what it rests on."""

    loss: float
    low: float
    high: float
    rests_on: str


@dataclass(frozen=True)
class Measured:
    """A run that a law was fitted to: its size, tokens and loss."""

    run: str
    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Law:
    """A fitted law."""

    terms: Mapping[str, float]
    samples: NDArray[np.float64]  # [samples, len(TERMS)]
    noise: float  # how far losses are from it, relatively
    rungs: tuple[Measured, ...]
    name: str  # of its folder

    def loss(self, parameters: float, tokens: float) -> float:
        """By the law."""
        return float(law_loss([self.terms[term] for term in TERMS], parameters, tokens))

    def predict(self, parameters: int, tokens: int, earlier: Sequence[Measured] = ()) -> Loss:
        """The loss of a model of so many parameters after so many tokens. Where one of the earlier runs is nearer to it
        than any rung, the law is corrected by how far it is off there, less what may be that run's seed."""
        middle, by_sample = self.loss(parameters, tokens), law_loss(self.samples.T, parameters, tokens)
        away, unsure, about = distance(self.rungs, parameters, tokens), self.noise, self._about(parameters, tokens)
        if earlier and distance(earlier, parameters, tokens) < away:
            away = distance(earlier, parameters, tokens)
            alike = [run for run in earlier if distance([run], parameters, tokens) == away]
            size, length, loss = alike[0].parameters, alike[0].tokens, fmean(run.loss for run in alike)
            seeds, off = SEEDS / math.sqrt(len(alike)), FARTHER * distance(self.rungs, size, length)
            trust = off**2 / (off**2 + seeds**2)
            middle *= 1 + trust * (loss / self.loss(size, length) - 1)
            by_sample = by_sample / law_loss(self.samples.T, size, length) ** trust
            unsure = math.hypot(SEEDS, seeds * math.sqrt(trust))  # the seed of this run, and of those
            about = f"{about}, corrected by {', '.join(run.run for run in alike)}"
        around = middle * by_sample / np.median(by_sample)
        deviates = np.random.default_rng(0).standard_normal((DEVIATES, len(by_sample)))
        low, high = np.percentile(around * (1 + np.hypot(unsure, FARTHER * away) * deviates), COVERED)
        return Loss(middle, float(low), float(high), about)

    def _about(self, parameters: int, tokens: int) -> str:
        """What the law was fitted to, and how far beyond that it is asked."""
        largest = max(rung.parameters * rung.tokens for rung in self.rungs)
        times = parameters * tokens / largest
        beyond = f", {times:,.0f} times the largest one's size × tokens" if times > 1.5 else ""
        return f"a law fitted to {len(self.rungs)} runs in {self.name}{beyond}"


def family_of(recipe: Recipe) -> dict[str, Any]:
    """What runs have in common that one law describes: text, layers, kinds of optimizer and schedule. Rates and batches
    are assumed to be good ones."""
    values = recipe.to_dict()
    model = {key: value for key, value in values["model"].items() if key not in OTHER_THAN_FAMILY}
    schedule = {key: values["schedule"][key] for key in ("kind", "end", "decay_share") if key in values["schedule"]}
    return {
        "model": model,
        "data": {key: values["data"][key] for key in TEXT},
        "optimizer": {"kind": values["optimizer"]["kind"]},
        "schedule": schedule,
    }


@dataclass(frozen=True)
class Laws:
    """Those in the folders beside a run, and finished runs there."""

    laws: tuple[OfFamily[Law], ...] = ()
    earlier: tuple[OfFamily[Measured], ...] = ()
    unreadable: tuple[str, ...] = ()  # a line for each file that is no law: of other runs, so no reason to refuse

    def expected_loss(self, recipe: Recipe, parameters: int, tokens: int) -> Loss | None:
        """By the law of the recipe's family with the most rungs; without one by earlier runs of just this size and
        length; None if there are none either."""
        family, earlier = family_of(recipe), self.earlier_of(recipe)
        laws = [law for whose, law in self.laws if whose == family and len(law.rungs) >= FEWEST_RUNGS]
        if laws:
            return max(laws, key=lambda law: len(law.rungs)).predict(parameters, tokens, earlier)
        same = [run for run in earlier if (run.parameters, run.tokens) == (parameters, tokens)]
        if not same:
            return None
        loss, names = fmean(run.loss for run in same), ", ".join(run.run for run in same)
        off = NormalDist().inv_cdf(COVERED[1] / 100) * SEEDS * math.sqrt(1 + 1 / len(same)) * loss
        return Loss(loss, loss - off, loss + off, f"{names}, of the same size and length")

    def earlier_of(self, recipe: Recipe) -> list[Measured]:
        """The finished runs of the recipe's family."""
        family = family_of(recipe)
        return [run for whose, run in self.earlier if whose == family]


def read_laws(home: str) -> Laws:
    """All laws in the folders of `home`."""
    home, laws, unreadable = storage.absolute(home), [], []
    try:
        names = sorted(storage.folders(home))
    except RaygptError as error:  # an object store that cannot be reached
        return Laws(unreadable=(f"scaling laws in run.storage are left out: {error}",))
    for name in names:
        uri = storage.join(home, name, SCALING)
        try:
            read = json.loads(storage.read_bytes(uri))
            if read["format"] == FORMAT:
                laws.append((read["family"], _law(read, name)))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        except RaygptError as error:
            unreadable.append(f"left out: {error}")
        except OSError as error:
            unreadable.append(f"{uri} is left out: it cannot be read ({error.strerror or first_line(error)})")
        except (ValueError, LookupError, OverflowError, TypeError):
            unreadable.append(f"{uri} is left out: it is no scaling law; delete it")
    return Laws(tuple(laws), unreadable=tuple(unreadable))


def _law(read: Mapping[str, Any], name: str) -> Law:
    """A law as its file has it; a ValueError or the like if it has no such numbers."""
    terms = {term: float(read["law"][term]) for term in TERMS}
    samples = np.array(read["samples"], dtype=float).reshape(-1, len(TERMS))
    rungs = tuple(Measured(**rung) for rung in read["rungs"])
    sizes = [(float(rung.parameters), float(rung.tokens), float(rung.loss)) for rung in rungs]
    noise = float(read["noise"])
    numbers = [noise, *terms.values(), *samples.flat, *(number for rung in sizes for number in rung)]
    if not (len(samples) and np.isfinite(numbers).all() and min(terms["p"], *samples[:, -1], *map(min, sizes)) > 0):
        raise ValueError(f"{SCALING} has numbers that no law has")
    return Law(terms, samples, noise, rungs, name)


def distance(runs: Sequence[Measured], parameters: int, tokens: int) -> float:
    """Of a run to the nearest of these, in doublings."""
    return float(min(doublings(run.parameters / parameters, run.tokens / tokens) for run in runs))


def doublings(size: Any, tokens: Any) -> Any:
    """How far a run is from another whose size and tokens are so many times its own."""
    return np.hypot(np.log2(size), np.log2(tokens))


def law_loss(terms: Any, parameters: Any, tokens: Any) -> NDArray[np.float64]:
    """L(N, D), of numbers or arrays."""
    floor, of_size, size_power, of_tokens, tokens_power, offset, p = terms
    counted = np.maximum(tokens - offset, LEAST_COUNTED * tokens)
    lacks_size, lacks_text = of_size * parameters**-size_power, of_tokens * counted**-tokens_power
    return np.asarray(floor + (lacks_size**p + lacks_text**p) ** (1 / p))
