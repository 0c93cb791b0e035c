"""Simulated clusters, each in a process of its own: `python nodes.py SCENARIO FOLDER` prints what every worker saw.

Nodes are real raylets on this machine; their GPUs and TPUs are only said to be there, so the workers look at what Ray
and raygpt set up for them, and compute nothing.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.pop("JAX_PLATFORMS", None)  # as a user's shell has it
os.environ.pop("XLA_FLAGS", None)

import ray
from ray.cluster_utils import Cluster

import raygpt
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.training.events import Finished, Started, Warned
from raygpt.training.ray import launch

SEEN = (
    *("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "LD_LIBRARY_PATH", "TPU_VISIBLE_CHIPS", "RAYGPT_TEST"),
    *("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
)


def look(config):
    """In a worker: where it is and what it may use."""
    import os

    import ray.train
    from jax._src import distributed

    context = ray.get_runtime_context()
    seen = {
        "rank": ray.train.get_context().get_world_rank(),
        "node": context.get_node_labels().get("name"),
        "ids": context.get_accelerator_ids(),
        "process": [distributed.global_state.process_id, distributed.global_state.num_processes],
        "environment": {name: os.environ[name] for name in config["seen"] if name in os.environ},
    }
    Path(config["folder"], f"{seen['rank']}.json").write_text(json.dumps(seen))


def run(folder, **cluster):
    """What each worker saw, in the order of ranks."""
    result = raygpt.run(look, {"folder": folder, "seen": SEEN}, cluster=cluster, storage_path=folder, name="run")
    if result.error:
        raise result.error
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("?.json"))]


def gpus(folder):
    """A node with two GPUs, one with one, and a head without."""
    os.environ["LD_LIBRARY_PATH"] = "/usr/local/cuda/lib64"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"name": "head"}})
    for name, count in (("a", 2), ("b", 1)):
        cluster.add_node(num_cpus=2, num_gpus=count, labels={"name": name})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        seen = run(folder, workers=3, runtime_env={"env_vars": {"RAYGPT_TEST": "passed through"}})
        [sharing] = run(f"{folder}/sharing", resources_per_worker={"GPU": 0.5})
        try:
            run(folder, workers=4)
        except RaygptError as error:
            return {"seen": seen, "sharing": sharing, "refusal": str(error)}
    finally:
        ray.shutdown()
        cluster.shutdown()


def gpu_alone(folder):
    """One machine, which is said to have a GPU, and engines that are installed without CUDA."""
    ray.init(num_cpus=2, num_gpus=1, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    Path(folder, "text.txt").write_text("a line of many\n" * 400)
    small = {
        "data": {"source": f"{folder}/text.txt", "tokenizer": "bytes"},
        "model": {"layers": 1, "heads": 1, "width": 16, "context": 8},
        "training": {"steps": 2, "batch_tokens": 16, "eval_rows": 2},
        "schedule": {"warmup_steps": 1},
        "run": {"name": "run", "storage": folder},
    }
    events, refusals = [], []
    launch.train(launch.prepare_run(load_recipe("tiny", small)), events.append)
    for engine in ("jax", "torch"):
        changed = {"engine": engine, "cluster.accelerator": "gpu", "run.name": engine}
        try:
            raygpt.train("tiny", **small, **changed)
        except RaygptError as error:
            refusals.append(str(error))
    return {
        "warnings": [event.text for event in events if isinstance(event, Warned)],
        "device": next(event.about["device"] for event in events if isinstance(event, Started)),
        "finished": [event.step for event in events if isinstance(event, Finished)],
        "refusals": refusals,
    }


def tpus(folder):
    """A v6e 4x4 slice: four hosts of four chips, labelled as Ray labels them; and a head without."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"name": "head"}})
    for worker in range(4):
        labels = {
            "name": f"host-{worker}",
            "ray.io/accelerator-type": "TPU-V6E",
            "ray.io/tpu-slice-name": "slice-0",
            "ray.io/tpu-worker-id": str(worker),
            "ray.io/tpu-topology": "4x4",
            "ray.io/tpu-pod-type": "v6e-16",
        }
        resources = {"TPU": 4, "accelerator_type:TPU-V6E": 1} | ({"TPU-v6e-16-head": 1} if worker == 0 else {})
        environment = {"TPU_NAME": "slice-0", "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": "v6e-16"}
        cluster.add_node(num_cpus=2, resources=resources, labels=labels, env_vars=environment)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        slice_ = {"topology": "4x4", "accelerator_type": "TPU-V6E"}
        seen = run(folder, workers=4, **slice_)
        refusals = []
        for asked in ({"workers": 3}, {"workers": 8}, {"workers": 4, "topology": "2x3"}):
            try:
                run(folder, **{**slice_, **asked})
            except RaygptError as error:
                refusals.append(str(error))
        return {"seen": seen, "refusals": refusals}
    finally:
        ray.shutdown()
        cluster.shutdown()


def mixed(folder):
    """A node that is said to have GPUs, where a run trains (on its CPUs), and a node that has CPUs only."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "labels": {"name": "head"}})
    cluster.add_node(num_cpus=4, num_gpus=2, resources={"trainer": 2}, labels={"name": "gpus"})
    cluster.add_node(num_cpus=2, labels={"name": "cpus"})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    texts = Path(folder, "texts")
    texts.mkdir()
    for number in range(6):
        Path(texts, f"{number}.txt").write_text(f"text {number}: a line of many\n" * 100)
    Path(folder, "own.txt").write_text("a text to validate on\n" * 20)
    _note_nodes(folder)
    recipe = {
        "engine": "torch",
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
        "data": {"source": str(texts), "val": f"{folder}/own.txt", "tokenizer": "bytes", "order": "sequential"},
        "schedule.warmup_steps": 0,
        "training": {"batch_tokens": 80, "steps": 150, "log_every": 10, "eval_every": 150, "checkpoint_every": 150},
        "cluster": {"workers": 2, "accelerator": "cpu", "resources_per_worker": {"trainer": 1}},
        "run": {"storage": f"{folder}/runs", "name": "mixed"},
    }
    try:
        result = raygpt.train("tiny", **recipe)
        if result.error:
            raise result.error
        tasks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.task"))]
        return {"tasks": tasks, "metrics": result.metrics}
    finally:
        ray.shutdown()
        cluster.shutdown()


def _note_nodes(folder):
    """Have every task of prepare say which node it ran on; each file of the source becomes a unit of its own."""
    from raygpt.corpus import pipeline, prepare

    def noted(name, real):
        def task(row, **options):  # a closure, so that Ray sends it by value
            node = ray.get_runtime_context().get_node_labels()["name"]
            Path(folder, f"{name}-{row['unit']}.task").write_text(json.dumps({"task": name, "node": node}))
            return real(row, **options)

        return task

    prepare.part_bytes = lambda source: 1
    pipeline._read, pipeline._tokenise = noted("read", pipeline._read), noted("tokenise", pipeline._tokenise)


def autoscaler(folder):
    """A head without GPUs, whose autoscaler can bring nodes with one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "cluster_name": "simulated",
        "max_workers": 4,
        "idle_timeout_minutes": 1,
        "upscaling_speed": 1.0,
        "provider": {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}", "disable_node_updaters": True},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "initialization_commands", "rsync_exclude", "rsync_filter")},
        **{f"{who}setup_commands": [] for who in ("", "head_", "worker_")},
        **{f"{who}_start_ray_commands": [] for who in ("head", "worker")},
        "file_mounts_sync_continuously": False,
    }
    path = Path(folder, "autoscaler.json")
    path.write_text(json.dumps(config))
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    size = ["--num-cpus=1", "--num-gpus=0", "--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    head = subprocess.Popen(
        [*start, *size, f"--autoscaling-config={path}"],
        env={**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        return _wait_for_nodes(folder, port)
    finally:
        ray.shutdown()
        os.killpg(head.pid, signal.SIGKILL)


def _wait_for_nodes(folder, port):
    """What is said while the nodes are missing, and what the workers then saw."""
    from raygpt.cluster import connected, has_autoscaler

    deadline = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
        time.sleep(0.2)
    with connected():
        while not has_autoscaler() and time.monotonic() < deadline:
            time.sleep(0.2)  # its first report
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("raygpt").addHandler(handler)
        return {"seen": run(folder, workers=2, accelerator="gpu"), "said": said}


if __name__ == "__main__":
    scenario, where = sys.argv[1:]
    scenarios = {"gpus": gpus, "gpu_alone": gpu_alone, "tpus": tpus, "mixed": mixed, "autoscaler": autoscaler}
    print("RESULT " + json.dumps(scenarios[scenario](where)))
