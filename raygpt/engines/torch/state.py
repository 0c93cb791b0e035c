"""Everything that a step changes: the model, the optimizer's slots, the step, fp16's loss scale, spike statistics."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from raygpt.engines.loss_scale import LossScale
from raygpt.engines.spikes import Spikes
from raygpt.engines.torch.loss import Objective
from raygpt.engines.torch.optimizer import Optimizer

PARAMETERS = "parameters"  # the kind of a tensor that is in no slot of the optimizer
FIRST_SCALE = 2.0**16  # of a micro-batch's mean loss in fp16, as in PyTorch's GradScaler


@dataclass
class State:
    """The training state; a step changes it in place."""

    objective: Objective
    module: nn.Module  # what training calls: the objective, or its DDP wrapper
    parameters: dict[str, nn.Parameter]  # this process's shards; modules have full parameters while they compute
    optimizer: Optimizer
    step: int
    scale: LossScale
    spikes: Spikes

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, name, tensor) of every parameter and of its slots; the kind is `parameters` or the slot's name."""
        for name, parameter in self.parameters.items():
            yield PARAMETERS, name, parameter.detach()
            for slot, tensors in self.optimizer.slots.items():
                if name in tensors:
                    yield slot, name, tensors[name]

    def numbers(self) -> dict[str, Tensor]:
        """The other numbers on the device. Skipped steps are not counted as updates."""
        scale = {"loss_scale": self.scale.factor, "good_steps": self.scale.good_steps}
        return {"updates": self.optimizer.updates, **scale, **self.spikes._asdict()}
