"""What `raygpt plan` prints."""

import re
from types import SimpleNamespace

import pytest

from raygpt.planning.compiler import CompilerAnswer, differences
from raygpt.planning.forecast import forecast
from raygpt.planning.target import parse_target
from raygpt.recipes import load_recipe
from raygpt.show.planning import show_compiled


@pytest.fixture
def plan(raygpt, tmp_path, monkeypatch):
    """Print the plan of a recipe: its lines, each with single spaces."""
    monkeypatch.setenv("COLUMNS", "200")

    def lines(*words):
        status, out, err = raygpt("plan", *words, f"run.storage={tmp_path}")
        assert status == 0, err
        return [" ".join(line.split()) for line in out.splitlines()]

    return lines


def changes_in(lines):
    start = lines.index("changes that would help most") + 1
    return [line for line in lines[start:] if not line.startswith("note:")]


def test_changes_of_a_plan_that_does_not_fit_say_whether_they_do_and_not_how_much_faster_they_are(plan):
    (engine,) = changes_in(plan("modern-1.5b", "--on", "l4"))
    assert re.fullmatch(r"engine=torch [\d,]+ tokens/s, 3\d\.\d GiB; does not fit either", engine)
    (mesh,) = changes_in(plan("modern-1.5b", "--on", "v5e:4x4", "cluster.mesh.data=-1", "cluster.mesh.fsdp=1"))
    assert re.fullmatch(r"cluster.mesh.data=1 cluster.mesh.fsdp=16 [\d,]+ tokens/s, \d\.\d GiB", mesh)


def test_changes_of_a_plan_that_fits_say_how_much_faster_they_are(plan):
    changes = changes_in(plan("gpt2-124m", "--on", "8xh100"))
    assert changes
    for change in changes:
        assert re.fullmatch(r"\S.*=\S+ [\d,]+ tokens/s \(\+\d+%\), \d+\.\d GiB(; another run)?", change)


def test_a_plan_says_what_is_what(plan):
    lines = plan("gpt2-124m", "--on", "8xh100")
    assert lines[0] == "gpt2-124m on 8 × h100"
    assert {"engine jax, fused kernels", "device figures NVIDIA's data sheet"} < set(lines)
    (run,) = [line for line in lines if line.startswith("run ")]
    assert run.endswith(" h for 600,000 steps, 294,912,000,000 tokens, 2,369.9 tokens per parameter")


@pytest.mark.parametrize(("count", "title"), [(1, "tiny on this CPU, 1 core"), (2, "tiny on this CPU, 2 cores")])
def test_a_plan_for_this_cpu_says_how_many_cores_it_has(plan, monkeypatch, count, title):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(count)), raising=False)
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", list)
    monkeypatch.setattr("raygpt.planning.target.cpu_speed", lambda cores: (1e11, 1e10))
    lines = plan("tiny")
    assert lines[0] == title
    assert "engine jax, plain kernels" in lines


def test_the_compilers_figures_stand_beside_the_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan = forecast(load_recipe("gpt2-124m", {"run.storage": str(tmp_path)}), parse_target("v6e:4x4"))
    step = SimpleNamespace(state_bytes=2**30, temporary_bytes=2**30, total_bytes=2**31, flops=1e12, collectives=())
    found = differences(plan, step)
    show_compiled(CompilerAnswer(step, found, 61.0))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    flops = found[-1].plan
    assert f"FLOPs, each loop counted once {flops:.3g} 1e+12 {flops / 1e12 - 1:+.1%}" in lines
