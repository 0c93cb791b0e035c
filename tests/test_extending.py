"""The example of docs/extending.md, applied to a copy of the package: both engines train it to the same losses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT

import raygpt

pytest.importorskip("torch", reason="needs the extra torch")

TRAIN = """
import json, sys
import numpy as np
from raygpt.engines import engine_of
from raygpt.recipes import load_recipe

windows = np.random.default_rng(0).integers(0, 100, (5, 4, 17)).astype(np.int32)
losses = {}
for engine, mlp in (("jax", "geglu"), ("torch", "geglu"), ("torch", "swiglu")):
    model = {"layers": 1, "heads": 2, "width": 32, "context": 16, "mlp": mlp}
    recipe = load_recipe("gpt2-tiny", {"engine": engine, "model": model, "training.batch_tokens": 64,
                                       "optimizer.learning_rate": 0.01, "schedule.warmup_steps": 0})
    computes = engine_of(engine).Engine(recipe, 100)
    state, found = computes.start(), []
    for batch in windows:
        state, metrics = computes.step(state, computes.put(batch))
        found.append(computes.read(metrics)["loss"])
    losses[f"{engine} {mlp}"] = found
print(json.dumps(losses))
"""


def test_the_worked_example_gives_the_same_losses_on_both_engines(tmp_path):
    text = (CHECKOUT / "docs/extending.md").read_text()
    patch = re.search(r"```diff\n(.*?)```", text, re.DOTALL).group(1)
    shutil.copytree(Path(raygpt.__file__).parent, tmp_path / "raygpt", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert len(re.findall(r"^\+\+\+ ", patch, re.MULTILINE)) <= 6, "files to touch"
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **devices}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses["jax geglu"] == pytest.approx(losses["torch geglu"], rel=1e-5)
    assert losses["torch geglu"][-1] != pytest.approx(losses["torch swiglu"][-1], rel=1e-4), "another model"
