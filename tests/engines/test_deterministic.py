"""With `training.deterministic` a GPU computes the same bits twice. Runs only where there is one: a CPU always does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import raygpt

SIZES = {"context": 256, "dropout": 0.1}
MODERN = {"value_embeddings": 1, "x0_mixing": True, "head_gates": True, "norm_gain": True}
MODELS = {
    "gpt2": {"preset": "gpt2", **SIZES},
    "speedrun": {"preset": "nanochat", "depth": 6, **SIZES, **MODERN},
    "qwen3": {"preset": "qwen3", "layers": 4, "width": 512, "heads": 8, "kv_heads": 2, "head_size": 64, **SIZES},
}
TRAIN = """
import hashlib, json, sys
import numpy as np
from raygpt.engines import engine_of
from raygpt.recipes import load_recipe
engine, model, optimizer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
training = {"steps": 20, "batch_tokens": 16 * 256, "deterministic": True}
recipe = load_recipe("gpt2-tiny", {"engine": engine, "model": model, "optimizer.kind": optimizer, "training": training})
module = engine_of(engine)
module.set_up(recipe)
engine = module.Engine(recipe, 50257)
batches = np.random.default_rng(0).integers(0, 50257, (2, 16, 257)).astype(np.int32)
state = engine.start()
for step in range(20):
    state, metrics = engine.step(state, engine.put(batches[step % 2]))
found = engine.gather(state)
arrays = {"parameters": found.parameters, **found.slots}
digest = hashlib.sha256(np.float64(engine.read(metrics)["loss"]).tobytes())
for slot in sorted(arrays):
    for name in sorted(arrays[slot]):
        digest.update(np.ascontiguousarray(arrays[slot][name]).tobytes())
print(json.dumps([digest.hexdigest(), engine.describe()["attention"]]))
"""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_two_processes_come_to_the_same_bits(engine, model):
    _need_gpu(engine)
    environment = {**os.environ, "PYTHONPATH": str(Path(raygpt.__file__).parents[1])}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    optimizer = "adamw" if model == "gpt2" else "muon"
    command = [sys.executable, "-c", TRAIN, engine, json.dumps(MODELS[model]), optimizer]
    lines = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        for _ in range(2)
    ]
    assert lines[0] == lines[1]
    assert json.loads(lines[0])[1] == {"jax": "Triton", "torch": "PyTorch SDPA"}[engine]


def _need_gpu(engine):
    module = pytest.importorskip(engine)
    if not (module.default_backend() == "gpu" if engine == "jax" else module.cuda.is_available()):
        pytest.skip("needs a GPU")
