"""What raygpt reads cannot run code: no pickle in a checkpoint's place, no tag in a recipe. Clusters want a token."""

import gc
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raygpt
from raygpt.engines import read_plain_state
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe

RECIPE = {"model": {"layers": 1, "heads": 2, "width": 16, "context": 16}, "training.batch_tokens": 32}


class Harm:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace):
        self._trace = trace

    def __reduce__(self):
        return Path.touch, (self._trace,)


@pytest.fixture(scope="module")
def engine():
    import jax

    from raygpt.engines.jax.engine import JaxEngine

    return JaxEngine(load_recipe("gpt2-tiny", RECIPE), vocab=257, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "saved"
    engine.save(engine.start(), str(folder))
    engine.wait_for_save()
    return folder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads that are given up
@pytest.mark.parametrize("by", ["restore", "read_plain_state"])
def test_a_pickle_in_place_of_any_file_of_a_jax_checkpoint_is_not_run(engine, saved, tmp_path, by):
    def read(folder):
        return engine.restore(folder) if by == "restore" else read_plain_state("jax", folder, engine.recipe.model, 257)

    trace = tmp_path / "trace"
    harm = pickle.dumps(Harm(trace))
    names = sorted({kind_of(path.relative_to(saved)): path.relative_to(saved) for path in files(saved)}.values())
    assert {".zarray"} < {name.name for name in names}
    refused = 0
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        Path(folder, name).write_bytes(harm)
        try:
            read(str(folder))
        except Exception:
            refused += 1
        assert not trace.exists(), name
    gc.collect()
    assert refused >= 2  # an array, and what describes it
    pickle.loads(harm)
    assert trace.exists()  # it would have


def test_a_jax_checkpoint_is_read_without_a_pickle(engine, saved, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert int(engine.restore(str(saved)).step) == 0
    weights = read_plain_state("jax", str(saved), engine.recipe.model, 257)
    assert weights.parameters["tokens"].shape == (257, 16)
    assert all(np.isfinite(array).all() for array in weights.parameters.values())


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def kind_of(name):
    """Arrays are alike: one of each kind will do."""
    return name.name if name.parts[:-1] else str(name)


CLUSTER = """
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from raygpt.cluster import connected

with connected(1):
    node = ray._private.worker.global_worker.node
    print(get_authentication_mode() == AuthenticationMode.TOKEN, bool(node.webui_url))
"""


def test_a_cluster_of_our_own_wants_a_token_and_has_no_dashboard(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(raygpt.__file__).parents[1])}
    command = [sys.executable, "-c", CLUSTER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [touch TRACE]", "!!python/name:os.system"])
def test_a_recipe_with_a_python_tag_is_refused_and_runs_nothing(tmp_path, tag):
    trace = tmp_path / "trace"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"engine: jax\nrun:\n  name: {tag.replace('TRACE', str(trace))}\n")
    with pytest.raises(RaygptError, match=r"recipe\.yaml"):
        load_recipe(str(recipe))
    assert not trace.exists()
