"""The benchmarks and examples, which `make test` does not run in full, use names that raygpt has."""

import ast
import importlib

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
