"""A training step compiled for devices that need not be here: what the compiler says of its memory, work and exchange.

For TPUs `libtpu` from PyPI has the compiler of the chips: it fails where they would fail.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine of Google's to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used, so none need be locked

import jax
from jax.experimental import topologies

from raygpt.config import Recipe
from raygpt.engines.jax.engine import JaxEngine
from raygpt.errors import RaygptError, first_line

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
NUMBER_BITS = {
    "pred": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "s32": 32,
    "u32": 32,
    "s8": 8,
    "u8": 8,
    "s64": 64,
}


@dataclass(frozen=True)
class Collective:
    """An exchange between devices, with those of its kind along the same axes: of each device, in a step."""

    kind: str
    axis: str
    count: int
    bytes: int  # of its results


@dataclass(frozen=True)
class CompiledStep:
    """Figures of one device. A compiler counts the operations of a loop once, so they are a lower bound."""

    state_bytes: int  # parameters, optimizer and batch
    temporary_bytes: int
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.temporary_bytes


def tpu_devices(name: str, slices: int) -> Any:
    """The chips of a topology such as v6e:4x4."""
    kind, _, sizes = name.partition(":")
    sides = "x".join([*sizes.split("x"), "1"][:3])  # libtpu names three sides of every slice
    try:
        options = {"num_slices": slices} if slices > 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{sides}", **options).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise RaygptError(
            f"--compile: the TPU's compiler does not answer for {name} ({first_line(error)}); "
            "pip install 'raygpt[tpu]', or leave --compile out"
        ) from error


def compile_step(recipe: Recipe, vocab: int, accumulation: int, devices: Any = None) -> CompiledStep:
    """The step of a recipe for these devices, or for those that are here."""
    engine = JaxEngine(recipe, vocab, devices=devices or jax.devices(), accumulation=accumulation)
    with tempfile.TemporaryDirectory() as folder:
        # Written by the compiler: `as_text` of some programs for TPUs fails.
        program = engine.lower_step().compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        texts = [file.read_text() for file in Path(folder).glob("*after_optimizations.txt")]
        text = max(texts, key=len, default="")  # beside that of small programs, which it may need for itself
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    state = memory.argument_size_in_bytes
    if engine.mesh.devices.flat[0].platform == "tpu":
        # `temp_size_in_bytes` of libtpu 0.0.42 is larger than the buffer that its compiler assigns, by up to 38 %.
        temporary = memory.peak_memory_in_bytes - state
    else:
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # what does not overwrite the old state
        temporary = memory.temp_size_in_bytes + new
    return CompiledStep(
        state,
        temporary,
        float(cost.get("flops", 0.0)),
        float(cost.get("bytes accessed", 0.0)),
        tuple(collectives_in(text, dict(engine.mesh.shape))),
    )


# What a program's text says


def collectives_in(text: str, mesh: Mapping[str, int]) -> Iterator[Collective]:
    """Every exchange of a compiled program, those of one kind and axis together, loops counted as often as they run."""
    computations = _computations(text)
    totals: dict[tuple[str, str], list[int]] = {}
    begun: set[str] = set()  # channels of exchanges that a TPU's program cuts into several fused computations
    for name, times in _times_run(computations).items():
        for line in computations[name]:
            if found := re.search(rf"= (.+?) ({'|'.join(KINDS)})(?:-start)?\(", line):
                if re.match(r"async_collective|fused_", name):
                    channel = "".join(re.findall(r"channel_id=[0-9]+", line)) or line
                    if channel in begun:
                        continue
                    begun.add(channel)
                kind, size = found[2], _result_bytes(found[1], is_start="-start(" in line)
                if name.startswith("all-reduce-scatter"):  # as a TPU's compiler calls it: each keeps a part of the sum
                    kind, size = "reduce-scatter", size // max(1, len(_first_group(line)))
                total = totals.setdefault((kind, _axes(line, mesh)), [0, 0])
                total[0] += times
                total[1] += times * size
    for (kind, axis), (count, size) in sorted(totals.items(), key=lambda item: -item[1][1]):
        yield Collective(kind, axis, count, size)


def _computations(text: str) -> dict[str, list[str]]:
    """Name -> lines; the entry's name is ''."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault("" if header[1] else header[2], [])
        else:
            lines.append(line)
    return found


def _times_run(computations: Mapping[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: that of a loop as often as it says."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in computations.get(name, []):
            trips = _trips(line, computations) if " while(" in line else 1
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                if called in computations:
                    visit(called, count * trips)

    visit("", 1)
    return times


def _trips(loop: str, computations: Mapping[str, list[str]]) -> int:
    """How often a loop runs. A TPU's does not say so: its counter goes from 0 to a constant, in steps of another."""
    if known := re.search(r'known_trip_count[^0-9]*"?([0-9]+)', loop):
        return int(known[1])
    condition, body = (_lines_by_name(computations, loop, part) for part in ("condition", "body"))
    compared = _operands(condition.get("ROOT", ""), "compare")
    index = re.search(r"index=([0-9]+)", condition.get(compared[0], "")) if len(compared) == 2 else None
    limit = _constant(condition.get(compared[1], "")) if index else None
    after = _operands(body.get("ROOT", ""), "tuple")
    if not index or limit is None or len(after) <= int(index[1]):
        return 1
    steps = [_constant(body.get(name, "")) for name in _operands(body.get(after[int(index[1])], ""), "add")]
    return -(-limit // next((step for step in steps if step), 1))


def _lines_by_name(computations: Mapping[str, list[str]], loop: str, part: str) -> dict[str, str]:
    """The lines of a loop's `condition` or `body` by the names that they define; that of the result as ROOT, too."""
    called = re.search(rf"{part}=%?([\w.\-]+)", loop)
    lines = computations.get(called[1], []) if called else []
    named = [(found[1], line) for line in lines if (found := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line))]
    return {**dict(named), "ROOT": next((line for line in lines if "ROOT " in line), "")}


def _operands(line: str, operation: str) -> list[str]:
    found = re.search(rf" {operation}\(([^)]*)\)", line)
    return re.findall(r"%([\w.\-]+)", found[1]) if found else []


def _constant(line: str) -> int | None:
    found = re.search(r" constant\(([0-9]+)\)", line)
    return int(found[1]) if found else None


def _result_bytes(shapes: str, is_start: bool) -> int:
    """Of `f32[8,128]{1,0}`, or of a tuple of them. One that starts and ends later has its operands in front."""
    parts = re.findall(r"([a-z]+[0-9]+|pred)\[([0-9,]*)\]", shapes)
    sizes = [
        int(np.prod([int(size) for size in shape.split(",") if size], dtype=np.int64)) * NUMBER_BITS.get(kind, 32) // 8
        for kind, shape in parts
    ]
    return max(sizes, default=0) if is_start else sum(sizes)


def _axes(line: str, mesh: Mapping[str, int]) -> str:
    """The axes of a mesh along which an exchange goes, by the devices of its first group."""
    group = _first_group(line)
    if len(group) < 2:
        return "all" if len(group) == 0 else "none"
    places = np.stack(np.unravel_index(group, tuple(mesh.values())))
    differ = [axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1]
    return " × ".join(differ)


def _first_group(line: str) -> NDArray[np.int64]:
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([0-9,]+)\}", line):
        return np.array([int(number) for number in listed[1].split(",")])
    if iota := re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", line):
        shape, dims = (tuple(int(n) for n in text.split(",")) for text in (iota[1], iota[2]))
        numbers = np.arange(np.prod(dims)).reshape(dims)
        turned = numbers.transpose([int(n) for n in iota[3].split(",")]) if iota[3] else numbers
        return turned.reshape(shape)[0]
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", line):
        return _group_of_axes(*meshed.groups())
    return np.array([], dtype=np.int64)


def _group_of_axes(sizes: str, order: str, axes: str) -> NDArray[np.int64]:
    """The first devices of `mesh['a'=4,'b'=2] {'b'}`, along some axes; of an axis' size 8, 'a':(2)4 is the part of 4
    inside 2. `order` may say `, device_ids=([2,4]T(1,0))`: their numbers in that shape, transposed."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=([0-9]+)", sizes)}
    numbers = np.arange(np.prod(list(shape.values())))
    if turned := re.search(r"device_ids=\(\[([0-9,]+)\]T\(([0-9,]+)\)\)", order):
        dims, axes_of = ([int(n) for n in text.split(",")] for text in turned.groups())
        numbers = numbers.reshape(dims).transpose(axes_of).ravel()
    places = np.stack(np.unravel_index(np.arange(len(numbers)), tuple(shape.values())))
    inside = np.ones(len(numbers), dtype=bool)
    part = {name: (int(before or 1), int(size or shape[name])) for name, before, size in _AXIS.findall(axes)}
    for place, (name, size) in zip(places, shape.items(), strict=True):
        before, own = part.get(name, (1, 1))
        behind = size // (before * own)  # digits of the place: [before, own, behind]
        inside &= (place // (own * behind) == 0) & (place % behind == 0)
    return numbers[inside]


_AXIS = re.compile(r"'([^']+)'(?::\(([0-9]+)\)([0-9]+))?")
