"""How a step scales from 16 to 4,096 TPU chips that are not here: compiled programs beside the plan, and its times.

    python benchmarks/scale.py compile [CASE …]     # memory and exchanges by the compiler, beside the plan's
    python benchmarks/scale.py table                # times by the plan; docs/scale.md shows them

GPT-2 XL and modern-1.5b with their blocks recomputed, 16 rows of 1,024 tokens a chip (`weak`), or 2,048 rows in all
(`strong`). No time was measured: docs/scale.md says what the times rest on. `compile` prints a line of JSON for each
case, and writes the results if it compiles all.
"""

import json
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

import record
from tpu_program import VOCAB, Case, program_of

from raygpt.engines.jax.compiled import Collective, collectives_in
from raygpt.engines.padding import padded_vocab
from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.planning.memory import step_memory
from raygpt.planning.micro_batch_size import FILLED, split_batch
from raygpt.planning.step_time import exchange, sent_bytes, step_time
from raygpt.planning.target import Target, devices_on, parse_target, precision_on
from raygpt.recipes import load_recipe

CONTEXT, ROWS_PER_CHIP, STRONG_ROWS = 1024, 16, 2048
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-xl": ("gpt2-124m", {"model.preset": "gpt2-xl"}),
    "modern-1.5b": ("modern-1.5b", {}),
}
SLICES = {"16": "4x4", "64": "8x8", "256": "16x16", "2*256": "16x16"}
COMPILED = {"16": (1, 16), "64": (1, 64), "256": (4, 64), "2*256": (8, 64)}  # data, fsdp
CHIPS = (16, 64, 256, 512, 1024, 2048, 4096)
LARGEST = 256  # chips of a slice of v5e and v6e; more of them are several slices
AXES = ("data", "fsdp", "tensor", "context")


def cases() -> dict[str, Case]:
    """By name."""
    found = {}
    for model, (recipe, settings) in MODELS.items():
        for kind in ("v5e", "v6e"):
            for chips, (data, fsdp) in COMPILED.items():
                on = f"{'2*' if chips == '2*256' else ''}{kind}:{SLICES[chips]}"
                changes = _settings(settings, {"data": data, "fsdp": fsdp}, ROWS_PER_CHIP * data * fsdp)
                found[f"{model} {on} data={data},fsdp={fsdp}"] = Case(on, recipe, changes)
    return found


def _settings(settings: dict[str, Any], mesh: dict[str, int], rows: int, remat: str = "blocks") -> dict[str, Any]:
    usual = {"model.precision": "bf16", "model.context": CONTEXT, "training.remat": remat}
    return {**usual, **settings, "training.batch_tokens": rows * CONTEXT, "cluster.mesh": {"data": 1, **mesh}}


# Compiled programs


def compile_all(wanted: list[str]) -> None:
    """Compile the cases that are named, or all and keep the results."""
    known, figures = cases(), {}
    for name in wanted or known:
        figures[name] = compared(known[name])
        print(json.dumps({"case": name, **figures[name]}), flush=True)
    if not wanted:
        record.save("scale-compiled", {"rows_per_chip": ROWS_PER_CHIP, "context": CONTEXT, "cases": figures})


def compared(case: Case) -> dict[str, Any]:
    """Memory and bytes sent by one chip, of a compiled program and of the plan."""
    program, (plan, planned_sent) = program_of(case), planned(case)
    mesh = load_recipe(case.recipe, dict(case.settings)).cluster.mesh.over(parse_target(case.on).count)
    collectives = list(collectives_in(program.text, mesh))
    sent = sent_by_axis(collectives, mesh)
    used = [axis for axis in AXES if mesh[axis] > 1]
    return {
        "compile_s": round(program.seconds, 1),
        "gib": round(program.total / 2**30, 3),
        "plan_gib": round(plan / 2**30, 3),
        "plan_off": round(plan / program.total - 1, 4),
        "sent_mib": {axis: round(sent[axis] / 2**20, 1) for axis in used},
        "plan_sent_mib": {axis: round(planned_sent[axis] / 2**20, 1) for axis in used},
        "collectives": {f"{c.kind} {c.axis}": [c.count, round(c.bytes / 2**20, 1)] for c in collectives},
    }


def planned(case: Case) -> tuple[int, dict[str, float]]:
    """Bytes that one chip needs, and that it sends along each axis, by the plan."""
    recipe, target = load_recipe(case.recipe, dict(case.settings)), parse_target(case.on)
    mesh, devices = recipe.cluster.mesh.over(target.count), devices_on(recipe, target)
    description, tokens = describe(recipe.model, padded_vocab(VOCAB)), recipe.training.batch_tokens / target.count
    sent = sent_bytes(recipe, description, mesh, tokens, 1, devices.number_bytes)
    return step_memory(recipe, VOCAB, devices, mesh, ROWS_PER_CHIP, 1).total, sent


def sent_by_axis(collectives: list[Collective], mesh: dict[str, int]) -> dict[str, float]:
    """Bytes that one chip sends along each axis. What goes along several is summed along the inner one first: along the
    outer one a chip has only its part."""
    sent = dict.fromkeys(AXES, 0.0)
    for found in collectives:
        axes, size = [axis for axis in AXES if axis in found.axis.split(" × ")], float(found.bytes)
        for axis in reversed(axes):
            sent[axis] += size * _times_sent(found.kind, mesh[axis])
            size /= mesh[axis]
    return sent


def _times_sent(kind: str, devices: int) -> float:
    """How often a device sends what an exchange results in, by rings."""
    of_others = (devices - 1) / devices
    return {"all-reduce": 2 * of_others, "reduce-scatter": devices - 1.0, "collective-permute": 1.0}.get(
        kind, of_others
    )


# Times by the plan


def table() -> None:
    """The best mesh of each number of chips, for weak and strong scaling; printed as Markdown and written."""
    figures: dict[str, Any] = {}
    for model in MODELS:
        for kind in ("v5e", "v6e"):
            for scaling in ("weak", "strong"):
                rows = [best(model, kind, chips, scaling) for chips in CHIPS]
                figures[f"{model} {kind} {scaling}"] = rows
                print(f"\n{model}, {kind}, {scaling}\n")
                print(
                    "| chips | mesh | remat | accumulated | ms | exchange, ms | not hidden | tokens/s of a chip | GiB |"
                )
                print("|---|---|---|---|---|---|---|---|---|")
                for row in rows:
                    print("| " + " | ".join(str(value) for value in row.values()) + " |")
    record.save(
        "scale-planned", {"context": CONTEXT, "rows_per_chip": ROWS_PER_CHIP, "rows": STRONG_ROWS, "tables": figures}
    )


def best(model: str, kind: str, chips: int, scaling: str) -> dict[str, Any]:
    """The fastest mesh and recomputation that fits."""
    target = _target(kind, chips)
    rows = ROWS_PER_CHIP * chips if scaling == "weak" else STRONG_ROWS
    found = [
        plan
        for mesh in _meshes(chips, rows)
        for remat in ("none", "blocks")
        for plan in _plans(model, target, mesh, rows, remat)
    ]
    return min(found, key=lambda plan: plan[0])[1]


def _target(kind: str, chips: int) -> Target:
    side = {16: 4, 64: 8}.get(chips, 16)
    return parse_target(f"{chips // LARGEST}*{kind}:16x16" if chips > LARGEST else f"{kind}:{side}x{side}")


def _meshes(chips: int, rows: int) -> Iterator[dict[str, int]]:
    """Rows are divided along context only if there are fewer than chips: those parts are unequal work (LOG.md)."""
    sizes = [2**power for power in range(chips.bit_length())]
    for context in (1,) if rows >= chips else (2, 4):
        for fsdp in sizes:
            if chips % (fsdp * context) == 0:
                yield {"data": chips // (fsdp * context), "fsdp": fsdp, "context": context}


def _plans(
    model: str, target: Target, mesh: dict[str, int], rows: int, remat: str
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Its seconds and figures, if it fits."""
    name, settings = MODELS[model]
    recipe = load_recipe(name, _settings(settings, mesh, rows, remat))
    sizes, devices = recipe.cluster.mesh.over(target.count), devices_on(recipe, target)
    if recipe.model.width % mesh["fsdp"]:  # it would be whole on every device
        return
    try:
        split = split_batch(recipe, VOCAB, devices)
    except RaygptError:  # does not fit even with one row
        return
    if split.memory_bytes > FILLED["tpu"] * devices.memory_bytes:
        return
    micro = split.micro_rows, split.accumulation
    time = step_time(recipe, VOCAB, devices, target, sizes, *micro, precision_on(recipe, target))
    description = describe(recipe.model, padded_vocab(VOCAB))
    tokens = prod(micro) * CONTEXT / target.count
    sent = exchange(recipe, description, target, sizes, tokens, split.accumulation, devices.number_bytes)
    shown = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    yield (
        time.total,
        {
            "chips": target.count,
            "mesh": shown,
            "remat": remat,
            "accumulated": split.accumulation,
            "ms": round(1000 * time.total, 1),
            "exchange_ms": round(1000 * sent, 1),
            "exposed_ms": round(1000 * time.exchange, 1),
            "tokens_per_s_chip": round(rows * CONTEXT / time.total / target.count),
            "gib": round(split.memory_bytes / 2**30, 1),
        },
    )


if __name__ == "__main__":
    {"compile": compile_all, "table": lambda _: table()}[sys.argv[1]](sys.argv[2:])
