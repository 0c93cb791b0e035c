"""What the real compiler says of a plan: for TPUs that need not be here, and for this machine's own devices."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raygpt.engines import choices, devices_of
from raygpt.errors import RaygptError
from raygpt.formatting import size
from raygpt.planning.forecast import Forecast
from raygpt.planning.memory import logit_chunks
from raygpt.planning.step_time import Work

if TYPE_CHECKING:
    from raygpt.engines.jax.compiled import CompiledStep


@dataclass(frozen=True)
class Difference:
    """A figure of the plan and the compiler's."""

    name: str
    plan: float
    compiler: float
    text: Callable[[float], str]

    @property
    def row(self) -> dict[str, str]:
        off = f"{self.plan / self.compiler - 1:+.1%}" if self.compiler else ""
        return {"name": self.name, "plan": self.text(self.plan), "compiler": self.text(self.compiler), "differs": off}


@dataclass(frozen=True)
class CompilerAnswer:
    """A compiled step beside its plan."""

    step: "CompiledStep"
    differences: tuple[Difference, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        compared = {found.name: {"plan": found.plan, "compiler": found.compiler} for found in self.differences}
        return {**asdict(self.step), "compared": compared, "compile_s": self.seconds}


def ask_compiler(plan: Forecast) -> CompilerAnswer:
    """Compile the step of a plan; nothing is computed."""
    if plan.recipe.engine != "jax":
        raise RaygptError("--compile: PyTorch compiles while it runs; write engine=jax, or leave --compile out")
    platform, name = plan.target.device.platform, plan.target.name
    if platform != "tpu" and not plan.target.is_here:
        raise RaygptError(
            f"--compile: the compiler for {name} needs that device; write --on v6e:4x4, or leave out --on"
        )
    if platform == "tpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # for what is computed here; the TPUs are only compiled for
    else:
        devices_of("jax").use_all_cores()
    from raygpt.engines.jax.compiled import compile_step, tpu_devices

    devices = tpu_devices(name.rpartition("*")[2], plan.target.groups) if platform == "tpu" else None
    began = time.monotonic()
    step = compile_step(plan.recipe, plan.corpus.vocab, plan.split.accumulation, devices)
    return CompilerAnswer(step, differences(plan, step), time.monotonic() - began)


def differences(plan: Forecast, step: "CompiledStep") -> tuple[Difference, ...]:
    """Memory and operations of one device."""
    state = plan.memory.parameters + plan.memory.optimizer
    return (
        Difference("state", state, step.state_bytes, size),
        Difference("temporary", plan.memory.total - state, step.temporary_bytes, size),
        Difference("memory in all", plan.memory.total, step.total_bytes, size),
        Difference("FLOPs, each loop counted once", _flops(plan), step.flops, lambda count: f"{count:.3g}"),
    )


def _flops(plan: Forecast) -> float:
    """Of a device in a step; the compiler counts a loop over layers, micro-batches or chunks of the loss once, and
    attention's kernels not at all."""
    work = Work(plan.recipe, plan.description, plan.devices.number_bytes)
    tokens = plan.split.micro_rows * plan.recipe.model.context / plan.devices.count
    scanned = choices.scans(plan.recipe.training.compile, plan.devices.platform, plan.recipe.model.layers)
    layers = 1 if scanned else plan.recipe.model.layers
    own = plan.split.micro_rows * plan.recipe.model.context // (plan.mesh["data"] * plan.mesh["fsdp"])
    own //= plan.mesh["context"]
    loops = (plan.description, plan.recipe.engine, plan.devices, plan.mesh, own)
    head = work.head_products / (1 if plan.devices.fused else logit_chunks(*loops))
    blocks = (work.products - work.head_products) * layers / plan.recipe.model.layers
    attention = work.all_scores * layers / plan.recipe.model.layers if plan.devices.keeps_scores else 0.0
    return tokens * (blocks + head + attention)
