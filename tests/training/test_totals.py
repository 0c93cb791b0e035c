"""The numbers of a run, worked out by hand for GPT-2 small."""

import pytest

from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.recipes import load_recipe
from raygpt.recipes.lengths import in_steps
from raygpt.training.totals import compute_totals

GIB = 2**30


def gpt2(rows=32, **changes):
    """GPT-2 small, `rows` of 1024 tokens a batch."""
    return load_recipe(
        "gpt2-124m-openwebtext", {"training.batch_tokens": rows * 1024, "training.steps": 1000, **changes}
    )


def totals():
    """On 9 million tokens."""
    return compute_totals(gpt2(), vocab=50257, train_tokens=9_000_000, val_tokens=4_000, run_folder="runs/it")


def test_gpt2s_numbers_are_the_published_ones():
    numbers = totals()
    assert numbers.parameters == 124_439_808
    assert numbers.flops_per_token == 859_885_056  # 6 · 124,439,808 + 12 · 12 · 768 · 1024
    assert (numbers.rows, numbers.context, numbers.batch_tokens) == (32, 1024, 32_768)
    assert numbers.tokens == 32_768_000
    assert numbers.epochs == pytest.approx(3.640889, abs=1e-6)


@pytest.mark.parametrize(
    ("windows", "epochs", "steps", "epoch"),
    [
        (320, 5, 50, 10),  # 32 rows a batch
        (321, 5, 55, 11),  # the batch that ends an epoch begins the next
        (320, 0.25, 3, 10),
        (5, 3, 3, 1),
    ],
)
def test_an_epoch_is_the_steps_that_see_every_window(windows, epochs, steps, epoch):
    training = {"training.epochs": epochs, "training.steps": None, "training.eval_every": "epoch"}
    known = in_steps(gpt2(**training, **{"training.checkpoint_every": 7}), windows)
    assert (known.steps, known.training.eval_every, known.training.checkpoint_every) == (steps, epoch, 7)
    assert known.model == gpt2().model


def test_a_recipe_in_steps_stays_as_it_is():
    assert in_steps(gpt2(), 320) == gpt2()


def test_a_warm_up_that_turns_out_longer_than_the_epochs_is_refused():
    changes = {"training.epochs": 1, "training.steps": None, "schedule.warmup_steps": 20}
    with pytest.raises(RaygptError) as caught:
        in_steps(gpt2(**changes), 320)
    assert str(caught.value) == "schedule.warmup_steps: 20 is more than training.steps 10; write 10 or less"


@pytest.mark.parametrize("epochs", [1e9, 1e300, 1e308])
def test_epochs_of_more_steps_than_engines_count_are_refused(epochs):
    with pytest.raises(RaygptError) as caught:
        in_steps(gpt2(**{"training.epochs": epochs, "training.steps": None}), 320)
    line = f"training.epochs: {epochs:g} of 10 steps are more than 2,147,483,647 steps; write fewer"
    assert str(caught.value) == line


def test_a_corpus_without_a_window_is_refused():
    with pytest.raises(RaygptError, match=r"^data\.source: has fewer tokens than a window of 1025; set model\.context"):
        in_steps(gpt2(), 0)


def test_every_number_has_a_line_that_people_can_read():
    lines = dict(totals().lines())
    assert lines == {
        "parameters": "124,439,808 with 50,257 tokens in the vocabulary",
        "corpus": "9,000,000 tokens to train on, 4,000 to validate",
        "training": "1,000 steps × 32 rows × 1,024 tokens = 32,768,000 tokens, 3.64 epochs, 0.26 tokens per parameter",
        "compute": "859.9 MFLOPs per token, 2.82e+16 FLOPs in all",
        "run": "runs/it",
    }


def test_the_plan_as_json_has_what_follows_from_it_too():
    numbers = totals()
    values = numbers.as_dict()
    assert values["parameters"] == 124_439_808
    assert (values["batch_tokens"], values["tokens"], values["epochs"]) == (32_768, 32_768_000, numbers.epochs)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * GIB, "1.5 GiB"), (2.5 * 1024 * GIB, "2.5 TiB")],
)
def test_bytes_are_written_for_people(count, text):
    assert size(count) == text
