"""What Muon sends and computes on a TPU slice that is not here: the optimizer alone, compiled by the slice's compiler.

    python benchmarks/muon_tpu.py [MESH …]

A MESH is e.g. fsdp=16. The model is GPT-2 small in bf16, a step 131,072 tokens. `exchanged` is the bytes that all chips
together send, as a multiple of the matrices in fp32; `flops` the share of a step's FLOPs that a chip spends on making
matrices orthogonal. Prints a line of JSON for each mesh; without any it takes all and writes the results.
"""

import json
import math
import os
import re
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # for what is computed here; the TPUs are only compiled for
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no machine of Google's to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so none need be locked

import jax
import record
from jax.experimental import topologies

from raygpt.engines.jax import sharding
from raygpt.engines.jax.engine import JaxEngine
from raygpt.models import describe
from raygpt.recipes import load_recipe

TOPOLOGY, TOKENS, VOCAB = "v6e:4x4x1", 131_072, 50257
MESHES = ("fsdp=16", "data=2,fsdp=8", "fsdp=8,tensor=2", "data=16", "data=8,context=2")
BYTES = {"f32": 4, "bf16": 2}
EXCHANGE = re.compile(r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(")


def main() -> None:
    """Compile the optimizer for the meshes that are named, or for all and keep the results."""
    names = sys.argv[1:] or list(MESHES)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    figures = {}
    for name in names:
        figures[name] = measured(devices, {axis: int(size) for axis, size in (p.split("=") for p in name.split(","))})
        print(json.dumps({"mesh": name, **figures[name]}), flush=True)
    if len(names) == len(MESHES):
        record.save("muon-v6e", {"topology": TOPOLOGY, "tokens": TOKENS, "meshes": figures})


def measured(devices: Any, mesh: dict[str, int]) -> dict[str, Any]:
    """One mesh."""
    settings = {
        "model": {"preset": "gpt2", "precision": "bf16"},
        "training.batch_tokens": TOKENS,
        "optimizer.kind": "muon",
        "cluster.mesh": {"data": 1, **mesh},
    }
    recipe = load_recipe("tiny", settings)
    engine, description = JaxEngine(recipe, VOCAB, devices=devices), describe(recipe.model, VOCAB)
    state = jax.tree.map(sharding.shape_at, engine._shapes, engine._shardings)
    places = engine._shardings.parameters, engine._shardings.slots
    update = jax.jit(engine._optimizer.update, out_shardings=places)
    program = update.lower(state.parameters, state.parameters, state.slots, state.updates).compile()
    matrices = sum(math.prod(description.shapes[p.name]) for p in description.parameters if p.role == "matrix")
    flops: Any = program.cost_analysis()
    step = description.flops_per_token * TOKENS / len(devices)
    sent = exchanges(program.as_text())
    return {
        "exchanged": round(sum(sent.values()) * len(devices) / (4 * matrices), 3),
        "mib_per_chip": {kind: round(size / 2**20, 1) for kind, size in sent.items()},
        "flops": round(flops["flops"] / step, 4),
    }


def exchanges(text: str) -> dict[str, int]:
    """Bytes that one chip receives in a program, its own part included, by kind of exchange."""
    found: dict[str, int] = {}
    for result, kind in EXCHANGE.findall(text):
        arrays = re.findall(r"(f32|bf16)\[([\d,]*)\]", result)
        size = sum(BYTES[dtype] * math.prod(map(int, filter(None, axes.split(",")))) for dtype, axes in arrays)
        found[kind] = found.get(kind, 0) + size
    return found


if __name__ == "__main__":
    main()
