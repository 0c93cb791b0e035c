"""Nodes come and go while a run trains: `python elastic.py ENGINE PRECISION FOLDER SIZE...` prints what came of it.

Each node is a raylet on this machine with room for one worker. The first SIZE is how many there are at the start; when
the run has gone on for a while, nodes are removed or added until there are as many as the next says, and so on. A SIZE
like `d1` drains them instead, as a cloud does before it takes spot machines away; such a run neither logs nor saves by
itself meanwhile, as a long one does not for minutes. One like `3/2` is three nodes of which two have workers: the
parameters are sharded over two.
"""

import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.pop("XLA_FLAGS", None)

import numpy as np
import ray
from ray.cluster_utils import Cluster

from raygpt.recipes import load_recipe
from raygpt.testing.chaos import read_state
from raygpt.training.events import CheckpointSaved, FaultHandled, Started, Warned
from raygpt.training.ray import launch, scaling
from raygpt.training.stopping import ask_to_stop

STEPS_EACH = 15  # with every number of workers
NOTICE_S = 20
os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "0.5"
scaling.RESIZE_CHECK_S = 3.0


@dataclass(frozen=True)
class Recording:
    """A feed that takes its time, and notes which rows it gave."""

    feed: Any
    folder: str

    def rows(self, batch, rows=None):
        given = self.feed.rows(batch, rows)
        time.sleep(0.2)
        noted = {"batch": batch, "rows": list(rows or []), "hashes": [row_hash(row) for row in given]}
        with Path(self.folder, f"{os.getpid()}.rows").open("a") as file:
            file.write(json.dumps(noted) + "\n")
        return given

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.feed, name)


def row_hash(row):
    return hashlib.sha256(row.tobytes()).hexdigest()[:16]


def prepare(engine, precision, folder, name, log_every, save_every, **cluster):
    text = Path(folder, "text.txt")
    # Not to be learnt: where the gradient is nearly zero in most directions, Muon amplifies rounding most.
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (400, 20), np.uint8)
    text.write_text("".join(f"{line.tobytes().decode()}\n<|endoftext|>\n" for line in letters))
    return {
        "engine": engine,
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1, "precision": precision},
        "data": {"source": str(text), "val": 0.1, "tokenizer": "bytes"},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "training": {"batch_tokens": 80, "log_every": log_every, "eval_every": 1000, "checkpoint_every": save_every},
        "cluster": {"accelerator": "cpu", "resources_per_worker": {"trainer": 1}, **cluster},
        "run": {"storage": f"{folder}/runs", "name": name},
    }


def logged(folder, name):
    path = Path(folder, "runs", name, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def batches_given(folder):
    """How many so far, by whoever gets row 0; one that is given again counts again."""
    return sum(path.read_text().count('"rows": [0') for path in Path(folder).glob("*.rows"))


def distance(folder, name, reference):
    """Between the last states of two runs: the array that is farthest from its own, as a share of its length."""
    one, other = (read_state(f"{folder}/runs/{run}") for run in (name, reference))
    return max(float(np.linalg.norm(one[key] - other[key]) / np.linalg.norm(other[key])) for key in other)


def drain(node):
    """Announce that a node will be taken away in so many seconds."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    deadline = int((time.time() + NOTICE_S) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    GcsClient(ray.get_runtime_context().gcs_address).drain_node(node.node_id, reason, "spot", deadline)


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)


def main(engine, precision, folder, *sizes):
    drained = [size.startswith("d") for size in sizes]
    numbers = [size.removeprefix("d").split("/") for size in sizes]
    sizes, used = [int(number[0]) for number in numbers], [int(number[-1]) for number in numbers]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    nodes = [cluster.add_node(num_cpus=1, resources={"trainer": 1}) for _ in range(sizes[0])]
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    log_every, save_every = (1000, 1000) if any(drained) else (1, 5)
    mesh = {} if sizes == used else {"mesh": {"fsdp": 2}}
    recipe = prepare(engine, precision, folder, "elastic", log_every, save_every, workers=f"1..{max(sizes)}", **mesh)
    recipe["training"]["steps"] = 10_000  # it is stopped when it has seen all sizes
    run = launch.prepare_run(load_recipe("tiny", recipe))
    run = replace(run, feed=Recording(run.feed, folder))
    events, results = [], []
    thread = threading.Thread(target=lambda: results.append(launch.train(run, events.append)))
    thread.start()
    seen = []

    def workers():
        return [int(event.about["workers"]) for event in events if isinstance(event, Started)]

    def wait_for_workers(size, starts):
        wait_for(lambda: not thread.is_alive() or (len(workers()) > starts and workers()[-1] == size))

    def wait_for_batches(count):
        wait_for(lambda: not thread.is_alive() or batches_given(folder) >= count)

    try:
        for size, count, is_drained in zip(sizes, used, drained, strict=True):
            while len(nodes) > size:
                node = nodes.pop()
                if is_drained:
                    drain(node)
                else:
                    cluster.remove_node(node, allow_graceful=False)
            while len(nodes) < size:
                nodes.append(cluster.add_node(num_cpus=1, resources={"trainer": 1}))
            wait_for_workers(count, len(seen))
            seen = workers()
            wait_for_batches(batches_given(folder) + STEPS_EACH)
        if thread.is_alive():
            ask_to_stop(run.totals.run_folder)
            thread.join(120)
        result = results[0]
        if result.error:
            raise result.error
        last = result.stopped
        straight = {**recipe, "run": {**recipe["run"], "name": "straight"}}
        straight["training"]["steps"] = last
        straight["cluster"] = {"accelerator": "cpu", "resources_per_worker": {"trainer": 1}, "workers": 1}
        undisturbed = launch.prepare_run(load_recipe("tiny", straight))
        expected = {f"{n},{r}": row_hash(row) for n in range(last) for r, row in enumerate(undisturbed.feed.rows(n))}
        launch.train(undisturbed)
    finally:
        ray.shutdown()
        cluster.shutdown()
    given = [json.loads(line) for path in Path(folder).glob("*.rows") for line in path.read_text().splitlines()]
    pairs = [(f"{g['batch']},{r}", h) for g in given for r, h in zip(g["rows"], g["hashes"], strict=True)]
    return {
        "sizes": seen,
        "steps": last,
        "wrong_rows": sorted({key for key, value in pairs if key in expected and expected[key] != value}),
        "missing_rows": sorted(set(expected) - {key for key, _ in pairs}),
        "losses": [(line["step"], line["loss"]) for line in logged(folder, "elastic") if "loss" in line],
        "expected": [(line["step"], line["loss"]) for line in logged(folder, "straight") if "loss" in line],
        "distance": distance(folder, "elastic", "straight"),
        "said": [event.text for event in events if isinstance(event, FaultHandled | Warned)],
        "saved": [event.step for event in events if isinstance(event, CheckpointSaved)],
        "restarts": [line["step"] for line in logged(folder, "elastic") if "restart" in line],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])))
