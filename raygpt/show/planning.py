"""Console output and picture of `raygpt plan`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from raygpt import storage
from raygpt.formatting import ratio_text, short_time, size, time_span
from raygpt.host import cores
from raygpt.planning.loss import distance
from raygpt.show import chart
from raygpt.show.console import out, show_notes, table_of

if TYPE_CHECKING:
    from raygpt.planning.compiler import CompilerAnswer
    from raygpt.planning.forecast import Forecast
    from raygpt.planning.search import Change
    from raygpt.planning.target import Target

BAR = 30  # characters of the longest
MEMORY = "memory of each device"
TIME = "time of a step"


def show_forecast(plan: "Forecast", price: float | None, changes: Sequence["Change"]) -> None:
    """Everything that a plan says, in 80 columns."""
    out.print(f"[bold]{escape(str(plan.recipe.run.name))} on {escape(_devices(plan.target))}[/]", soft_wrap=True)
    out.print(table_of(_facts(plan, price)))
    _show_kinds(MEMORY, memory_kinds(plan.as_dict()), size)
    _show_kinds(TIME, time_kinds(plan.as_dict()), short_time)
    _show_changes(plan, changes)
    show_notes(plan.notes)


def _devices(target: "Target") -> str:
    """What a target is; of a CPU the cores, which the target has as one device, and JAX as one each."""
    if target.device.platform != "cpu":
        return str(target)
    return f"this CPU, {cores()} {'core' if cores() == 1 else 'cores'}"


def memory_kinds(plan: Mapping[str, Any]) -> dict[str, float]:
    """Kind -> bytes, of a plan as JSON."""
    return {kind: count for kind, count in plan["memory"].items() if kind not in ("total", "limit")}


def time_kinds(plan: Mapping[str, Any]) -> dict[str, float]:
    """Kind -> seconds of a step."""
    return {kind.replace("_", "-"): seconds for kind, seconds in plan["step_s"].items() if kind != "total"}


def _facts(plan: "Forecast", price: float | None) -> list[tuple[str, str]]:
    need, limit = plan.memory.total, plan.devices.memory_bytes
    verdict = "fits" if plan.fits else "does not fit"
    mesh = " × ".join(f"{axis} {count}" for axis, count in plan.mesh.items() if count > 1) or "one device"
    kernels = "fused" if plan.devices.fused else "plain"
    engine = f"jax, {kernels} kernels" if plan.recipe.engine == "jax" else "torch"
    facts = [
        (verdict, f"{size(need)} of {size(limit)} on each device, {need / limit:,.0%}"),
        ("batch", f"{plan.split}; mesh {mesh}"),
        ("speed", f"{plan.tokens_per_s:,.0f} tokens/s, {short_time(plan.time.total)} a step{_mfu(plan)}"),
        ("run", _run(plan)),
        ("cost", "" if price is None else f"{plan.cost(price):,.2f} at {price:g} per device-hour"),
        ("checkpoints", _checkpoints(plan)),
        ("loss", _loss(plan)),
        ("engine", engine),
        ("device figures", plan.target.device.source),
    ]
    return [(label, text) for label, text in facts if text]


def _run(plan: "Forecast") -> str:
    ratio = ratio_text(plan.tokens / plan.parameters)
    length = f"{plan.recipe.steps:,} steps, {plan.tokens:,} tokens"
    return f"{time_span(plan.run_s)} for {length}, {ratio} tokens per parameter"


def _checkpoints(plan: "Forecast") -> str:
    return f"{plan.checkpoints:,} of {size(plan.checkpoint_bytes)}, {time_span(plan.checkpoint_s)} each at 1 GB/s"


def _nearest(plan: "Forecast") -> str:
    """What the earlier run came to that is nearest in size and length."""
    size_of = plan.description.block_parameters
    runs = plan.laws.earlier_of(plan.recipe)
    if not runs:
        return ""
    nearest = min(runs, key=lambda run: distance([run], size_of, plan.tokens))
    return f"; {escape(nearest.run)} came to {nearest.loss:.3f} with {nearest.tokens:,} tokens"


def _mfu(plan: "Forecast") -> str:
    return "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"


def _loss(plan: "Forecast") -> str:
    if plan.recipe.run.start_from:
        return "unknown: the run starts from another, and laws are of runs from step 0"
    if plan.loss is None:
        return f"unknown: no scaling law of this model family in run.storage; `raygpt scaling` fits one{_nearest(plan)}"
    return f"{plan.loss.loss:.3f}, {plan.loss.low:.3f} to {plan.loss.high:.3f} in 4 of 5 runs, by {plan.loss.rests_on}"


def _show_kinds(title: str, kinds: Mapping[str, float], text: Any) -> None:
    most = max(kinds.values()) or 1.0
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=12)
    table.add_column(justify="right", min_width=10)
    for kind, value in kinds.items():
        if value > most / 1000:
            table.add_row(f"  {kind}", text(value), "█" * max(1, round(BAR * value / most)))
    out.print(f"\n[bold]{title}[/]")
    out.print(table)


def _show_changes(plan: "Forecast", changes: Sequence["Change"]) -> None:
    if not changes:
        better = "faster" if plan.fits else "fit"
        out.print(f"\nNo change of mesh, recomputation, engine, batch or context makes it {better}.", soft_wrap=True)
        return
    out.print("\n[bold]changes that would help most[/]")
    table = Table.grid(padding=(0, 2))
    for change in changes:
        table.add_row(escape(str(change)), _figures(plan, change))
    out.print(Padding(table, (0, 0, 0, 2)))


def _figures(plan: "Forecast", change: "Change") -> str:
    """Of a change. It is no faster or slower than a plan that does not fit, which cannot run."""
    other = change.forecast
    gain = f" ({other.tokens_per_s / plan.tokens_per_s - 1:+,.0%})" if plan.fits else ""
    unfit = "" if other.fits else "; does not fit either"
    another = "" if change.is_same_run else "; another run"
    return f"{other.tokens_per_s:,.0f} tokens/s{gain}, {size(other.memory.total)}{unfit}{another}"


def show_found(change: "Change", file: str) -> None:
    """The fastest way to run a recipe, and the file that has it."""
    out.print(f"fastest that fits: [bold]{escape(str(change))}[/]\nwritten to {escape(file)}\n", soft_wrap=True)


def show_compiled(answer: "CompilerAnswer") -> None:
    """Where the plan and the compiler differ, and what the devices send."""
    table = Table("", "plan", "compiler", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for found in answer.differences:
        table.add_row(*found.row.values())
    out.print(f"\n[bold]by the compiler[/], after {time_span(answer.seconds)}")
    out.print(table)
    if answer.step.collectives:
        table = Table("exchange", "axis", "times", "bytes of a device", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for sent in answer.step.collectives:
            table.add_row(sent.kind, sent.axis, f"{sent.count:,}", size(sent.bytes))
        out.print(table)


def write_picture(file: str, plan: Mapping[str, Any]) -> None:
    """Memory and time by kind as an SVG file."""
    storage.write_bytes(file, chart.bar_picture(f"plan on {plan['target']}", bars(plan)).encode())


def bars(plan: Mapping[str, Any]) -> list[tuple[str, Sequence[chart.Bar]]]:
    """Title and bars of memory and of time, of a plan as JSON."""
    return [
        (title, [chart.Bar(kind, value, text(value)) for kind, value in kinds.items() if value])
        for title, kinds, text in (
            (MEMORY, memory_kinds(plan), size),
            (TIME, time_kinds(plan), short_time),
        )
    ]
