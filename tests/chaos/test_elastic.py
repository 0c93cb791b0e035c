"""Nodes that come and go while a run trains: the same batches, and the same losses within rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raygpt

SCRIPT = Path(__file__).with_name("elastic.py")
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-2}  # Muon's orthogonal updates amplify rounding, 3,000 times in 160 steps


@pytest.fixture
def resize(tmp_path):
    """Train while the cluster takes these sizes, one after another."""

    def run(engine, precision, *sizes):
        if engine == "torch":
            pytest.importorskip("torch", reason="needs the extra torch")
        environment = {**os.environ, "PYTHONPATH": str(Path(raygpt.__file__).parents[1])}
        command = [sys.executable, str(SCRIPT), engine, precision, str(tmp_path), *map(str, sizes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert results, done.stderr[-3000:]
        return json.loads(results[-1].removeprefix("RESULT "))

    return run


def check_batches(result, sizes):
    assert result["sizes"] == sizes
    assert result["wrong_rows"] == result["missing_rows"] == []  # by hash


def check(result, precision, sizes):
    check_batches(result, sizes)
    steps = [step for step, _ in result["losses"]]
    assert steps == list(range(1, result["steps"] + 1)) == [step for step, _ in result["expected"]]
    ours, theirs = (np.array([loss for _, loss in result[name]]) for name in ("losses", "expected"))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCES[precision])


@pytest.mark.slow
def test_a_run_shrinks_to_one_worker_and_grows_again(resize):
    check(resize("jax", "fp64", 2, 1, 2), "fp64", [2, 1, 2])


@pytest.mark.slow
def test_a_run_goes_on_with_as_many_workers_as_fill_its_mesh(resize):
    check(resize("torch", "fp64", "5/4", "3/2"), "fp64", [4, 2])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_node_that_is_about_to_be_taken_away_is_saved_from(resize, engine):
    result = resize(engine, "fp64", 2, "d1")
    check_batches(result, [2, 1])
    assert result["losses"] == []  # it was seen between two log lines, which are 1,000 steps apart
    assert result["distance"] < TOLERANCES["fp64"]
    assert "a node is about to be lost: saving before it goes" in result["said"]
    assert result["restarts"] == result["saved"][:1]  # no other checkpoint than that one: every 1,000 steps


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_three_nodes_of_which_one_is_lost_and_all_the_way_back(resize, engine, precision):
    sizes = [3, 2, 1, 2, 3]  # five rows, which neither two nor three divide
    check(resize(engine, precision, *sizes), precision, sizes)
