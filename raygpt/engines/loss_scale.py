"""The loss scale of fp16: gradients of small losses vanish below 6e-8, of large ones overflow above 65504.

The loss is multiplied before the backward pass and the gradients are divided after it, in fp32. A scale that is too
large makes gradients non-finite; one that is too small cannot be detected, so it is doubled from time to time.
"""

from typing import Any, NamedTuple

GROWTH_STEPS = 2000  # without an overflow, after which it doubles, as in PyTorch's GradScaler


class LossScale(NamedTuple):
    """A power of two, so that scaling rounds nothing, and the good steps since it last changed.

    Used in fp16 only, but part of every state: a run may be resumed on a device with bf16, and later in fp16 again.
    """

    factor: Any
    good_steps: Any

    def after(self, finite: Any, xp: Any) -> "LossScale":
        """After a step: half if its gradients were not finite, double after many that were. `xp` is jax.numpy or torch;
        nothing waits for the device."""
        good_steps = xp.where(finite, self.good_steps + 1, 0)
        grown = good_steps == GROWTH_STEPS
        factor = xp.where(finite, xp.where(grown, self.factor * 2, self.factor), self.factor / 2)
        return LossScale(factor, xp.where(grown, 0, good_steps))
