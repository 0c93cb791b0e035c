"""The numbers of a run, worked out by hand for GPT-2 small."""

import pytest

from raygpt.recipes import load_recipe
from raygpt.training.plan import host_memory, make_plan, row_bytes, size

GIB = 2**30


def plan(*, memory_gib=64.0, workers=1, rows=32, precision="fp32", **changes):
    """GPT-2 small, `rows` of 1024 tokens a batch, 9 million tokens to train on."""
    recipe = load_recipe(
        "gpt2-124m-openwebtext",
        {
            "training.batch_tokens": rows * 1024,
            "training.steps": 1000,
            "cluster.workers": workers,
            "model.precision": precision,
            **changes,
        },
    )
    return make_plan(
        recipe,
        vocab=50257,
        train_tokens=9_000_000,
        val_tokens=4_000,
        run_folder="runs/it",
        memory_bytes=int(memory_gib * GIB),
    )


def test_gpt2s_numbers_are_the_published_ones():
    numbers = plan()
    assert numbers.parameters == 124_439_808
    assert numbers.flops_per_token == 859_885_056  # 6 · 124,439,808 + 12 · 12 · 768 · 1024
    assert (numbers.rows, numbers.context, numbers.batch_tokens) == (32, 1024, 32_768)
    assert numbers.tokens == 32_768_000
    assert numbers.epochs == pytest.approx(3.640889, abs=1e-6)


def test_a_row_keeps_sixteen_widths_of_activations_per_token_and_layer():
    recipe = load_recipe("gpt2-124m-openwebtext", {"model.precision": "fp32"})
    assert row_bytes(recipe) == 603_979_776  # 12 · 1024 · 768 · 16 · 4 bytes
    assert row_bytes(load_recipe("gpt2-124m-openwebtext", {"model.precision": "bf16"})) == 301_989_888
    assert row_bytes(load_recipe("gpt2-124m-openwebtext")) == 603_979_776  # auto: the safe guess


@pytest.mark.parametrize(
    ("memory_gib", "precision", "micro_rows", "accumulation", "needed"),
    [
        (64, "fp32", 32, 1, 21_318_389_760),  # (51.2 GiB - 1.99 GB) / 604 MB: room for 87 rows
        (16, "fp32", 16, 2, 11_654_713_344),  # room for 19, but 2 turns of 16 are all
        (8, "fp32", 8, 4, 6_822_875_136),  # room for 8
        (8, "bf16", 16, 2, 6_822_875_136),  # room for 16: a row is half as large
        (7, "fp32", 6, 6, 5_614_915_584),  # room for 6: the last turn is not full
        (1, "fp32", 1, 32, 2_595_016_704),  # not even room for the parameters: the least there is
    ],
)
def test_accumulation_is_the_least_that_fits_into_memory(memory_gib, precision, micro_rows, accumulation, needed):
    numbers = plan(memory_gib=memory_gib, precision=precision)
    assert (numbers.micro_rows, numbers.accumulation) == (micro_rows, accumulation)
    assert numbers.memory_bytes == needed  # 16 bytes a parameter, and the rows of one turn


@pytest.mark.parametrize(
    ("workers", "rows", "micro_rows", "line"),
    [
        (1, 32, 32, "32 rows × 1024 tokens = 32 rows × 1 worker × 1 accumulated"),
        (4, 32, 8, "32 rows × 1024 tokens = 8 rows × 4 workers × 1 accumulated"),
        (3, 32, 11, "32 rows × 1024 tokens = 11 rows × 3 workers × 1 accumulated, 1 of them padding"),
    ],
)
def test_rows_are_shared_out_over_workers_and_padded(workers, rows, micro_rows, line):
    numbers = plan(workers=workers, rows=rows)
    assert (numbers.workers, numbers.micro_rows, numbers.accumulation) == (workers, micro_rows, 1)
    assert dict(numbers.lines())["batch"] == line


def test_an_elastic_run_is_planned_for_all_its_workers():
    assert plan(workers="1..4").workers == 4


def test_people_read_every_number():
    lines = dict(plan().lines())
    assert lines == {
        "parameters": "124,439,808 with 50,257 tokens in the vocabulary",
        "corpus": "9,000,000 tokens to train on, 4,000 to validate",
        "training": "1,000 steps × 32,768 tokens = 32,768,000 tokens, 3.64 epochs, 0.3 tokens per parameter",
        "batch": "32 rows × 1024 tokens = 32 rows × 1 worker × 1 accumulated",
        "compute": "859.9 MFLOPs per token, 2.82e+16 FLOPs in all",
        "memory": "about 19.9 GiB per worker for parameters, optimizer and activations",
        "run": "runs/it",
    }


def test_the_plan_as_json_has_what_follows_from_it_too():
    numbers = plan()
    values = numbers.as_dict()
    assert values["parameters"] == 124_439_808
    assert (values["batch_tokens"], values["tokens"], values["epochs"]) == (32_768, 32_768_000, numbers.epochs)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * GIB, "1.5 GiB"), (2.5 * 1024 * GIB, "2.5 TiB")],
)
def test_bytes_are_written_for_people(count, text):
    assert size(count) == text


def test_this_machine_has_memory():
    assert host_memory() > GIB // 2
