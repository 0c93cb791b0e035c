"""HellaSwag and LAMBADA, computed as in lm-evaluation-harness."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from raygpt import storage
from raygpt.corpus.sources import resolve
from raygpt.corpus.tokenizers import Char, Tokenizer
from raygpt.errors import RaygptError
from raygpt.evaluation.continuations import Likelihood, Pair, ScorableModel, Watch, encode, likelihoods

Item = dict[str, Any]
Figures = dict[str, float]
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates: JSON can write it, but it is no text


class EvalTask(NamedTuple):
    """Which pairs an item consists of, and how the result follows from their likelihoods."""

    problem: Callable[[Item], str | None]  # why an item is invalid; None if it is valid
    on_the_hub: str
    figures: tuple[str, ...]  # of its result, the ones that are quoted
    pairs: Callable[[Item], list[Pair]]
    result: Callable[[Sequence[Item], Sequence[list[Likelihood]]], Figures]


def hellaswag_problem(item: Item) -> str | None:
    """Why an item is invalid; None if it is valid."""
    endings, label = item.get("endings"), str(item.get("label"))
    halves = [item.get("ctx_a"), item.get("ctx_b")]
    if not _are_texts([item.get("activity_label"), *([item.get("ctx")] if None in halves else halves)]):
        return "activity_label and ctx, or ctx_a and ctx_b, must be texts"
    if not (isinstance(endings, list) and endings and _are_texts(endings)):
        return "endings must be a list of texts"
    if not (label.isdecimal() and int(label) < len(endings)):
        return f"label must be the number of the true ending, 0 to {len(endings) - 1}"
    return None


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) and not HALF_A_PAIR.search(value) for value in values)


def hellaswag_pairs(item: Item) -> list[Pair]:
    """The four endings of a text."""
    both = item.get("ctx_a") is not None and item.get("ctx_b") is not None
    text = f"{item['ctx_a']} {item['ctx_b'].capitalize()}" if both else item["ctx"]
    query = _without_marks(f"{item['activity_label']}: {text}")
    return [Pair(query, f" {_without_marks(ending)}") for ending in item["endings"]]


def _without_marks(text: str) -> str:
    """Remove WikiHow's [header], [title] and the like."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag_result(items: Sequence[Item], found: Sequence[list[Likelihood]]) -> Figures:
    """How often the true ending is the likeliest: in total, and per character."""
    right = [hellaswag_choices(item, of_item) for item, of_item in zip(items, found, strict=True)]
    labels = np.array([int(item["label"]) for item in items])
    plain, normed = (np.array([pair[n] for pair in right]) == labels for n in (0, 1))
    return {
        "acc": float(plain.mean()),
        "acc_stderr": standard_error(plain),
        "acc_norm": float(normed.mean()),
        "acc_norm_stderr": standard_error(normed),
    }


def hellaswag_choices(item: Item, found: list[Likelihood]) -> tuple[int, int]:
    """The likeliest ending, and the likeliest per character."""
    logs = np.array([one.log_probability for one in found])
    lengths = np.array([len(pair.continuation) - 1 for pair in hellaswag_pairs(item)])  # without the blank before it
    return int(logs.argmax()), int((logs / np.maximum(lengths, 1)).argmax())


def lambada_problem(item: Item) -> str | None:
    """Why an item is invalid; None if it is valid."""
    text = item.get("text")
    return None if _are_texts([text]) and str(text).strip() else "text must be a text"


def lambada_pairs(item: Item) -> list[Pair]:
    """The last word of a text."""
    context, _, word = item["text"].rpartition(" ")
    return [Pair(context, f" {word}")]


def lambada_result(items: Sequence[Item], found: Sequence[list[Likelihood]]) -> Figures:
    """How often every token of the word is the likeliest, and the word's perplexity."""
    greedy = np.array([of_item[0].greedy for of_item in found])
    logs = np.array([of_item[0].log_probability for of_item in found])
    perplexity = math.exp(min(-logs.mean(), 700))  # an untrained model may exceed a float's range
    return {
        "acc": float(greedy.mean()),
        "acc_stderr": standard_error(greedy),
        "perplexity": perplexity,
        "perplexity_stderr": perplexity * standard_error(logs),  # to first order
    }


def standard_error(values: Any) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


TASKS = {  # by the names that a recipe uses
    "hellaswag": EvalTask(
        hellaswag_problem,
        "hf:Rowan/hellaswag::validation",
        ("acc", "acc_norm"),
        hellaswag_pairs,
        hellaswag_result,
    ),
    "lambada": EvalTask(
        lambada_problem,
        "hf:EleutherAI/lambada_openai:default:test",
        ("acc", "perplexity"),
        lambada_pairs,
        lambada_result,
    ),
}


METRIC_NAMES = tuple(f"{name}_{key}" for name, task in TASKS.items() for key in task.figures)  # as metrics have them


def choose(names: Sequence[str]) -> dict[str, str | None]:
    """["hellaswag=items.jsonl"] -> {"hellaswag": "items.jsonl"}; without a file its items are the Hub's."""
    return {name: path or None for name, _, path in (word.partition("=") for word in names)}


def evaluate(
    model: ScorableModel, name: str, items: Sequence[Item], watch: Watch = lambda done, total: None
) -> Figures:
    """The result of a task on these items."""
    return {**TASKS[name].result(items, item_likelihoods(model, name, items, watch)), "items": len(items)}


def item_likelihoods(
    model: ScorableModel, name: str, items: Sequence[Item], watch: Watch = lambda done, total: None
) -> list[list[Likelihood]]:
    """The likelihoods of each item's pairs."""
    pairs_by_item = [TASKS[name].pairs(item) for item in items]
    with _naming(name):
        flat = iter(likelihoods(model, [pair for pairs in pairs_by_item for pair in pairs], watch))
    return [[next(flat) for _ in pairs] for pairs in pairs_by_item]


def check_characters(tokenizer: Tokenizer, name: str, items: Sequence[Item], context: int) -> None:
    """Refuse items with characters that a char tokenizer does not have; others can encode any text."""
    if isinstance(tokenizer, Char):
        with _naming(name):
            encode(tokenizer, [pair for item in items for pair in TASKS[name].pairs(item)], context)


@contextmanager
def _naming(task: str) -> Iterator[None]:
    """Errors of a tokenizer, with the task whose items it cannot encode."""
    try:
        yield
    except RaygptError as error:
        raise RaygptError(f"{task} cannot be evaluated: {str(error).partition(';')[0]}; leave it out") from None


def read_items(name: str, path: str | None, limit: int | None = None) -> list[Item]:
    """The items of a jsonl file, or of the task's dataset on the Hub; all, or the first `limit`."""
    task = TASKS[name]
    where = path or task.on_the_hub
    items = _lines(path) if path else _rows(where)
    if not items:
        raise RaygptError(f"{where} has no items; name a .jsonl file with an item of {name} in every line")
    for line, item in items.items():
        if problem := task.problem(item):
            raise RaygptError(f"{where}, line {line}: {problem}")
    return list(items.values())[:limit]


def _lines(path: str) -> dict[int, Item]:
    """Line -> its item, without empty lines."""
    try:
        lines = storage.read_bytes(storage.absolute(path)).splitlines()
    except OSError as error:
        raise RaygptError(f"{path} cannot be read ({error.strerror or error}); check the path") from None
    items = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                item = json.loads(line)
            except ValueError as error:
                raise RaygptError(f"{path}, line {number}: is not JSON ({error}); name a .jsonl file") from None
            items[number] = item if isinstance(item, dict) else {}
    return items


def _rows(dataset: str) -> dict[int, Item]:
    import pyarrow.parquet as pq

    rows: list[Item] = []
    for file in resolve(dataset).files:
        with storage.open_read(file.uri) as stream:
            rows += pq.read_table(stream).to_pylist()
    return dict(enumerate(rows, 1))
