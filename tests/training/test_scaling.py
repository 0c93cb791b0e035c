"""Workers on nodes that are said to have GPUs and TPUs: where they are, what they may use, and what is refused."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import raygpt
from raygpt.engines import for_gpus
from raygpt.errors import RaygptError
from raygpt.planning.micro_batch_size import cpu_devices, split_batch
from raygpt.recipes import check_part, load_recipe
from raygpt.resources import PROCESS_BYTES
from raygpt.training.ray import memory, scaling

SCRIPT = Path(__file__).with_name("nodes.py")


def test_a_cluster_that_this_process_started_is_our_own_and_no_other(ray_cluster, monkeypatch):
    assert scaling.is_our_own()
    node = ray._private.worker._global_node
    monkeypatch.setattr(ray, "nodes", lambda: ["ours", "one that joined"])
    assert not scaling.is_our_own()
    monkeypatch.undo()
    monkeypatch.setattr(node, "head", False)  # as where one was found at an address
    assert not scaling.is_our_own()


@pytest.fixture
def one_gpu(monkeypatch):
    """A cluster of our own that has a GPU, and engines that cannot use it."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2, "GPU": 1}}])
    monkeypatch.setattr(scaling, "is_our_own", lambda: True)
    monkeypatch.setattr(scaling, "for_gpus", lambda engine: f"install {engine} for GPUs")


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_gpu_that_the_engine_cannot_use_is_not_chosen_but_refused_where_it_is_asked_for(one_gpu, engine):
    said = []
    assert scaling.choose_workers(check_part("cluster", {}), engine, said.append).accelerator == "cpu"
    assert said == [
        f"the GPU of this machine is not used: the {engine} installed here cannot use it; install {engine} for GPUs"
    ]
    with pytest.raises(RaygptError, match=f"gpu cannot be used by the {engine} installed here; install {engine}"):
        scaling.choose_workers(check_part("cluster", {"accelerator": "gpu"}), engine)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"workers": 3}, "^cluster: .*must be a multiple of 4"),
        (
            {"workers": 4, "topology": "2x3"},
            r"^cluster\.topology: 2x3 of TPU-V6E is no slice for Ray .*; write e\.g\. ",
        ),
    ],
)
def test_workers_that_are_no_tpu_slice_are_refused(asked, refusal):
    cluster = check_part("cluster", {"topology": "4x4", "accelerator_type": "TPU-V6E", **asked})
    with pytest.raises(RaygptError, match=refusal):
        scaling.Workers(cluster, "tpu").scaling()


def test_tpus_that_the_cluster_does_not_have_are_refused_unless_the_recipe_says_what_a_host_has(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    workers = scaling.Workers(check_part("cluster", {"accelerator": "tpu"}), "tpu")
    with pytest.raises(RaygptError) as refused:
        scaling.ensure_room(workers)
    assert str(refused.value) == (
        "cluster.accelerator: tpu is not there, the cluster has 1 node, 4 CPU; write cluster.accelerator: auto, or "
        "cluster.topology and cluster.accelerator_type of a slice that is to come"
    )
    said = scaling.Workers(check_part("cluster", {"accelerator": "tpu", "resources_per_worker": {"TPU": 4}}), "tpu")
    assert (said.resources["TPU"], said.room()) == (4, 0)
    nodes.append({"Alive": True, "Resources": {"CPU": 8.0, "TPU": 4.0}})
    assert (workers.resources["TPU"], workers.room()) == (4, 1)


def test_workers_that_do_not_fit_the_memory_are_refused(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 2000.0, "memory": 4.0 * 2**30}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(scaling, "has_autoscaler", lambda: False)
    workers = scaling.Workers(check_part("cluster", {"workers": 1000}), "cpu")
    with pytest.raises(RaygptError) as refused:
        scaling.ensure_room(workers)
    assert str(refused.value) == (
        "cluster.workers: 1000 × 1 CPU, 768.0 MiB memory do not fit: the cluster has room for 5 "
        "(1 node, 2000 CPU, 4.0 GiB memory); write cluster.workers: 5, or add nodes"
    )
    scaling.ensure_room(scaling.Workers(check_part("cluster", {"workers": 5}), "cpu"))
    little = check_part("cluster", {"workers": 1000, "resources_per_worker": {"memory": 2**20}})
    scaling.ensure_room(scaling.Workers(little, "cpu"))
    assert "memory" not in scaling.Workers(check_part("cluster", {}), "gpu").resources


def test_a_worker_has_its_fraction_of_a_gpu_from_one_gpu(monkeypatch):
    """Ray 2.60 placed 4 actors of 0.4 on a node with two GPUs, 6 of 0.3 and 4 of 0.5."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}}])
    clusters = [check_part("cluster", {"resources_per_worker": {"GPU": part}}) for part in (0.4, 0.3, 0.5, 1, 2)]
    assert [scaling.Workers(cluster, "gpu").room() for cluster in clusters] == [4, 6, 4, 2, 1]


def test_an_elastic_run_waits_for_as_many_workers_as_fill_its_mesh(monkeypatch):
    """Where fewer are there, and no others can come, it would wait for ever."""
    monkeypatch.setattr(scaling, "has_autoscaler", lambda: False)
    recipe = load_recipe("tiny", {"engine": "torch", "cluster.workers": "1..5", "cluster.mesh.fsdp": 2})
    workers = scaling.for_mesh(scaling.Workers(recipe.cluster, "gpu"), recipe)
    assert (workers.cluster.workers, list(workers.counts)) == ("2..4", [2, 4])
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 1.0}}])
    with pytest.raises(RaygptError, match=r"^cluster\.workers: 2\.\.4 × 1 CPU, 1 GPU do not fit: .* room for 1 "):
        scaling.ensure_room(workers)


def test_workers_that_cannot_fill_the_mesh_are_refused_once_their_devices_are_known():
    recipe = load_recipe("tiny", {"cluster.workers": "5..7", "cluster.mesh.fsdp": 4})
    assert scaling.for_mesh(scaling.Workers(recipe.cluster, "cpu"), recipe).cluster.workers == "5..7"
    with pytest.raises(RaygptError, match=r"^cluster\.workers: no number in 5\.\.7 fills cluster\.mesh"):
        scaling.for_mesh(scaling.Workers(recipe.cluster, "gpu"), recipe)


def test_a_local_cluster_has_cpus_for_no_more_workers_than_fit_its_memory(monkeypatch):
    """Ray starts a process for each."""
    monkeypatch.setattr(scaling, "cores", lambda: 2)
    monkeypatch.setattr(scaling, "host_memory", lambda: 6 * 2**30)
    assert [scaling.local_cpus(check_part("cluster", {"workers": count})) for count in (1, 1000)] == [3, 10]


def test_a_model_that_fits_on_no_node_is_refused_and_one_that_does_requests_its_memory(monkeypatch):
    machine = {"is_our_own": lambda: True, "cores": lambda: 2, "memory_for_work": lambda: 16 * 2**30}
    for name, instead in machine.items():
        monkeypatch.setattr(memory, name, instead)
    workers = scaling.Workers(check_part("cluster", {"workers": 2}), "cpu")
    large = load_recipe("tiny", {"model.width": 100_000, "cluster.workers": 2})
    with pytest.raises(RaygptError, match=r"^model: it needs 7\.0 TiB on a device .*, but each of the 2 devices has 8"):
        memory.request_memory(workers, large, vocab=4096)
    gpt2 = load_recipe("tiny", {"model.preset": "gpt2", "cluster.workers": 2})
    devices = cpu_devices(gpt2, 2, 2, 2, 16 * 2**30)
    asked = memory.request_memory(workers, gpt2, vocab=50257).resources["memory"]
    assert asked == split_batch(gpt2, 50257, devices).memory_bytes + PROCESS_BYTES


def test_runs_on_local_clusters_that_start_together_do_not_count_the_same_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(memory, "is_our_own", lambda: True)
    monkeypatch.setattr(memory, "host_memory", lambda: 10 * 2**30)
    run = scaling.Workers(check_part("cluster", {"workers": 2}), "cpu", memory=3 * 2**30)
    folder = tmp_path / f"raygpt-memory-{os.getuid()}"
    with memory.reserved(run):
        (mine,) = folder.glob("[0-9]*")
        assert mine.name.startswith(f"{os.getpid()}-")
        assert mine.read_text() == str(6 * 2**30)
        with memory.reserved(run):  # as a sweep does: Ray counts both
            assert len(list(folder.glob("[0-9]*"))) == 2
    assert not mine.exists()
    other = folder / f"{os.getppid()}-1f0c3a7b"
    other.write_text(str(9 * 2**30))
    (folder / "1-00000000").symlink_to("nothing")  # a run that ends between listing and reading
    with memory.reserved(run):
        assert not other.exists()  # nobody has it locked: it was killed, and its number is now another process's
    with other.open("w") as held:
        held.write(str(4 * 2**30))
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RaygptError) as refused, memory.reserved(run):
            pass
    assert str(refused.value) == (
        f"cluster.workers: they need 6.0 GiB, and other runs on this machine (process {os.getppid()}) have 4.0 GiB of "
        "9.0 GiB; wait for them, or stop one"
    )
    with memory.reserved(scaling.Workers(check_part("cluster", {}), "gpu")):
        assert not mine.exists()  # GPUs have memory of their own


@pytest.mark.parametrize(
    ("kinds", "is_refused"),
    [(["T4"], True), (["T4", "TPU-V5LITEPOD"], True), ([], False), (["A_NEW_KIND"], False), (["T4", "H200"], False)],
)
def test_a_model_that_fits_on_no_accelerator_of_the_cluster_is_refused_before_workers_start(
    kinds, is_refused, monkeypatch
):
    nodes = [{"Resources": {"GPU": 1.0, f"accelerator_type:{kind}": 1.0}} for kind in kinds]
    monkeypatch.setattr(memory, "alive_nodes", lambda: nodes)
    xl = load_recipe("tiny", {"model.preset": "gpt2-xl", "model.context": 1024, "training.batch_tokens": 4096})
    workers = scaling.Workers(xl.cluster, "gpu")
    if is_refused:
        with pytest.raises(RaygptError, match=r"^model: it needs 3[0-9]\.[0-9] GiB on a device .*, but the device has"):
            memory.request_memory(workers, xl, vocab=50257)
    else:
        assert memory.request_memory(workers, xl, vocab=50257) == workers


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_model_has_to_fit_the_part_of_a_gpu_that_its_worker_has(engine, monkeypatch):
    monkeypatch.setattr(memory, "alive_nodes", lambda: [{"Resources": {"GPU": 1.0, "accelerator_type:L4": 1.0}}])
    monkeypatch.setattr(ray, "nodes", list)
    large = {"engine": engine, "model.preset": "gpt2-large", "training.batch_tokens": 1024}  # 17 GiB with JAX, of 24
    for part, is_refused in ((1, False), (0.5, True)):
        recipe = load_recipe("tiny", {**large, "cluster.resources_per_worker": {"GPU": part}})
        workers = scaling.Workers(recipe.cluster, "gpu")
        if is_refused:
            with pytest.raises(
                RaygptError, match=r"^model: it needs .* GiB on a device .*, but the device has 1[01]\."
            ):
                memory.request_memory(workers, recipe, vocab=50257)
        else:
            assert memory.request_memory(workers, recipe, vocab=50257) == workers


def test_the_memory_of_other_nodes_is_looked_at_there(ray_cluster, monkeypatch):
    monkeypatch.setattr(memory, "is_our_own", lambda: False)
    recipe = load_recipe("tiny")
    there = memory.request_memory(scaling.Workers(recipe.cluster, "cpu"), recipe, vocab=4096)
    monkeypatch.setattr(memory, "is_our_own", lambda: True)
    assert there == memory.request_memory(scaling.Workers(recipe.cluster, "cpu"), recipe, vocab=4096)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """Run a scenario of nodes.py in a process and a cluster of its own."""

    def run(name):
        folder = tmp_path_factory.mktemp(name)
        code = str(Path(raygpt.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, str(SCRIPT), name, str(folder)],
            env={**os.environ, "PYTHONPATH": code},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert results, done.stderr[-3000:]
        return json.loads(results[-1].removeprefix("RESULT "))

    return run


@pytest.mark.extended
def test_each_gpu_of_a_node_has_a_process_of_its_own(scenario):
    result = scenario("gpus")
    places = [(worker["node"], worker["environment"]["CUDA_VISIBLE_DEVICES"]) for worker in result["seen"]]
    first, second = [("a", "0"), ("a", "1")], [("b", "0")]
    assert places in (first + second, second + first)
    for rank, worker in enumerate(result["seen"]):
        assert worker["process"] == [rank, 3]  # of one JAX program
        assert worker["ids"]["GPU"] == [worker["environment"]["CUDA_VISIBLE_DEVICES"]]
        assert worker["environment"]["LD_LIBRARY_PATH"] == ""  # the driver's would hide the libraries in JAX's wheels
        assert worker["environment"]["JAX_PLATFORMS"] == "cuda,cpu"
        assert worker["environment"]["RAYGPT_TEST"] == "passed through"
        assert worker["environment"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert result["sharing"]["environment"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.46"
    assert result["refusal"] == (
        "cluster.workers: 4 × 1 CPU, 1 GPU do not fit: the cluster has room for 3 (3 nodes, 6 CPU, 3 GPU); "
        "write cluster.workers: 3, or add nodes"
    )


@pytest.mark.extended
def test_a_gpu_that_the_engine_cannot_use_is_left_alone_or_refused(scenario):
    """A first `make train` on a machine with a GPU, where JAX came without CUDA."""
    pytest.importorskip("torch", reason="needs the extra torch")
    if not (for_gpus("jax") and for_gpus("torch")):
        pytest.skip("needs engines without CUDA")
    result = scenario("gpu_alone")
    assert result["warnings"] == [
        "the GPU of this machine is not used: the jax installed here cannot use it; pip install 'raygpt[cuda]'"
    ]
    assert (result["device"], result["finished"]) == ("cpu", [2])
    assert result["refusals"] == [
        "cluster.accelerator: gpu cannot be used by the jax installed here; pip install 'raygpt[cuda]'",
        "cluster.accelerator: gpu cannot be used by the torch installed here; install PyTorch's CUDA build",
    ]


@pytest.mark.extended
def test_a_tpu_slice_has_one_worker_for_each_host_with_all_of_its_chips(scenario):
    result = scenario("tpus")
    assert sorted(worker["node"] for worker in result["seen"]) == ["host-0", "host-1", "host-2", "host-3"]
    for rank, worker in enumerate(result["seen"]):
        assert worker["process"] == [rank, 4]
        assert worker["ids"]["TPU"] == ["0", "1", "2", "3"]
        assert worker["environment"]["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
        assert worker["environment"]["JAX_PLATFORMS"] == "tpu"
        assert "CUDA_VISIBLE_DEVICES" not in worker["environment"]
    three, eight, odd = result["refusals"]
    assert "must be a multiple of 4" in three
    assert "8 × 1 CPU, 4 TPU TPU-V6E in 4x4 do not fit: the cluster has room for 4" in eight
    assert odd.startswith("cluster.topology: 2x3 of TPU-V6E is no slice")


@pytest.mark.slow
def test_a_corpus_is_tokenised_on_nodes_without_accelerators_while_others_train(scenario):
    result = scenario("mixed")
    tokenised = [task["node"] for task in result["tasks"] if task["task"] == "tokenise"]
    assert tokenised == ["cpus"] * 7  # six files to train on and one to validate
    assert {task["node"] for task in result["tasks"]} == {"cpus"}
    assert result["metrics"]["step"] == 150


@pytest.mark.slow
def test_where_an_autoscaler_can_bring_nodes_the_run_waits_and_says_for_what(scenario):
    result = scenario("autoscaler")
    first, *later = result["said"]  # on busy cores nodes are late, and it says once more that it waits
    assert first == "waiting for 2 × 1 CPU, 1 GPU: the cluster has room for 0, and its autoscaler is asked for the rest"
    assert all(said.startswith("waiting for 2 × 1 CPU, 1 GPU: ") for said in later)
    assert [worker["process"] for worker in result["seen"]] == [[0, 2], [1, 2]]
    assert [worker["ids"]["GPU"] for worker in result["seen"]] == [["0"], ["0"]]  # each on a node that came for it
