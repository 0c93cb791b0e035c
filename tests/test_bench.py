"""`raygpt bench`: what it measures, and what it says of it beside the recorded table."""

import json
import re

import pytest

pytest.importorskip("jax")

from raygpt import bench
from raygpt.bench import Steps, Work
from raygpt.errors import RaygptError
from raygpt.models import describe

ROW = {
    "device": "NVIDIA H200",
    "engine": "jax",
    "kernels": "fused",
    "layers": 12,
    "width": 768,
    "vocab": 50257,
    "context": 1024,
    "rows": 64,
    "unlike_gpt2": "",
    "precision": "bf16",
    "ms": 100.0,
    "tokens_per_s": 655360,
    "peak_gib": 22.1,
    "date": "2026-11-15",
    "versions": "jax 0.11.2",
}
ABOUT = {"device": "NVIDIA H200", "engine": "jax 0.11.2", "kernels": "fused", "precision": "bf16"}


def figures(tokens_per_s=655360.0, rows=64, unlike="", **about):
    sizes = {"layers": 12, "width": 768, "vocab": 50257, "context": 1024, "rows": rows, "unlike_gpt2": unlike}
    return {**sizes, "ms": 100.0, "tokens_per_s": tokens_per_s, "peak_gib": 22.14, "about": {**ABOUT, **about}}


def test_a_figure_is_the_median_of_rounds_after_warming_up(monkeypatch):
    clock, taken = [0.0], []

    def take(number):
        taken.append(number)
        clock[0] += 5.0 if len(taken) == 1 else 9.0 if 26 <= len(taken) <= 35 else 2.0  # a slow round in the middle
        return number

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    steps = Steps(take, lambda metrics: float(metrics), lambda: 3 * 2**30, ABOUT)
    found = bench.timed(steps, Work(steps=30))
    assert len(taken) == 5 + 10 + 30
    assert found["compile_s"] == 5.0
    assert found["rounds_ms"] == [2000.0, 9000.0, 2000.0]
    assert (found["ms"], found["tokens_per_s"], found["peak_gib"]) == (2000.0, 64 * 1024 / 2, 3.0)
    assert found["mfu"] == pytest.approx(64 * 1024 / 2 * describe(Work().recipe.model, 50257).flops_per_token / 989e12)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (figures(648000), "0.99 of the 655,360 tokens/s recorded on 2026-11-15 with jax 0.11.2, 64 rows: as expected"),
        (figures(327680), "0.50 of the 655,360 tokens/s recorded on 2026-11-15 with jax 0.11.2, 64 rows: slower"),
        (
            figures(700000, rows=48),
            "1.07 of the 655,360 tokens/s recorded on 2026-11-15 with jax 0.11.2, 64 rows: fast",
        ),
        (
            figures(device="NVIDIA L4"),
            "nothing comparable is recorded for NVIDIA L4; there are figures for: NVIDIA H20",
        ),
        (figures(kernels="plain"), "nothing comparable is recorded for NVIDIA H200"),
        (figures(unlike="remat=blocks"), "nothing comparable is recorded for NVIDIA H200 with remat=blocks;"),
    ],
)
def test_the_verdict_names_what_it_compares_with(measured, said):
    assert bench.verdict(measured, [ROW, {**ROW, "rows": 8, "tokens_per_s": 1}]).startswith(said)


def test_another_model_optimizer_or_remat_is_not_compared_with_gpt2s_step():
    assert bench.unlike_gpt2(Work().recipe) == ""
    assert bench.unlike_gpt2(Work(overrides=("model.mlp=relu2", "optimizer.kind=muon")).recipe) == (
        "mlp=relu2, optimizer=muon"
    )
    assert bench.unlike_gpt2(Work(overrides=("training.remat=blocks",)).recipe) == "remat=blocks"


def test_the_shipped_table_has_what_a_comparison_needs():
    table = bench.recorded()
    assert {(row["device"], row["engine"]) for row in table} >= {("NVIDIA H200", "jax"), ("NVIDIA H200", "torch")}
    for row in table:
        assert set(row) == set(ROW)
        assert row["tokens_per_s"] == pytest.approx(row["rows"] * row["context"] / row["ms"] * 1e3, rel=1e-3)
    assert set(bench.entry(figures())) | {"date", "versions"} == set(ROW)


def test_the_verb_measures_a_small_model_on_a_cpu(capsys, monkeypatch):
    from raygpt import cli

    monkeypatch.setattr("sys.argv", ["raygpt", "bench", "--json", "--steps", "10", "--batch", "2", "model.layers=1"])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["layers"], found["width"], found["rows"], found["context"]) == (1, 128, 2, 64)
    assert found["tokens_per_s"] == pytest.approx(2 * 64 / found["ms"] * 1e3)
    assert found["verdict"].startswith("nothing comparable is recorded for cpu")


@pytest.mark.parametrize(
    ("key", "instead"), [("engine", "--engine"), ("model.context", "--context"), ("model.preset", "--preset")]
)
def test_a_key_that_is_an_option_here_is_not_overruled_without_a_word(key, instead):
    with pytest.raises(RaygptError, match=f"^{key}: is set by the benchmark; write {instead}$"):
        Work(overrides=(f"{key}=gpt2",))


def test_a_preset_is_measured_on_a_cpu_if_asked_for():
    assert bench.usual_work("jax").recipe.model.layers == 4
    assert bench.usual_work("jax", "gpt2-medium").recipe.model.layers == 24
    assert bench.usual_work("jax", None, ["model.depth=6"]).recipe.model.layers == 6


def test_an_engine_that_is_not_here_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RaygptError, match=r"pip install 'raygpt\[torch\]'$"):
        bench.usual_work("torch")


def test_a_broken_jax_is_to_be_installed_again_since_no_extra_brings_it(monkeypatch):
    monkeypatch.setattr(bench, "devices_of", lambda engine: (_ for _ in ()).throw(ImportError("no jaxlib\nat all")))
    message = "engine jax cannot be imported (no jaxlib); install it again: pip install --force-reinstall jax"
    with pytest.raises(RaygptError, match=re.escape(message)):
        bench.usual_work("jax")
