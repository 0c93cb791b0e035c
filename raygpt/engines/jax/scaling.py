"""The loss scale of fp16: gradients of small losses vanish below 6e-8, of large ones overflow above 65504.

The loss is multiplied before the backward pass and the gradients are divided after it, in fp32. A scale that is too
large shows by itself, gradients that are not finite; one that is too small does not, so it is tried larger at times.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
FIRST = 2.0**10  # of each token's loss, not of their mean: no more than a few steps away from the right one
PATIENCE = 2000  # good steps before a larger one is tried, as in PyTorch's GradScaler


class Scale(NamedTuple):
    """The factor, a power of two so that scaling rounds nothing, and the good steps since it last changed."""

    factor: Array  # fp32
    good_steps: Array  # int32

    @classmethod
    def first(cls) -> "Scale":
        """Before step 0."""
        return cls(jnp.asarray(FIRST, jnp.float32), jnp.zeros((), jnp.int32))

    def after(self, finite: Array) -> "Scale":
        """After a step: half if its gradients were not finite, double after enough that were."""
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        patient = good_steps == PATIENCE
        factor = self.factor * jnp.where(finite, jnp.where(patient, 2.0, 1.0), 0.5)
        return Scale(factor, jnp.where(patient, 0, good_steps))
