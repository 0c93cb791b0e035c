"""GPT-2's training step compiled for a TPU slice that is not here: does it fit, and how long does that take?

    python benchmarks/tpu_compile.py [CASE …]

With `libtpu` from PyPI this is the slice's own compiler: it fails where the slice would fail. A step takes 512 rows of
1024 tokens in bf16, in one case 4 rows of 32,768. Prints a line of JSON for each case; without cases it compiles all
and writes the results.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # for what is computed here; the TPUs are only compiled for
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no machine of Google's to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so none need be locked

import record
from jax.experimental import topologies

from raygpt.engines.jax.engine import JaxEngine
from raygpt.recipes import load_recipe

TOPOLOGY = "v6e:4x4x1"  # 16 chips of 32 GB
ROWS, CONTEXT, VOCAB = 512, 1024, 50257
CASES: dict[str, dict[str, Any]] = {
    "gpt2 data=16": {"preset": "gpt2", "mesh": {"data": 16}},
    "gpt2 fsdp=16": {"preset": "gpt2", "mesh": {"fsdp": 16}},
    "gpt2 fsdp=8,tensor=2": {"preset": "gpt2", "mesh": {"fsdp": 8, "tensor": 2}},
    "gpt2 data=8,context=2": {"preset": "gpt2", "mesh": {"data": 8, "context": 2}, "accumulation": 4},
    "gpt2-xl fsdp=16": {"preset": "gpt2-xl", "mesh": {"fsdp": 16}, "remat": "blocks"},
    "gpt2-xl data=2,fsdp=8": {"preset": "gpt2-xl", "mesh": {"data": 2, "fsdp": 8}, "remat": "blocks"},
    "nanochat fsdp=4,context=4 32K": {
        "preset": "nanochat",
        "mesh": {"fsdp": 4, "context": 4},
        "rows": 4,
        "context": 32768,
    },
}


def main() -> None:
    """Compile the cases that are named, or all and keep the results."""
    names = sys.argv[1:] or list(CASES)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    figures = {}
    for name in names:
        figures[name] = compiled(devices, **CASES[name])
        print(json.dumps({"case": name, **figures[name]}), flush=True)
    if len(names) == len(CASES):
        record.save("tpu-v6e-compile", {"topology": TOPOLOGY, "rows": ROWS, "context": CONTEXT, "cases": figures})


def compiled(
    devices: Any,
    preset: str,
    mesh: dict[str, int],
    accumulation: int = 1,
    remat: str = "none",
    rows: int = ROWS,
    context: int = CONTEXT,
) -> dict[str, Any]:
    """One case: seconds to compile, GiB per chip."""
    settings = {
        "model": {"preset": preset, "context": context, "precision": "bf16"},
        "training": {"batch_tokens": rows * context, "remat": remat},
        "cluster.mesh": {"data": 1, **mesh},
    }
    recipe = load_recipe("gpt2-124m", settings)
    engine = JaxEngine(recipe, VOCAB, devices=devices, accumulation=accumulation)
    lowered, began = engine.lower_step(), time.monotonic()
    program = lowered.compile()
    return {
        "compile_s": round(time.monotonic() - began, 1),
        **gibibytes(program.memory_analysis()),
        "accumulation": accumulation,
        "remat": remat,
        "attention": engine.describe()["attention"],
    }


def gibibytes(memory: Any) -> dict[str, float]:
    """Of one chip: what the state and the batch take, what the step needs besides, and both."""
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # what does not overwrite the old state
    sizes = {"state_gib": state, "temporary_gib": temporary, "total_gib": state + temporary + new}
    return {name: round(size / 2**30, 2) for name, size in sizes.items()}


if __name__ == "__main__":
    main()
