"""How a batch is split, and the memory that it needs: against peaks that were measured and what compilers say."""

import json
import runpy

import pytest
from conftest import CHECKOUT

from raygpt.engines.base import Devices
from raygpt.errors import RaygptError
from raygpt.planning.micro_batch_size import FILLED, cpu_devices, split_batch, worker_bytes
from raygpt.planning.target import parse_target
from raygpt.recipes import load_recipe
from raygpt.resources import PROCESS_BYTES

GIB = 2**30


def gpt2(rows=32, **changes):
    """GPT-2 small, `rows` of 1024 tokens a batch."""
    return load_recipe(
        "gpt2-124m",
        {"training.batch_tokens": rows * 1024, "training.steps": 1000, "schedule.warmup_steps": 0, **changes},
    )


def split(*, memory_gib=64.0, devices=1, number_bytes=4, keeps_scores=False, **changes):
    return split_batch(gpt2(**changes), 50257, Devices(devices, int(memory_gib * GIB), number_bytes, keeps_scores))


PADDED = 124_439_808 + 47 * 768  # parameters with 50,304 rows in the token table
STATE = 20 * PADDED  # bytes on a CPU: parameters, AdamW's two averages, gradients and room for an update, all fp32


@pytest.mark.parametrize(
    ("memory_gib", "number_bytes", "micro_rows", "accumulation"),
    [
        (64, 4, 32, 1),
        (16, 4, 16, 2),  # room for 16.7 rows of 629 MB: 80 % of 16 GiB less 3.2 GB
        (12, 4, 11, 3),  # room for 11.2
        (16, 2, 32, 1),  # a row is half as large
        (4, 4, 1, 32),  # room for little more than one row
    ],
)
def test_accumulation_is_the_least_that_fits_into_memory(memory_gib, number_bytes, micro_rows, accumulation):
    got = split(memory_gib=memory_gib, number_bytes=number_bytes, engine="torch")
    assert (got.micro_rows, got.accumulation) == (micro_rows, accumulation)
    row = 1024 * 768 * (12 * 16 + 8) * number_bytes  # 16 widths a layer, and the gradients of a hidden layer
    summed = 0 if accumulation == 1 else 4 * PADDED
    logits = got.memory.logits
    assert got.memory_bytes == STATE + summed + logits + micro_rows * row
    assert logits <= 10 * 512 * 50304  # of 512 tokens, which a CPU's caches hold


def test_one_micro_batch_is_taken_where_the_sum_of_gradients_of_two_does_not_fit():
    """Two micro-batches need 4 bytes more for each parameter, which here is more than a row needs."""
    changes = {"rows": 1, "engine": "torch", "model.context": 512}
    one, two = (split(**changes, **{"training.accumulation": count}).memory_bytes for count in (1, 2))
    assert one < two
    room = (one + two) / 2 / FILLED["cpu"] / GIB
    assert split(memory_gib=room, **changes).accumulation == 1


def test_a_model_that_does_not_fit_even_with_one_row_is_refused_with_the_figures():
    with pytest.raises(RaygptError) as refused:
        split(memory_gib=1)
    assert str(refused.value) == (
        "model: it needs 3.3 GiB on a device (1.9 GiB for parameters, gradients and optimizer), but the device has "
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
    assert str(got) == "32 rows = 7 × 5 accumulated, 3 of them padding, 1 device"


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


def test_plans_are_within_a_tenth_of_what_the_tpus_compiler_needs(monkeypatch):
    """benchmarks/tpu_compile.py, whose cases they are: every mesh with GPT-2 and with modern models."""
    file = CHECKOUT / "benchmarks" / "tpu_compile.py"
    monkeypatch.syspath_prepend(file.parent)
    benchmark = runpy.run_path(str(file))
    figures = json.loads((file.parent / "results" / "tpu-v6e-compile.json").read_text())["figures"]["cases"]
    cases = benchmark["cases"]()
    assert figures.keys() == cases.keys()
    for name, case in cases.items():
        assert benchmark["planned"](case) / GIB == pytest.approx(figures[name]["total_gib"], rel=0.1), name


def test_plans_of_up_to_two_slices_are_near_what_the_compiler_needs_and_sends(monkeypatch):
    """benchmarks/scale.py: models of 1.5 B on 16, 64, 256 and 512 chips. Bytes within a fifth along fsdp."""
    pytest.importorskip("jax")
    file = CHECKOUT / "benchmarks" / "scale.py"
    monkeypatch.syspath_prepend(file.parent)
    benchmark = runpy.run_path(str(file))
    figures = json.loads((file.parent / "results" / "scale-compiled.json").read_text())["figures"]["cases"]
    assert figures.keys() == benchmark["cases"]().keys()
    for name, case in benchmark["cases"]().items():
        memory, sent = benchmark["planned"](case)
        assert memory / GIB == pytest.approx(figures[name]["gib"], rel=0.1), name
        assert sent["fsdp"] / 2**20 == pytest.approx(figures[name]["sent_mib"]["fsdp"], rel=0.21), name


@pytest.mark.parametrize(
    ("engine", "fused", "preset", "rows", "context", "gib"),
    [
        ("jax", True, "gpt2", 32, 1024, 14.025),
        ("jax", True, "gpt2", 64, 1024, 23.478),
        ("jax", True, "gpt2", 16, 4096, 23.504),
        ("jax", True, "gpt2-medium", 32, 1024, 32.166),
        ("jax", True, "gpt2-large", 32, 1024, 58.781),
        ("jax", False, "gpt2-xl", 16, 1024, 69.116),
        ("torch", False, "gpt2", 32, 1024, 12.504),
        ("torch", False, "gpt2", 64, 1024, 21.809),
        ("torch", False, "gpt2-medium", 32, 1024, 30.567),
    ],
)
def test_the_estimate_is_within_5_percent_of_the_peak_on_an_h200(engine, fused, preset, rows, context, gib):
    """benchmarks/results/step-*.json have the peaks."""
    size = {"model.preset": preset, "model.context": context, "training.batch_tokens": rows * context}
    devices = Devices(1, 128 * GIB, 2, keeps_scores=False, platform="gpu", fused=fused)
    got = split_batch(load_recipe("gpt2-124m", {"engine": engine, **size}), 50257, devices)
    assert got.accumulation == 1
    assert got.memory_bytes / GIB == pytest.approx(gib, rel=0.05)


# Measured when PyTorch's Muon needed more memory, and then when its compiler kept what should be computed again.
OUTDATED = "torch modern-350m 32x1024 blocks"


@pytest.mark.parametrize(
    ("name", "fitting", "beyond", "slow"),
    [
        ("plan-h200", 15, 0, ["torch modern-124m 32x2048"]),  # in the last of these calls it was as planned
        ("plan-h200-large", 11, 4, []),
        ("plan-h200-checks", 8, 0, []),
        ("plan-h200-blocks", 7, 0, []),
        ("plan-h200-frozen", 10, 0, []),
    ],
)
def test_plans_are_near_what_one_h200_measured(name, fitting, beyond, slow, monkeypatch):
    """benchmarks/plan.py, whose cases they are: memory within 5 %, time within 10 % of their engine's median."""
    file = CHECKOUT / "benchmarks" / "plan.py"
    monkeypatch.syspath_prepend(file.parent)
    benchmark = runpy.run_path(str(file))
    figures = json.loads((file.parent / "results" / f"{name}.json").read_text())["figures"]
    rows = benchmark["compared"](figures, parse_target("h200"))
    fits = [row for row in rows if row["measured"]["fits"]]
    others = [row["plan"] for row in rows if not row["measured"]["fits"]]
    assert (len(fits), len(others)) == (fitting, beyond)
    assert max(abs(row["memory_off"]) for row in fits if row["case"].name != OUTDATED) < 0.05
    assert [row["case"].name for row in fits if abs(row["time_off"]) >= 0.1] == slow
    assert all(plan["gib"] > plan["limit"] for plan in others)


def test_attention_that_keeps_its_scores_needs_as_much_again():
    # GPT-2's scores and weights at 1024: 16 widths of 2 + 4 bytes per token and layer, beside 18 of 2
    fused, plain = (split(number_bytes=2, keeps_scores=keeps).memory_bytes for keeps in (False, True))
    assert plain - fused == 32 * 12 * 1024 * 768 * 16 * 6


def test_a_mesh_that_does_not_multiply_to_the_devices_is_refused():
    with pytest.raises(RaygptError, match=r"cluster\.mesh: data=3 × fsdp=5 does not multiply to the 8 devices"):
        split(devices=8, **{"cluster.mesh": {"data": 3, "fsdp": 5}})
