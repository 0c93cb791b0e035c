"""What `--on` names."""

import subprocess

import pytest

from raygpt.errors import RaygptError
from raygpt.planning import target as module
from raygpt.planning.cpu_speed import cpu_speed
from raygpt.planning.devices import DEVICES, GIB
from raygpt.planning.target import devices_on, other_hardware_keys, parse_target, precision_on, worker_keys
from raygpt.recipes import load_recipe


@pytest.mark.parametrize(
    ("text", "device", "count", "groups"),
    [
        ("h200", "h200", 1, 1),
        ("8xh100", "h100", 8, 1),
        ("4x8xa100-80", "a100-80", 32, 4),
        ("A100", "a100-80", 1, 1),
        ("2x4090", "rtx4090", 2, 1),
        ("v6e:4x4", "v6e", 16, 1),
        ("v5e:16x16", "v5e", 256, 1),
        ("2*v5p:4x4x4", "v5p", 128, 2),
        ("V6E:4X4", "v6e", 16, 1),
    ],
)
def test_a_target_is_devices_in_nodes_or_slices(text, device, count, groups):
    got = parse_target(text)
    assert (got.device, got.count, got.groups) == (DEVICES[device], count, groups)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h300", "--on h300: h300 is not one of b200, "),
        ("16xh100", "--on 16xh100: a node has at most 8 GPUs; write e.g. --on 2x8xh100"),
        ("v6e", "--on v6e: a TPU needs its slice; write e.g. --on v6e:4x4"),
        ("v6e:4x4x4", "--on v6e:4x4x4: a slice of v6e has 2 sides; write e.g. --on v6e:4x4"),
        ("v6e:3x5", "--on v6e:3x5: there is no slice 3x5 of TPU-V6E; there are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, "),
        ("v5e:16x32", "--on v5e:16x32: there is no slice 16x32 of TPU-V5LITEPOD; there are "),
        (
            "v4:3x3x3",
            "--on v4:3x3x3: there is no slice 3x3x3 of TPU-V4; there are 2x2x1, 2x2x2, 2x2x4, 2x4x4 or sides ",
        ),
        ("v5p:4x8x4", "--on v5p:4x8x4: there is no slice 4x8x4 of TPU-V5P; there are "),
        ("v6e:0x4", "--on v6e:0x4: there is no slice 0x4 of TPU-V6E; there are 1x1, "),
        ("0*v6e:4x4", "--on 0*v6e:4x4: has no devices; write e.g. --on v6e:4x4"),
        (
            "5000*v6e:16x16",
            "--on 5000*v6e:16x16: 1,280,000 devices are more than a plan is for; write 100,000 or fewer",
        ),
        ("9999999x8xh100", "--on 9999999x8xh100: 79,999,992 devices are more than a plan is for"),
        ("9" * 5000 + "xh100", "--on 999"),
        ("2*h100", "--on 2*h100: is no target; write e.g. --on 2x8xh100"),
        ("8xcpu", "--on 8xcpu: a CPU is measured, not looked up; write --on here on that machine"),
        ("h200:4x4", "--on h200:4x4: only TPUs come in slices; write e.g. --on 2x8xh200"),
        ("h200:2x2", "--on h200:2x2: only TPUs come in slices; write e.g. --on 4xh200"),
        ("0xh100", "--on 0xh100: has no devices; write e.g. --on 8xh100"),
        ("??", "--on ??: is no target; write e.g. h200, 8xh100, 4x8xa100-80, v6e:4x4 or 2*v5p:4x4x4"),
    ],
)
def test_what_is_no_target_is_refused_in_one_line(text, line):
    with pytest.raises(RaygptError) as refused:
        parse_target(text)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_an_unknown_device_is_described_by_three_figures():
    got = parse_target("8xmi300", peak=1300, memory=192, bandwidth=5300)
    assert (got.device.peak, got.device.memory, got.device.bandwidth, got.count) == (1.3e15, 192 * GIB, 5.3e12, 8)
    assert parse_target("h200", memory=100).device.memory == 100 * GIB


@pytest.mark.parametrize("on", ["h200", "8xmi300", "here"])
@pytest.mark.parametrize("figure", [0, 1e-12, -1, float("inf"), float("nan"), 1e308])
@pytest.mark.parametrize("name", ["peak", "memory", "bandwidth"])
def test_figures_that_no_device_has_are_refused(on, name, figure):
    figures = {"peak": 1300, "memory": 192, "bandwidth": 5300, name: figure}
    with pytest.raises(RaygptError, match=rf"^--{name} .+: no device has this; write 0.001 to 1.*,000 ?"):
        parse_target(on, **figures)


def test_a_slice_in_capitals_has_its_sides_and_workers():
    target = parse_target("V6E:4X4")
    assert target.sides == (4, 4)
    assert worker_keys(load_recipe("tiny").cluster, target)["cluster.topology"] == "4x4"


def test_here_may_be_in_capitals(monkeypatch):
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", lambda: ["NVIDIA H200, 143771"])
    assert parse_target("HERE").is_here


def test_this_machines_gpus_are_those_that_the_driver_reports(monkeypatch):
    monkeypatch.setattr(module, "_reported_gpus", lambda: ["NVIDIA H100 80GB HBM3, 81559"] * 4)
    got = parse_target("here")
    assert (got.device.name, got.count, got.device.memory) == ("h100", 4, 81559 * 2**20)


def test_this_machines_gpu_that_is_not_in_the_table_is_described_by_options(monkeypatch):
    monkeypatch.setattr(module, "_reported_gpus", lambda: ["NVIDIA X1, 16384"] * 2)
    got = parse_target("here", peak=100, bandwidth=500)
    assert (got.device.peak, got.device.memory, got.device.bandwidth, got.count) == (1e14, 16 * GIB, 5e11, 2)
    assert parse_target("here", peak=100, memory=8, bandwidth=500).device.memory == 8 * GIB
    with pytest.raises(RaygptError, match="NVIDIA X1 is not in the table of devices; describe it by --bandwidth GB/S"):
        parse_target("here", peak=100)


def test_a_machine_without_gpus_is_its_cpu_measured(monkeypatch):
    monkeypatch.setattr(module, "_reported_gpus", list)
    device = parse_target("here").device
    assert device.platform == "cpu"
    assert device.peak > 1e9  # a product of 768 × 768 takes less than a second
    assert device.source.startswith("measured here")


@pytest.mark.parametrize(
    ("on", "workers", "slice_"),
    [
        ("h200", 1, {}),
        ("4x8xh100", 32, {}),
        ("v6e:2x4", 1, {"accelerator_type": "TPU-V6E", "topology": "2x4"}),
        ("v5e:4x4", 4, {"accelerator_type": "TPU-V5LITEPOD", "topology": "4x4"}),
        ("2*v5p:4x4x4", 32, {"accelerator_type": "TPU-V5P", "topology": "4x4x4"}),
    ],
)
def test_a_worker_has_a_gpu_or_a_host_of_tpus(on, workers, slice_):
    wanted = {f"cluster.{key}": value for key, value in ({"workers": workers} | slice_).items()}
    assert worker_keys(load_recipe("tiny").cluster, parse_target(on)) == wanted


def test_workers_with_two_gpus_are_half_as_many():
    cluster = load_recipe("tiny", {"cluster.resources_per_worker": {"GPU": 2}}).cluster
    assert worker_keys(cluster, parse_target("8xh100")) == {"cluster.workers": 4}


@pytest.mark.parametrize(
    ("gpus", "on", "line"),
    [
        (3, "8xh100", "8 × h100 needs workers with whole GPUs that divide the 8 of a node, not 3; write GPU: 2"),
        (8, "2x4xh100", "8 × h100 in 2 nodes needs workers with whole GPUs that divide the 4 of a node, not 8; write"),
        (0.5, "8xh100", "a run with 0.5 of a GPU has one, not 8 × h100; write --on h100, or leave GPU out"),
        (0, "h100", "1 × h100 needs workers with whole GPUs that divide the 1 of a node, not 0; write GPU: 1"),
    ],
)
def test_gpus_of_a_worker_that_do_not_divide_a_node_are_refused(gpus, on, line):
    cluster = load_recipe("tiny", {"cluster.resources_per_worker": {"GPU": gpus}}).cluster
    with pytest.raises(RaygptError, match=f"^cluster.resources_per_worker: {line}"):
        worker_keys(cluster, parse_target(on))


def test_a_run_may_have_a_part_of_one_gpu():
    cluster = load_recipe("tiny", {"cluster.resources_per_worker": {"GPU": 0.5}}).cluster
    assert worker_keys(cluster, parse_target("h100")) == {"cluster.workers": 1}


@pytest.mark.parametrize(
    ("asked", "on", "keys"),
    [
        ({"accelerator": "cpu"}, "h200", {"accelerator": "gpu"}),
        ({"accelerator": "gpu"}, "v6e:4x4", {"accelerator": "tpu"}),
        ({"accelerator_type": "A100"}, "h200", {"accelerator_type": None}),
        ({"accelerator_type": "A100"}, "a100-40", {}),
        ({"accelerator_type": "A100-80G"}, "a100-40", {"accelerator_type": None}),
        ({"accelerator_type": "L40"}, "l40s", {"accelerator_type": None}),
        ({"accelerator_type": "A-KIND-OF-OUR-OWN"}, "h200", {}),
        (
            {"accelerator_type": "TPU-V6E", "topology": "4x4"},
            "8xh100",
            {"accelerator_type": None, "topology": None},
        ),
        ({"accelerator_type": "TPU-V6E", "topology": "2x4"}, "v6e:4x4", {"topology": "4x4"}),
        ({"accelerator_type": "TPU-V6E", "topology": "4x4"}, "2*v6e:4x4", {}),
        ({}, "v6e:4x4", {}),
    ],
)
def test_keys_that_ask_for_other_hardware_are_known_with_what_to_write(asked, on, keys):
    cluster = load_recipe("tiny", {f"cluster.{key}": value for key, value in asked.items()}).cluster
    wanted = {f"cluster.{key}": value for key, value in keys.items()}
    assert other_hardware_keys(cluster, parse_target(on)) == wanted


@pytest.mark.parametrize(("name", "tera"), [("v100", 7.8), ("a100-40", 19.5), ("h200", 67)])
def test_fp64_has_the_makers_rate(name, tera):
    assert DEVICES[name].flops("fp64") == tera * 1e12


@pytest.mark.parametrize("name", ["l4", "v6e"])
def test_fp64_of_an_unknown_rate_is_refused(name):
    line = (
        f"^model.precision: how fast {name} computes in fp64 is not known; write fp32, or plan for one of v100, a100-"
    )
    with pytest.raises(RaygptError, match=line):
        DEVICES[name].flops("fp64")


@pytest.mark.parametrize(
    ("recipe", "changes", "on", "fused", "keeps_scores", "precision"),
    [
        ("gpt2-124m", {}, "h200", True, False, "bf16"),
        ("gpt2-124m", {"model.preset": "gpt2-xl"}, "h200", False, False, "bf16"),  # 1600 is no multiple of 256
        ("gpt2-124m", {"engine": "torch"}, "h200", False, False, "bf16"),
        ("gpt2-124m", {}, "t4", False, True, "fp16"),
        ("gpt2-124m", {"cluster.mesh": {"data": 1, "fsdp": -1}}, "8xh100", False, False, "bf16"),
        ("modern-124m", {}, "v6e:4x4", False, False, "bf16"),
        ("modern-124m", {"cluster.mesh": {"context": 4}}, "v6e:4x4", False, False, "bf16"),
    ],
)
def test_a_targets_kernels_are_those_that_the_engine_would_choose(recipe, changes, on, fused, keeps_scores, precision):
    loaded, target = load_recipe(recipe, changes), parse_target(on)
    got = devices_on(loaded, target)
    assert (got.fused, got.keeps_scores, precision_on(loaded, target)) == (fused, keeps_scores, precision)


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_worker_with_a_part_of_a_gpu_has_that_part_of_its_memory(engine):
    whole, part = (
        load_recipe("gpt2-124m", {"engine": engine, "cluster.resources_per_worker": has}) for has in ({}, {"GPU": 0.5})
    )
    gpu = parse_target("h200")
    assert devices_on(part, gpu).memory_bytes == devices_on(whole, gpu).memory_bytes // 2


def test_pytorch_on_a_tpu_is_refused():
    with pytest.raises(RaygptError, match="engine torch knows no TPU; write engine=jax"):
        devices_on(load_recipe("gpt2-124m", {"engine": "torch"}), parse_target("v6e:4x4"))


def test_a_cpu_is_measured_with_all_cores_where_ray_gives_a_process_one_thread(monkeypatch):
    given = []

    def run(command, env, **options):
        given.append(env["OMP_NUM_THREADS"])
        return ran(command, env=env, **options)

    ran = subprocess.run
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "run", run)
    peak, bandwidth = cpu_speed(7)
    assert given == ["7"]
    assert peak > 1e8
    assert bandwidth > 1e8


def test_a_cpu_that_can_start_no_process_is_measured_in_this_one(monkeypatch):
    monkeypatch.setattr("raygpt.planning.cpu_speed.sys.executable", "/no/python")
    assert min(cpu_speed(2)) > 1e8
