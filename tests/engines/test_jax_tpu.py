"""GPT-2's training step compiles for a real TPU v6e 4x4 slice and fits into its chips, on every kind of mesh.

libtpu's compiler is the slice's own. One compilation takes a minute of a core, so one mesh is compiled each time (all
of parameters, rows and heads are shared out on it), and the rest with `pytest -m slow`.
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
STATE = {
    "gpt2": 124.5e6 * 12 / 2**30,
    "gpt2-xl": 1557.7e6 * 12 / 2**30,
    "nanochat": 162.1e6 * 12 / 2**30,
}  # parameters and AdamW's averages, in fp32

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra tpu"),
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout's benchmarks"),
]


def compiled(script, case):
    """What a benchmark prints of one case."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, script, case], env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    print(figures)
    return figures


@pytest.mark.parametrize(
    ("case", "attention", "shares"),
    [
        ("gpt2 fsdp=8,tensor=2", "Splash", 16),
        pytest.param("gpt2 data=16", "Splash", 1, marks=pytest.mark.slow),
        pytest.param("gpt2 fsdp=16", "Splash", 16, marks=pytest.mark.slow),
        pytest.param("gpt2 data=8,context=2", "Splash", 1, marks=pytest.mark.slow),
        pytest.param("nanochat fsdp=4,context=4 32K", "Splash", 4, marks=pytest.mark.slow),
        pytest.param("gpt2-xl fsdp=16", "Splash", 16, marks=pytest.mark.slow),
        pytest.param("gpt2-xl data=2,fsdp=8", "Splash", 8, marks=pytest.mark.slow),
    ],
)
def test_a_step_fits_into_a_v6e_slice(case, attention, shares):
    figures = compiled(SCRIPT, case)
    assert figures["total_gib"] < CHIP
    assert figures["attention"] == attention
    share = STATE[case.split()[0]] / shares
    assert share - 0.01 <= figures["state_gib"] < 1.15 * share + 0.02  # vectors are on every chip, and tiles are padded


@pytest.mark.slow
def test_muon_sends_at_most_twice_its_matrices_and_is_three_percent_of_a_step_at_most():
    figures = compiled(SCRIPT.with_name("muon_tpu.py"), "fsdp=16")
    assert figures["exchanged"] <= 2
    assert figures["mib_per_chip"].keys() == {"all-to-all"}
    assert figures["flops"] <= 0.03
