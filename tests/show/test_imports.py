"""Which modules import the show package, and what it imports."""

import subprocess
import sys
from pathlib import Path

import raygpt

PACKAGE = Path(raygpt.__file__).parent
CALLERS = {*(f"cli/{name}.py" for name in ("__init__", "training", "before", "after", "setup")), "interop/card.py"}


def test_only_the_command_line_and_the_model_card_import_the_show_package():
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if "raygpt.show" in file.read_text("utf-8")]
    assert {str(file) for file in files if file.parts[0] != "show"} == CALLERS


def test_no_module_of_the_show_package_imports_ray_or_an_engine():
    modules = ", ".join(f"raygpt.show.{file.stem}" for file in (PACKAGE / "show").glob("[a-z]*.py"))
    code = f"import sys, {modules}; sys.exit(' '.join({{'ray', 'jax', 'torch'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
