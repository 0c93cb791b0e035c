"""A save that is killed at any of its changes to files leaves a whole checkpoint, and it loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import also

import raygpt
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints

RECIPE = {"model": {"layers": 1, "heads": 2, "width": 16, "context": 16}, "training.batch_tokens": 32}


def make_engine(name):
    recipe = load_recipe("tiny", {**RECIPE, "engine": name})
    if name == "torch":
        pytest.importorskip("torch", reason="needs the extra torch")
        from raygpt.engines.torch.engine import TorchEngine

        return TorchEngine(recipe, vocab=257)
    import jax

    from raygpt.engines.jax.engine import JaxEngine

    return JaxEngine(recipe, vocab=257, devices=jax.devices()[:1])


@pytest.mark.parametrize("name", ["torch", *also("jax")])
def test_wherever_a_save_is_killed_the_newest_whole_checkpoint_is_found_and_loads(name, tmp_path):
    engine, run, copies = make_engine(name), tmp_path / "run", tmp_path / "copies"
    state = engine.start()
    for step in (1, 2):
        part = tmp_path / f"part-{step}"
        state, _ = engine.step(state, engine.put(np.arange(2 * 17, dtype=np.int32).reshape(2, 17)))
        engine.save(state, str(part))
        engine.wait_for_save()
        if step == 1:
            folder = checkpoints.folder_of(str(run), 1)
            checkpoints.commit(folder, 1, {"engine": name}, checkpoints.publish(part, folder))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("boundaries.py")), run, part, copies],
        env={**os.environ, "PYTHONPATH": str(Path(raygpt.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout)
    files = sum(path.is_file() for path in part.rglob("*"))
    assert len(found) > files  # each file is moved, and there is the marker
    assert found == sorted(found)  # step 1 until the marker is there, step 2 from then on
    assert set(found) == {1, 2}
    for number in (0, found.index(2) - 1, found.index(2), len(found) - 1):
        newest, warnings = checkpoints.newest_intact(str(copies / str(number)))
        assert warnings == []
        assert int(engine.restore(newest.folder).step) == newest.step
