"""The numbers of a run, worked out by hand for GPT-2 small."""

import pytest

from raygpt.engines.base import Devices
from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.recipes import load_recipe
from raygpt.training.plan import PROCESS_BYTES, cpu_devices, in_steps, make_plan, split_batch, worker_bytes

GIB = 2**30
STATE = 20 * 124_439_808  # bytes: parameters, AdamW's two averages and twice the gradients in fp32
LOGITS = 10 * 2**28  # bytes: as many logits as are held at a time


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
        (64, 4, 32, 1),  # (51.2 GiB - 5.17 GB) / 680 MB: room for 73 rows
        (24, 4, 16, 2),  # room for 22, but 2 turns of 16 are all
        (16, 4, 11, 3),  # room for 12: 3 turns of 11
        (16, 2, 16, 2),  # room for 25: a row is half as large
        (4, 4, 1, 32),  # room for little more than one row
    ],
)
def test_accumulation_is_the_least_that_fits_into_memory(memory_gib, number_bytes, micro_rows, accumulation):
    got = split(memory_gib=memory_gib, number_bytes=number_bytes)
    assert (got.micro_rows, got.accumulation) == (micro_rows, accumulation)
    row = 12 * 1024 * 768 * 18 * number_bytes
    logits = min(LOGITS, 10 * micro_rows * 1024 * 50257)
    assert got.memory_bytes == STATE + logits + micro_rows * row


def test_a_model_that_does_not_fit_even_with_one_row_is_refused_with_the_figures():
    with pytest.raises(RaygptError) as refused:
        split(memory_gib=1)
    assert str(refused.value) == (
        "model: it needs 3.4 GiB on a device (2.3 GiB for parameters, gradients and optimizer), but the device has "
        "1.0 GiB; write smaller model.layers or width"
    )
    with pytest.raises(
        RaygptError, match=r"each of the 8 devices has 2\.0 GiB; write cluster\.mesh\.fsdp: -1 to shard"
    ):
        split(memory_gib=2, devices=8)
    assert split(memory_gib=2, devices=8, **{"cluster.mesh": {"data": 1, "fsdp": -1}}).memory_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("engine", "workers", "beside", "expected"),
    [
        ("jax", 1, 1, Devices(8, 2 * GIB, 4, keeps_scores=True)),  # every core is a device
        ("jax", 4, 4, Devices(8, 2 * GIB, 4, keeps_scores=True)),
        ("jax", 4, 2, Devices(16, 2 * GIB, 4, keeps_scores=True)),
        ("jax", 16, 16, Devices(16, 2 * GIB, 4, keeps_scores=True)),
        ("torch", 1, 1, Devices(1, 16 * GIB, 4, keeps_scores=False)),
        ("torch", 4, 2, Devices(4, 8 * GIB, 4, keeps_scores=False)),
    ],
)
def test_the_devices_of_cpu_workers_are_known_before_they_start(engine, workers, beside, expected):
    assert cpu_devices(gpt2(engine=engine), workers, beside, cores=8, memory=16 * GIB) == expected


def test_a_worker_on_a_cpu_needs_memory_for_its_devices_and_its_process():
    recipe, devices = gpt2(), Devices(4, 16 * GIB, 4, keeps_scores=False)
    each = split_batch(recipe, 50257, devices).memory_bytes
    assert worker_bytes(recipe, 50257, devices, workers=2) == 2 * each + PROCESS_BYTES


def test_the_recipe_may_say_how_often_it_accumulates():
    got = split(**{"training.accumulation": 5})
    assert (got.micro_rows, got.accumulation) == (7, 5)
    assert str(got).startswith("32 rows = 7 rows over 1 device × 5 accumulated, 3 of them padding; about ")


@pytest.mark.parametrize(
    ("devices", "mesh", "micro_rows"),
    [
        (4, {}, 32),
        (3, {}, 33),
        (8, {"fsdp": 8}, 32),
        (16, {"data": 4, "fsdp": 2, "tensor": 2}, 32),
        (2, {"context": 2}, 32),
    ],
)
def test_rows_are_shared_out_over_the_mesh_and_padded(devices, mesh, micro_rows):
    got = split(devices=devices, **{"cluster.mesh": mesh})
    assert (got.micro_rows, got.accumulation) == (micro_rows, 1)


@pytest.mark.parametrize(
    ("preset", "mesh", "changes", "gib"),
    [
        ("gpt2", {"data": 16}, {}, 15.5),
        ("gpt2", {"fsdp": 16}, {}, 14.1),
        ("gpt2", {"fsdp": 8, "tensor": 2}, {}, 16.3),
        ("gpt2-xl", {"fsdp": 16}, {"training.remat": "blocks"}, 10.0),
        ("gpt2-xl", {"data": 2, "fsdp": 8}, {"training.remat": "blocks"}, 11.1),
    ],
)
def test_the_estimate_is_within_a_fifth_of_what_the_tpus_compiler_needs(preset, mesh, changes, gib):
    """512 rows in bf16 on 16 chips; benchmarks/results/tpu-v6e-compile.json has the compiler's figures."""
    settings = {"model": {"preset": preset}, "cluster.mesh": {"data": 1, **mesh}, **changes}
    recipe = load_recipe("gpt2-tiny", {**settings, "training.batch_tokens": 512 * 1024})
    got = split_batch(recipe, 50257, Devices(16, 32 * GIB, 2, keeps_scores=False))
    assert got.accumulation == 1
    assert got.memory_bytes / GIB == pytest.approx(gib, rel=0.2)


def test_attention_that_keeps_its_scores_needs_as_much_again():
    # GPT-2's scores and weights at 1024: 16 widths of 2 + 4 bytes per token and layer, beside 18 of 2
    fused, plain = (split(number_bytes=2, keeps_scores=keeps).memory_bytes for keeps in (False, True))
    assert plain - fused == 32 * 12 * 1024 * 768 * 16 * 6


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
