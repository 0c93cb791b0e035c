"""Training steps compiled for a TPU slice that is not here: does each fit, and does the plan say so?

    python benchmarks/tpu_compile.py [--whole] [CASE …]

A step takes 512 rows of 1024 tokens in bf16 on 16 chips of TPU v6e, in one case 4 rows of 32,768; AdamW for GPT-2, Muon
for the others, as in the recipes. `tpu_program.py` says how far it is compiled. Prints a line of JSON for each case;
without cases it compiles all and writes the results.
"""

import json
import sys
from typing import Any

import record
from tpu_program import VOCAB, Case, program_of

from raygpt.planning.memory import step_memory
from raygpt.planning.target import devices_on, parse_target
from raygpt.recipes import load_recipe

TARGET, ROWS, CONTEXT = "v6e:4x4", 512, 1024  # 16 chips of 32 GB
MESHES: dict[str, dict[str, int]] = {
    "data=16": {"data": 16},
    "fsdp=16": {"fsdp": 16},
    "fsdp=8,tensor=2": {"fsdp": 8, "tensor": 2},
    "data=8,context=2": {"data": 8, "context": 2},  # in four micro-batches
}
LARGE = {"fsdp=16": {"fsdp": 16}, "data=2,fsdp=8": {"data": 2, "fsdp": 8}}  # blocks recomputed
LONG = {"model.context": 32768, "training.batch_tokens": 4 * 32768}


def cases() -> dict[str, Case]:
    """By name: every mesh with each family of models, the largest of them, and a long context."""
    small = {
        "gpt2": ("gpt2-124m", {}),
        "nanochat": ("modern-124m", {}),
        "llama": ("modern-124m", {"model.preset": "llama"}),
        "qwen3": ("modern-124m", {"model.preset": "qwen3", "model.kv_heads": 2}),  # three queries share a key
        "speedrun-124m": ("speedrun-124m", {}),
    }
    large = {"gpt2-xl": ("gpt2-124m", {"model.preset": "gpt2-xl"}), "modern-1.5b": ("modern-1.5b", {})}
    found = {
        f"{name} {mesh}": _case(recipe, settings, sizes, 4 if "context" in sizes else 1)
        for name, (recipe, settings) in small.items()
        for mesh, sizes in MESHES.items()
    }
    for name, (recipe, settings) in large.items():
        for mesh, sizes in LARGE.items():
            found[f"{name} {mesh}"] = _case(recipe, {**settings, "training.remat": "blocks"}, sizes)
    return {**found, "nanochat fsdp=4,context=4 32K": _case("modern-124m", LONG, {"fsdp": 4, "context": 4})}


def _case(recipe: str, settings: dict[str, Any], mesh: dict[str, int], accumulation: int = 1) -> Case:
    usual = {"model.precision": "bf16", "training.batch_tokens": ROWS * CONTEXT, "cluster.mesh": {"data": 1, **mesh}}
    return Case(TARGET, recipe, {**usual, **settings}, accumulation)


def main() -> None:
    """Compile the cases that are named, or all and keep the results."""
    whole, wanted = "--whole" in sys.argv[1:], [name for name in sys.argv[1:] if name != "--whole"]
    known, figures = cases(), {}
    for name in wanted or known:
        program, plan = program_of(known[name], whole), planned(known[name])
        figures[name] = {
            "compile_s": round(program.seconds, 1),
            "state_gib": round(program.state / 2**30, 3),
            "temporary_gib": round(program.temporary / 2**30, 3),
            "total_gib": round(program.total / 2**30, 3),
            "plan_gib": round(plan / 2**30, 3),
            "plan_off": round(plan / program.total - 1, 4),
            "accumulation": known[name].accumulation,
        }
        print(json.dumps({"case": name, **figures[name]}), flush=True)
    if not wanted:
        record.save("tpu-v6e-compile", {"target": TARGET, "rows": ROWS, "context": CONTEXT, "cases": figures})


def planned(case: Case) -> int:
    """Bytes of one chip by the plan."""
    recipe, target = load_recipe(case.recipe, dict(case.settings)), parse_target(case.on)
    mesh = recipe.cluster.mesh.over(target.count)
    rows = -(-recipe.rows // (mesh["data"] * mesh["fsdp"] * case.accumulation))
    return step_memory(recipe, VOCAB, devices_on(recipe, target), mesh, rows, case.accumulation).total


if __name__ == "__main__":
    main()
