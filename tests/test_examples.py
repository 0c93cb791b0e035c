"""The scripts in examples/ do what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import raygpt
from raygpt.engines import read_plain_state
from raygpt.recipes import load_recipe

CHECKOUT = Path(os.environ.get("RAYGPT_CHECKOUT") or Path(__file__).parents[1])


@pytest.fixture
def example(ray_cluster, tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder, on the session's cluster: its output."""

    def run(name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(CHECKOUT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.extended  # as test_function.py's JAX function on two workers
def test_two_workers_fit_a_line_together(example):
    slope, offset, loss = map(
        float, re.match(r"y = (\S+) x \+ (\S+), loss (\S+) after 1000", example("line.py")).groups()
    )
    assert abs(slope - 2) < 0.2
    assert abs(offset - 1) < 0.1
    assert loss < 0.013  # the noise alone has 0.1² = 0.01


@pytest.mark.extended  # as test_function.py's test of datasets does
def test_two_workers_fit_a_line_to_a_ray_dataset(example):
    out = example("dataset_function.py")
    slope, offset, loss = map(float, re.match(r"y = (\S+) x \+ (\S+), loss (\S+) after 20 ", out).groups())
    assert abs(slope - 2) < 0.2
    assert abs(offset - 1) < 0.1
    assert loss < 0.013


def test_two_pytorch_workers_learn_a_sine(example):
    pytest.importorskip("torch", reason="needs the extra torch")
    out = example("torch_function.py")
    assert float(re.fullmatch(r"loss (\S+) after 40 epochs on 2 workers\n", out)[1]) < 0.02


@pytest.mark.extended
def test_tutorial_a_is_less_than_60_lines_on_raygpts_parts(tmp_path):
    """In a process and a cluster of its own, as it is typed."""
    script = CHECKOUT / "examples" / "tutorial_a.py"
    assert len(script.read_text().splitlines()) < 60
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(4000)))
    done = subprocess.run(
        [sys.executable, str(script), str(text), "tiny"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(raygpt.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"val_loss (\S+)", done.stdout)]
    assert losses[-1] < losses[0] / 2
    recipe = load_recipe("tiny", {"data.tokenizer": "bytes"})
    (saved,) = tmp_path.glob("runs/function-*/step-40")  # the shares of both workers, as one
    weights = read_plain_state("jax", str(saved), recipe.model, 257)
    assert weights.step == 40
    assert weights.parameters["tokens"].shape == (257, recipe.model.width)
