"""Training steps compile for a real TPU v6e 4x4 slice and fit into its chips, on every kind of mesh.

libtpu's compiler is the slice's own. One step is compiled whole each time (all of parameters, rows and heads are shared
out on its mesh), which takes a minute of a core; the rest until their buffers are assigned, with `pytest -m slow`.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from conftest import CHECKOUT

SCRIPT = CHECKOUT / "benchmarks" / "tpu_compile.py"
CHIP = 32e9 / 2**30  # GiB
MODERN = (8 * 84.9e6 + 12 * 77.3e6) / 2**30  # Muon has one average of a matrix, AdamW two of the rest
STATE = {  # GiB of parameters and averages, in fp32
    "gpt2": 12 * 124.5e6 / 2**30,
    "nanochat": MODERN,
    "llama": MODERN,
    "gpt2-xl": 12 * 1557.7e6 / 2**30,
    "modern-1.5b": (8 * 1327.1e6 + 12 * 193.2e6) / 2**30,
}
SHARES = {
    "data=16": 1,
    "fsdp=16": 16,
    "fsdp=8,tensor=2": 16,
    "data=8,context=2": 1,
    "data=2,fsdp=8": 8,
    "fsdp=4,context=4": 4,
}
SMALL = [f"{model} {mesh}" for model in ("gpt2", "nanochat", "llama") for mesh in list(SHARES)[:4]]
LARGE = [f"{model} {mesh}" for model in ("gpt2-xl", "modern-1.5b") for mesh in ("fsdp=16", "data=2,fsdp=8")]
WHOLE = "nanochat fsdp=8,tensor=2"

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra tpu"),
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout's benchmarks"),
]


def compiled(script, *words):
    """What a benchmark prints of one case."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    print(figures)
    return figures


def check(case, figures):
    model, mesh = case.split()[:2]
    share = STATE[model] / SHARES[mesh]
    assert figures["total_gib"] < CHIP
    assert share - 0.01 <= figures["state_gib"] < 1.15 * share + 0.02  # vectors are on every chip, and tiles are padded
    assert abs(figures["plan_off"]) < 0.1


def test_a_step_compiles_whole_for_a_v6e_slice_and_fits():
    check(WHOLE, compiled(SCRIPT, "--whole", WHOLE))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SMALL, *LARGE, "nanochat fsdp=4,context=4 32K"])
def test_a_step_fits_into_a_v6e_slice(case):
    check(case, compiled(SCRIPT, case))


@pytest.mark.slow
def test_muon_sends_at_most_twice_its_matrices_and_is_three_percent_of_a_step_at_most():
    figures = compiled(SCRIPT.with_name("muon_tpu.py"), "fsdp=16")
    assert figures["exchanged"] <= 2
    assert figures["mib_per_chip"].keys() == {"all-to-all"}
    assert figures["flops"] <= 0.03
