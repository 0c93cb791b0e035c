"""The benchmarks and examples, which `make test` does not run in full, use names that raygpt has."""

import ast
import importlib
import json
import runpy

import pytest
from conftest import CHECKOUT

SCRIPTS = sorted([*(CHECKOUT / "benchmarks").glob("*.py"), *(CHECKOUT / "examples").glob("*.py")])


def test_there_are_scripts():
    assert {"step.py", "line.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_it_imports_from_raygpt_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "raygpt":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")


def test_a_cpus_results_have_the_planned_times_and_the_speed_they_were_planned_with(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", list)
    monkeypatch.setattr("raygpt.planning.target.cpu_speed", lambda cores: (1.5e11, 1.25e10))
    monkeypatch.setattr("record.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["plan.py", "--cpu"])
    benchmark = runpy.run_path(str(CHECKOUT / "benchmarks" / "plan.py"))
    step = {"fits": True, "rows": 32, "ms": 200.0, "peak_gib": 0.0}
    found = [(0, step), (2, {"fits": False, "rows": 32}), (3, {"error": "it ended", "rows": 32})]
    monkeypatch.setitem(benchmark["main"].__globals__, "all_of", lambda *of: found)
    benchmark["main"]()
    written = json.loads((tmp_path / "plan-cpu.json").read_text())
    assert (written["device"]["peak_tflops"], written["device"]["bandwidth_gb_s"]) == (0.15, 12.5)
    (measured, *others) = written["figures"].values()
    case, target = benchmark["CPU_CASES"][0], benchmark["parse_target"]("here")
    assert measured["planned_ms"] == pytest.approx(benchmark["planned"](case, 32, target)["ms"], abs=0.01)
    assert measured["planned_off"] == pytest.approx(measured["planned_ms"] / 200 - 1, abs=1e-4)
    assert others == [figure for _, figure in found[1:]]


def test_todays_plan_of_a_cpu_is_within_a_quarter_of_what_was_measured(monkeypatch):
    """Ten cases, by the speed that NumPy measured then."""
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    written = json.loads((CHECKOUT / "benchmarks" / "results" / "plan-cpu.json").read_text())
    speed = written["device"]["peak_tflops"] * 1e12, written["device"]["bandwidth_gb_s"] * 1e9
    monkeypatch.setattr("raygpt.planning.target._reported_gpus", list)
    monkeypatch.setattr("raygpt.planning.target.cpu_speed", lambda cores: speed)
    monkeypatch.setattr("raygpt.planning.target.cores", lambda: 2)
    benchmark = runpy.run_path(str(CHECKOUT / "benchmarks" / "plan.py"))
    target = benchmark["parse_target"]("here")
    assert len(written["figures"]) == 10
    for case, measured in zip(benchmark["CPU_CASES"], written["figures"].values(), strict=True):
        planned = benchmark["planned"](case, measured["rows"], target)
        assert planned["ms"] == pytest.approx(measured["ms"], rel=0.25)
