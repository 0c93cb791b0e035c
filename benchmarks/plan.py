"""Steps measured beside their plan: time and peak memory on one GPU, and batches that must go out of memory.

    python benchmarks/plan.py                 # all cases, three processes at a time: about 8 minutes on an H200
    python benchmarks/plan.py --only torch    # those with `torch` in their name
    python benchmarks/plan.py --cpu           # small models on this machine's CPU
    python benchmarks/plan.py --again FILE    # compare a recorded file with the plan of this checkout, without a device

Each case is a process of its own. Processes compile beside each other, as far as the plan says that they fit, but only
one at a time is timed. A case that is `beyond` has the fewest rows that the plan says do not fit, and has the device to
itself. Cases marked `fit` calibrated the plan; the others check it. The table compares times relative to the median of
each engine's `fit` cases: GPUs of one kind differ by 5 %. The results file has the planned times without that factor,
and the peak and bandwidth that they follow from; a CPU's are measured when the benchmark starts.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record
from in_process import timed_alone
from rich.console import Console
from rich.table import Table

from raygpt.config import Recipe
from raygpt.engines import devices_of, engine_of
from raygpt.planning.memory import step_memory
from raygpt.planning.step_time import step_time
from raygpt.planning.target import Target, devices_on, parse_target, precision_on
from raygpt.recipes import load_recipe

VOCAB = 50257
ROUNDS, ROUND_STEPS, WARM_UP = 4, 5, 4
BEYOND = 1.04  # of the memory: what such a batch needs at least, by the plan
ONE = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1}


@dataclass(frozen=True)
class Case:
    """A recipe and rows × context tokens."""

    engine: str
    recipe_name: str
    rows: int  # 0: beyond the memory
    context: int
    remat: str = "none"
    fit: bool = False
    overrides: tuple[str, ...] = ()
    vocab: int = VOCAB

    @property
    def name(self) -> str:
        model = next((word.partition("=")[2] for word in self.overrides if "preset" in word), self.recipe_name)
        size = f"{self.rows or 'beyond'}x{self.context}"
        return f"{self.engine} {model} {size}{'' if self.remat == 'none' else f' {self.remat}'}"

    def recipe(self, rows: int) -> Recipe:
        settings = [f"engine={self.engine}", f"model.context={self.context}", f"training.remat={self.remat}"]
        return load_recipe(
            self.recipe_name, [*self.overrides, *settings, f"training.batch_tokens={rows * self.context}"]
        )


def gpt2(preset: str, rows: int, context: int, engine: str, remat: str = "none", fit: bool = False) -> Case:
    return Case(engine, "gpt2-124m", rows, context, remat, fit, (f"model.preset={preset}",))


def family(preset: str, rows: int, context: int, engine: str, remat: str = "none", fit: bool = False) -> Case:
    return Case(engine, "modern-124m", rows, context, remat, fit, (f"model.preset={preset}", "model.depth=12"))


CASES = (
    gpt2("gpt2", 64, 1024, "jax", fit=True),
    gpt2("gpt2", 64, 1024, "torch", fit=True),
    Case("jax", "modern-124m", 64, 1024, fit=True),
    Case("torch", "modern-124m", 64, 1024, fit=True),
    gpt2("gpt2-medium", 32, 1024, "jax", "blocks", fit=True),
    gpt2("gpt2", 64, 1024, "torch", "products", fit=True),
    Case("jax", "modern-350m", 16, 2048, "products", fit=True),
    Case("torch", "modern-350m", 32, 1024, "blocks", fit=True),
    Case("jax", "modern-124m", 8, 8192, fit=True),
    family("llama", 32, 1024, "jax", fit=True),
    gpt2("gpt2", 8, 8192, "jax"),
    gpt2("gpt2", 16, 4096, "torch"),
    gpt2("gpt2-medium", 32, 1024, "torch"),
    Case("torch", "modern-124m", 32, 2048),
    Case("jax", "modern-350m", 32, 1024),
    gpt2("gpt2-large", 32, 1024, "jax", "blocks", fit=True),
    gpt2("gpt2-large", 16, 2048, "torch", "blocks", fit=True),
    Case("jax", "modern-124m", 64, 1024, "blocks", fit=True),
    Case("torch", "modern-350m", 4, 8192, fit=True),
    family("llama", 32, 1024, "torch", fit=True),
    gpt2("gpt2-xl", 16, 1024, "jax", "blocks", fit=True),
    gpt2("gpt2-medium", 16, 2048, "torch", "products"),
    Case("jax", "modern-350m", 8, 4096, "blocks", fit=True),
    Case("torch", "modern-350m", 16, 2048),
    family("llama", 16, 2048, "jax", "products"),
    family("llama", 8, 4096, "torch", "blocks"),
    family("qwen3", 32, 1024, "jax"),
    family("qwen3", 16, 2048, "torch"),
    family("qwen3", 4, 8192, "jax", "blocks"),
    gpt2("gpt2-large", 8, 4096, "jax", "blocks"),
    gpt2("gpt2-medium", 8, 4096, "jax", "products"),
    gpt2("gpt2-large", 4, 8192, "torch", "blocks"),
    Case("jax", "modern-124m", 16, 4096),
    Case("torch", "modern-124m", 8, 8192),
    Case("jax", "modern-350m", 4, 8192, "products"),
    Case("torch", "modern-350m", 8, 4096, "products"),
    family("llama", 4, 8192, "jax"),
    family("qwen3", 32, 1024, "torch", "products"),
    gpt2("gpt2", 0, 1024, "jax"),
    gpt2("gpt2", 0, 1024, "torch"),
    Case("jax", "modern-124m", 0, 1024),
    Case("torch", "modern-350m", 0, 2048),
)
SMALL = ("data.tokenizer=bpe:4096",)
WIDE = (*SMALL, "model.width=256", "model.heads=4")
DEEP = (*SMALL, "model.layers=8", "model.width=192", "model.heads=3")
LLAMA = (*SMALL, "model.preset=llama", "model.layers=4", "model.width=192", "model.heads=3")
CPU_CASES = (
    Case("jax", "gpt2-tiny", 32, 128, fit=True, overrides=SMALL, vocab=4096),
    Case("torch", "gpt2-tiny", 32, 128, fit=True, overrides=SMALL, vocab=4096),
    Case("jax", "tiny", 32, 128, fit=True, overrides=SMALL, vocab=4096),
    Case("torch", "tiny", 32, 128, fit=True, overrides=SMALL, vocab=4096),
    Case("jax", "tiny", 16, 256, fit=True, overrides=WIDE, vocab=4096),
    Case("torch", "tiny", 16, 256, fit=True, overrides=WIDE, vocab=4096),
    Case("jax", "gpt2-tiny", 8, 512, overrides=DEEP, vocab=4096),
    Case("torch", "gpt2-tiny", 8, 512, overrides=DEEP, vocab=4096),
    Case("jax", "tiny", 64, 64, overrides=LLAMA, vocab=4096),
    Case("torch", "tiny", 64, 64, overrides=LLAMA, vocab=4096),
)


def main() -> None:
    """Measure what is asked for, one process a case; print the table and write the results."""
    arguments = _arguments()
    if arguments.case is not None:
        print(json.dumps(measured(arguments.case, arguments.rows, arguments.cpu)))
        return
    if arguments.again:
        show(json.loads(Path(arguments.again).read_text())["figures"], parse_target(arguments.on))
        return
    target = parse_target("here")
    known = CPU_CASES if arguments.cpu else CASES
    chosen = [number for number, case in enumerate(known) if any(word in case.name for word in arguments.only)]
    found = all_of(chosen, target, arguments)
    figures = {known[number].name: with_planned_time(known[number], figure, target) for number, figure in found}
    show(figures, target)
    name = arguments.name or ("plan-cpu" if arguments.cpu else "plan-h200")
    print(record.save(name, figures, device=device_figures(target)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--cpu", action="store_true", help="small models on this machine's CPU")
    parser.add_argument("--jobs", type=int, default=3, help="processes that compile beside each other")
    parser.add_argument("--again", help="a recorded file to compare with the plan of this checkout")
    parser.add_argument("--on", default="h200", help="what that file was recorded on")
    parser.add_argument("--name", help="of the results file")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)  # what one process measures
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# All cases, each in its own process


def all_of(numbers: list[int], target: Target, arguments: argparse.Namespace) -> list[tuple[int, dict[str, Any]]]:
    """The figures of cases, by number. Those beyond the memory come last, each alone."""
    known, room = CPU_CASES if arguments.cpu else CASES, Room(target.device.memory)

    def one(number: int) -> tuple[int, dict[str, Any]]:
        case = known[number]
        rows = case.rows or fewest_beyond(case, target)
        needed = planned(case, rows, target)["gib"] * 2**30
        with room.reserved(room.size if case.rows == 0 else int(1.15 * needed) + 2**31):
            figure = in_a_process(number, rows, case, arguments.cpu)
        print(f"{case.name}: {json.dumps(figure)}", flush=True)
        return number, figure

    with ThreadPoolExecutor(1 if arguments.cpu else arguments.jobs) as pool:
        return list(pool.map(one, numbers))


class Room:
    """The memory of a device, which cases reserve in the order in which they come."""

    def __init__(self, size: int):
        self.size, self._free, self._turn = size, size, threading.Condition()
        self._first = threading.Lock()  # held by the case that waits, so that a large one is not overtaken

    @contextlib.contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        count = min(count, self.size)
        with self._first, self._turn:
            self._turn.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._turn:
                self._free += count
                self._turn.notify_all()


def in_a_process(number: int, rows: int, case: Case, cpu: bool) -> dict[str, Any]:
    """The figures of one case; `fits` is false where it went out of memory, `error` is anything else that failed."""
    alone = case.rows == 0  # as in training: JAX takes 92 % of the memory at once
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} if alone else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__, "--case", str(number), "--rows", str(rows), *(["--cpu"] if cpu else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **memory})
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    words = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "out of memory", "Out of memory")
    if any(word in done.stderr for word in words):
        return {"fits": False, "rows": rows}
    return {"error": done.stderr[-2000:], "rows": rows}


def measured(number: int, rows: int, cpu: bool) -> dict[str, Any]:
    """Milliseconds of a step, the fastest of a few rounds, and the peak of memory, in this process."""
    case = (CPU_CASES if cpu else CASES)[number]
    recipe, module, here = case.recipe(rows), engine_of(case.engine), devices_of(case.engine)
    here.use_all_cores()
    if case.engine == "torch":
        module.set_up(recipe)
    where = {"devices": here.one()} if case.engine == "jax" else {}
    found = module.find_devices(recipe)
    engine = module.Engine(recipe, case.vocab, **where)
    windows = np.random.default_rng(0).integers(0, case.vocab, (rows, case.context + 1)).astype(np.int32)
    began, state, batch = time.perf_counter(), engine.start(), engine.put(windows)

    def take(count: int) -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(count):
            state, metrics = engine.step(state, batch)
        engine.read(metrics)
        return (time.perf_counter() - began) / count

    take(1)
    compile_s = time.perf_counter() - began
    with timed_alone():
        take(WARM_UP)
        rounds = [take(ROUND_STEPS) for _ in range(ROUNDS)]
    return {
        "fits": True,
        "rows": rows,
        "ms": round(1e3 * min(rounds), 2),
        "rounds_ms": [round(1e3 * seconds, 2) for seconds in rounds],
        "peak_gib": round(here.peak_bytes() / 2**30, 3),
        "limit_gib": round(found.memory_bytes / 2**30, 2),
        "compile_s": round(compile_s, 1),
        "about": engine.describe(),
    }


# The plan of a case


def planned(case: Case, rows: int, target: Target) -> dict[str, float]:
    """GiB and milliseconds by the plan, one micro-batch on one device."""
    recipe = case.recipe(rows)
    devices, precision = devices_on(recipe, target), precision_on(recipe, target)
    mesh = recipe.cluster.mesh.over(devices.count) if target.device.platform == "cpu" else ONE
    each = -(-rows // mesh["data"])
    memory = step_memory(recipe, case.vocab, devices, mesh, each, 1)
    seconds = step_time(recipe, case.vocab, devices, target, mesh, rows, 1, precision)
    return {"gib": memory.total / 2**30, "limit": devices.memory_bytes / 2**30, "ms": 1e3 * seconds.total}


def with_planned_time(case: Case, figure: dict[str, Any], target: Target) -> dict[str, Any]:
    """A measured step, if there is one, with what `raygpt plan` says of its time, and how far that is off."""
    if not figure.get("fits"):
        return figure
    ms = planned(case, figure["rows"], target)["ms"]
    return {**figure, "planned_ms": round(ms, 2), "planned_off": round(ms / figure["ms"] - 1, 4)}


def device_figures(target: Target) -> dict[str, Any]:
    """What the plans assume of the device."""
    device = target.device
    return {
        "name": device.name,
        "peak_tflops": round(device.peak / 1e12, 4),
        "bandwidth_gb_s": round(device.bandwidth / 1e9, 2),
        "source": device.source,
    }


def fewest_beyond(case: Case, target: Target) -> int:
    """The fewest rows, in eights, that need more than there is."""
    rows = 8
    while (plan := planned(case, rows, target))["gib"] < BEYOND * plan["limit"]:
        rows += 8
    return rows


def show(figures: dict[str, Any], target: Target) -> None:
    """Plan and measurement side by side."""
    table = Table("case", "", "GiB", "plan", "", "ms", "plan", "", box=None)
    rows = compared(figures, target)
    for row in rows:
        figure, plan, mark = row["measured"], row["plan"], "fit" if row["case"].fit else "check"
        if "error" in figure:
            table.add_row(row["case"].name, mark, "error", "", figure["error"].splitlines()[-1][:60])
        elif not figure["fits"]:
            table.add_row(row["case"].name, mark, "out of memory", f"{plan['gib']:.1f}", f"of {plan['limit']:.1f}")
        else:
            memory = "" if row["memory_off"] is None else f"{row['memory_off']:+.1%}"
            times = f"{figure['ms']:.1f}", f"{plan['ms']:.1f}", f"{row['time_off']:+.1%}"
            table.add_row(row["case"].name, mark, f"{figure['peak_gib']:.2f}", f"{plan['gib']:.2f}", memory, *times)
    Console(width=130).print(table)
    print("measured / planned time:", {engine: round(by, 3) for engine, by in scales(rows).items()})


def compared(figures: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """Each case with its plan: how far the plan is off in memory and, relative to its engine's median, in time."""
    cases = {case.name: case for case in (*CASES, *CPU_CASES)}
    rows = [
        {"case": cases[name], "measured": figure, "plan": planned(cases[name], figure["rows"], target)}
        for name, figure in figures.items()
    ]
    by_engine = scales(rows)
    for row in rows:
        if row["measured"].get("fits"):
            peak, plan = row["measured"]["peak_gib"], row["plan"]
            row["memory_off"] = plan["gib"] / peak - 1 if peak else None
            row["time_off"] = plan["ms"] * by_engine[row["case"].engine] / row["measured"]["ms"] - 1
    return rows


def scales(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Engine -> measured / planned time, the median of the cases that calibrate; of all, if there are none."""
    timed = [row for row in rows if row["measured"].get("fits")]
    found = {}
    for engine in {row["case"].engine for row in timed}:
        mine = [row for row in timed if row["case"].engine == engine]
        used = [row for row in mine if row["case"].fit] or mine
        found[engine] = statistics.median(row["measured"]["ms"] / row["plan"]["ms"] for row in used)
    return found


if __name__ == "__main__":
    main()
