"""What loss and gradient norm usually are, kept on the device: a step that is far off is known before it is applied."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from raygpt.engines.base import SPIKE_MEMORY, SPIKE_STEPS

Array = jax.Array


class Usual(NamedTuple):
    """Running mean and variance of a number; fp32."""

    mean: Array
    variance: Array

    @classmethod
    def first(cls) -> "Usual":
        """Before step 0."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def limit(self, sigmas: float) -> Array:
        """Above it a value is a spike."""
        return self.mean + sigmas * jnp.sqrt(self.variance)

    def after(self, value: Array, share: Array) -> "Usual":
        """With a value counted in."""
        off = value - self.mean
        return Usual(self.mean + share * off, (1 - share) * (self.variance + share * off**2))


class Spikes(NamedTuple):
    """There in every state, whether the recipe looks for spikes or not: it may begin to."""

    loss: Usual
    norm: Usual
    steps: Array  # int32: that were counted in
    found: Array  # int32: spikes so far

    @classmethod
    def first(cls) -> "Spikes":
        """Before step 0."""
        return cls(Usual.first(), Usual.first(), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def look(self, loss: Array, norm: Array, sigmas: float) -> tuple[Array, "Spikes"]:
        """Whether a step is a spike, and what is usual after it. A spike counts as no more than the limit: a loss that
        stays high becomes usual, in time."""
        values = [value.astype(jnp.float32) for value in (loss, norm)]
        known = self.steps >= SPIKE_STEPS
        limits = [jnp.where(known, usual.limit(sigmas), jnp.inf) for usual in (self.loss, self.norm)]
        is_spike = (values[0] > limits[0]) | (values[1] > limits[1])
        share = jnp.maximum(1 / (self.steps + 1), 1 / SPIKE_MEMORY)
        loss_after, norm_after = (
            usual.after(jnp.where(jnp.isfinite(value), jnp.minimum(value, limit), usual.mean), share)
            for usual, value, limit in zip((self.loss, self.norm), values, limits, strict=True)
        )
        return is_spike, Spikes(loss_after, norm_after, self.steps + 1, self.found + is_spike)
