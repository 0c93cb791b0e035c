"""The shipped recipes: their comments are true, and their numbers are those of what they follow."""

import re
from collections.abc import Iterator

import pytest
import yaml

from raygpt.corpus.order import window_count
from raygpt.models import describe
from raygpt.recipes import load_recipe, recipe_text, shipped_recipes
from raygpt.recipes.explain import keys
from raygpt.recipes.lengths import in_steps

RECIPES = [
    "gpt2-124m",
    "gpt2-124m-openwebtext",
    "gpt2-124m-wikitext103",
    "gpt2-124m-wikitext103-smoke",
    "gpt2-tiny",
    "modern-1.5b",
    "modern-124m",
    "modern-350m",
    "shakespeare-char",
    "shakespeare-modern",
    "speedrun-124m",
    "tiny",
]


def lines_of_keys(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each dotted key that sets a value, with its line, counted from 0."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            yield from lines_of_keys(value, f"{prefix}{key.value}.")
        else:
            yield prefix + key.value, key.start_mark.line


def comment_above(lines: list[str], line: int) -> str:
    """The block of comment lines directly above a line, joined."""
    block: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        block.insert(0, lines[line].strip().removeprefix("# "))
    return " ".join(block)


def test_the_shipped_recipes_are_these_each_with_a_line_about_it() -> None:
    shipped = shipped_recipes()
    assert list(shipped) == RECIPES
    assert shipped["tiny"] == recipe_text("tiny").splitlines()[0].removeprefix("# ")
    assert all(line.endswith(".") and not line.startswith("#") for line in shipped.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_comment_above_each_key_gives_its_type_its_default_and_a_reason(name: str) -> None:
    text = recipe_text(name)
    lines = text.splitlines()
    described = {key.name: key for key in keys()}
    for key, line in lines_of_keys(yaml.compose(text)):
        begins = f"{described[key].type}, default {described[key].default}. "
        comment = comment_above(lines, line)
        assert comment.startswith(begins), (key, comment)
        assert re.fullmatch(r"\S.*\.", comment.removeprefix(begins)), (key, comment)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_lines_fit_on_a_screen(name: str) -> None:
    assert max(map(len, recipe_text(name).splitlines())) <= 110


def test_tiny_is_small_enough_for_two_cores_and_needs_no_file() -> None:
    tiny = load_recipe("tiny")
    assert describe(tiny.model, 4096).count == 1_835_008  # "1.8 M" in its first line
    assert tiny.training.steps * tiny.training.batch_tokens == 737_280  # "0.7 million tokens"
    assert (tiny.data.source, tiny.data.tokenizer) == ("stdlib", "bpe:4096")


def test_gpt2_tiny_has_tinys_size_and_its_batches() -> None:
    modern, gpt2 = load_recipe("tiny").to_dict(), load_recipe("gpt2-tiny").to_dict()
    assert all(modern["model"][key] == gpt2["model"][key] for key in ("layers", "width", "context"))
    assert all(modern["training"][key] == gpt2["training"][key] for key in ("seed", "batch_tokens"))
    assert modern["data"] == gpt2["data"]


def test_tiny_lists_the_keys_that_people_change() -> None:
    listed = {key for key, _ in lines_of_keys(yaml.compose(recipe_text("tiny")))}
    assert listed >= {
        "engine", "model.layers", "model.width", "model.context", "data.source", "data.tokenizer",
        "optimizer.learning_rate", "schedule.kind", "training.steps", "training.batch_tokens",
        "cluster.workers", "cluster.accelerator", "run.storage",
    }  # fmt: skip


def test_shakespeare_char_has_nanogpts_numbers_for_a_cpu() -> None:
    recipe = load_recipe("shakespeare-char")
    model, data, optimizer, schedule = recipe.model, recipe.data, recipe.optimizer, recipe.schedule
    assert (model.layers, model.heads, model.width, model.context) == (4, 4, 128, 64)
    assert (model.dropout, model.bias) == (0.0, False)
    assert (data.tokenizer, data.val, data.split, data.order) == ("char", 0.1, "tail", "shuffled")
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (1e-3, (0.9, 0.99), 0.1)
    assert optimizer.clip == 1.0
    assert (schedule.kind, schedule.warmup_steps) == ("cosine", 100)
    assert optimizer.learning_rate * schedule.end == pytest.approx(2e-4)  # its own is 1e-4: see benchmarks/LOG.md
    assert (recipe.training.steps, recipe.training.batch_tokens) == (2000, 12 * 64)
    positions = 64 * 128  # left out in the "number of parameters: 0.80M" that nanoGPT prints
    assert round((describe(model, 65).count - positions) / 1e6, 2) == 0.80


def test_gpt2_124m_openwebtext_has_the_jax_tutorials_numbers() -> None:
    recipe = load_recipe("gpt2-124m-openwebtext")
    model, data, optimizer, schedule = recipe.model, recipe.data, recipe.optimizer, recipe.schedule
    assert describe(model, 50257).count == 124_439_808
    assert (model.context, model.dropout, model.init, model.norm_epsilon) == (1024, 0.1, "xavier", 1e-6)
    assert (data.source, data.tokenizer) == ("openwebtext", "gpt2")
    assert (data.val, data.split, data.split_seed) == (0.0005, "huggingface", 2357)
    assert (optimizer.learning_rate, optimizer.betas) == (5e-4, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip) == (0.1, "all", None)
    assert (schedule.kind, schedule.warmup_steps, schedule.end) == ("cosine", 0, 0.0)
    training = recipe.training
    assert (training.steps, training.batch_tokens) == (10_000, 32 * 1024)
    assert (training.log_every, training.eval_every, training.checkpoint_every) == (10, 100, 100)
    assert recipe.engine == "jax"


def test_gpt2_124m_wikitext103_has_the_pytorch_tutorials_numbers() -> None:
    recipe = load_recipe("gpt2-124m-wikitext103")
    assert describe(recipe.model, 50257).count == 123_849_984  # "123.8 M parameters at 256 positions"
    assert (recipe.model.context, recipe.model.dropout, recipe.model.norm_epsilon) == (256, 0.1, 1e-5)
    assert (recipe.data.source, recipe.data.val) == ("wikitext-103", "wikitext-103:validation")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas) == (3e-4, (0.9, 0.999))
    assert (recipe.optimizer.weight_decay, recipe.optimizer.clip) == (0.1, 1.0)
    assert (recipe.schedule.kind, recipe.schedule.warmup_steps) == ("constant", 0)
    assert recipe.training.batch_tokens == 4 * 16 * 256
    training = recipe.training
    assert (training.epochs, training.eval_every, training.checkpoint_every) == (5, "epoch", "epoch")
    known = in_steps(recipe, window_count(117_920_140, 256)).training
    assert (known.steps, known.eval_every, known.checkpoint_every) == (35_990, 7_198, 7_198)  # as its comment says
    assert (recipe.engine, recipe.cluster.workers, recipe.run.keep) == ("torch", 4, 2)


def test_the_smoke_variant_is_the_tutorials_smoke_mode_on_two_cpu_workers() -> None:
    whole, smoke = load_recipe("gpt2-124m-wikitext103"), load_recipe("gpt2-124m-wikitext103-smoke")
    for part in ("engine", "model", "optimizer", "schedule"):
        assert getattr(smoke, part) == getattr(whole, part)
    assert (smoke.data.limit, smoke.training.steps, smoke.data.order) == (2500, 25, "sequential")
    assert smoke.training.batch_tokens == 2 * 16 * 256
    assert (smoke.cluster.workers, smoke.cluster.accelerator) == (2, "cpu")
    assert smoke.training.in_epochs is None  # or it could not stream
