"""Detects spikes of loss and gradient norm on the device, before the step is applied."""

from typing import Any, NamedTuple

SPIKE_STEPS = 50  # the first steps, in which nothing counts as a spike: the statistics are too poor
SPIKE_MEMORY = 100  # steps over which the mean and variance are averaged


class Spikes(NamedTuple):
    """Running statistics, in fp32; part of every state, because a resumed run may start to look for spikes."""

    loss_mean: Any
    loss_variance: Any
    norm_mean: Any
    norm_variance: Any
    usual_steps: Any  # counted in the statistics
    spikes: Any  # found so far

    def check(self, loss: Any, norm: Any, sigmas: float, xp: Any) -> tuple[Any, "Spikes"]:
        """Whether a step is a spike, and the statistics after it; `xp` is jax.numpy or torch.

        A spike is counted as the limit itself: a loss that stays high becomes usual in time.
        """
        is_known = self.usual_steps >= SPIKE_STEPS
        share = (1 / (self.usual_steps + 1)).clip(min=1 / SPIKE_MEMORY)

        def compare(value: Any, mean: Any, variance: Any) -> tuple[Any, Any, Any]:
            """Whether it is above the limit; the mean and the variance including it."""
            limit = xp.where(is_known, mean + sigmas * variance**0.5, float("inf"))
            off = xp.where(xp.isfinite(value), xp.minimum(value, limit), mean) - mean
            return value > limit, mean + share * off, (1 - share) * (variance + share * off**2)

        high_loss, loss_mean, loss_variance = compare(loss, self.loss_mean, self.loss_variance)
        high_norm, norm_mean, norm_variance = compare(norm, self.norm_mean, self.norm_variance)
        is_spike = high_loss | high_norm
        steps, spikes = self.usual_steps + 1, self.spikes + is_spike
        return is_spike, Spikes(loss_mean, loss_variance, norm_mean, norm_variance, steps, spikes)
