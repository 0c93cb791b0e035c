"""The numbers of a run, worked out by hand for GPT-2 small."""

import pytest

from raygpt.engines.base import Devices
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.training.plan import in_steps, make_plan, size, split_batch

GIB = 2**30
STATE = 16 * 124_439_808  # bytes: parameters, gradients and AdamW's two averages in fp32


def gpt2(rows=32, **changes):
    """GPT-2 small, `rows` of 1024 tokens a batch."""
    return load_recipe(
        "gpt2-124m-openwebtext", {"training.batch_tokens": rows * 1024, "training.steps": 1000, **changes}
    )


def plan():
    """On 9 million tokens."""
    return make_plan(gpt2(), vocab=50257, train_tokens=9_000_000, val_tokens=4_000, run_folder="runs/it")


def split(*, memory_gib=64.0, devices=1, number_bytes=4, keeps_scores=False, **changes):
    return split_batch(gpt2(**changes), 50257, Devices(devices, int(memory_gib * GIB), number_bytes, keeps_scores))


def test_gpt2s_numbers_are_the_published_ones():
    numbers = plan()
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


@pytest.mark.parametrize(
    ("memory_gib", "number_bytes", "micro_rows", "accumulation"),
    [
        (64, 4, 32, 1),  # (51.2 GiB - 1.99 GB) / 604 MB: room for 87 rows
        (16, 4, 16, 2),  # room for 19, but 2 turns of 16 are all
        (8, 4, 8, 4),  # room for 8
        (8, 2, 16, 2),  # room for 16: a row is half as large
        (7, 4, 6, 6),  # room for 6: the last turn is not full
        (1, 4, 1, 32),  # not even room for the parameters: the least there is
    ],
)
def test_accumulation_is_the_least_that_fits_into_memory(memory_gib, number_bytes, micro_rows, accumulation):
    got = split(memory_gib=memory_gib, number_bytes=number_bytes)
    assert (got.micro_rows, got.accumulation) == (micro_rows, accumulation)
    row = 12 * 1024 * 768 * 16 * number_bytes
    assert got.memory_bytes == STATE + micro_rows * row


def test_the_recipe_may_say_how_often_it_accumulates():
    got = split(**{"training.accumulation": 5})
    assert (got.micro_rows, got.accumulation) == (7, 5)
    assert str(got).startswith("32 rows = 7 rows over 1 device × 5 accumulated, 3 of them padding; about ")


@pytest.mark.parametrize(
    ("devices", "mesh", "micro_rows", "state_share"),
    [
        (4, {}, 32, 1),
        (3, {}, 33, 1),
        (8, {"fsdp": 8}, 32, 8),
        (8, {"fsdp": 4, "tensor": 2}, 32, 8),
        (16, {"data": 4, "fsdp": 2, "tensor": 2}, 32, 4),
        (2, {"context": 2}, 32, 1),
    ],
)
def test_rows_are_shared_out_over_the_mesh_and_padded(devices, mesh, micro_rows, state_share):
    got = split(devices=devices, **{"cluster.mesh": mesh})
    assert (got.micro_rows, got.accumulation) == (micro_rows, 1)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | mesh
    rows = micro_rows // (devices // (sizes["tensor"] * sizes["context"]))
    shared = 12 * 1024 * 768 * 16 * 4 // (sizes["tensor"] * sizes["context"])
    assert got.memory_bytes == STATE // state_share + rows * shared


def test_a_mesh_that_does_not_multiply_to_the_devices_is_refused():
    with pytest.raises(RaygptError, match=r"cluster\.mesh: data=3 × fsdp=5 does not multiply to the 8 devices"):
        split(devices=8, **{"cluster.mesh": {"data": 3, "fsdp": 5}})


def test_people_read_every_number():
    lines = dict(plan().lines())
    assert lines == {
        "parameters": "124,439,808 with 50,257 tokens in the vocabulary",
        "corpus": "9,000,000 tokens to train on, 4,000 to validate",
        "training": "1,000 steps × 32 rows × 1,024 tokens = 32,768,000 tokens, 3.64 epochs, 0.3 tokens per parameter",
        "compute": "859.9 MFLOPs per token, 2.82e+16 FLOPs in all",
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
