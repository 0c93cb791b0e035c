"""What loss and gradient norm usually are, kept on the device: a step that is far off is known before it is applied."""

from typing import Any, NamedTuple

SPIKE_STEPS = 50  # before which nothing is called a spike: too little is known of what is usual
SPIKE_MEMORY = 100  # steps that the usual loss and gradient norm look back


class Spikes(NamedTuple):
    """There in every state, whether the recipe looks for spikes or not: it may begin to. fp32."""

    loss_mean: Any
    loss_variance: Any
    norm_mean: Any
    norm_variance: Any
    usual_steps: Any  # that were counted in
    spikes: Any  # found so far

    def look(self, loss: Any, norm: Any, sigmas: float, xp: Any) -> tuple[Any, "Spikes"]:
        """Whether a step is a spike, and what is usual after it; `xp` is jax.numpy or torch.

        A spike counts as no more than the limit: a loss that stays high becomes usual, in time.
        """
        is_known = self.usual_steps >= SPIKE_STEPS
        share = (1 / (self.usual_steps + 1)).clip(min=1 / SPIKE_MEMORY)

        def compare(value: Any, mean: Any, variance: Any) -> tuple[Any, Any, Any]:
            """Whether it is above the limit; the mean and the variance with it counted in."""
            limit = xp.where(is_known, mean + sigmas * variance**0.5, float("inf"))
            off = xp.where(xp.isfinite(value), xp.minimum(value, limit), mean) - mean
            return value > limit, mean + share * off, (1 - share) * (variance + share * off**2)

        high_loss, loss_mean, loss_variance = compare(loss, self.loss_mean, self.loss_variance)
        high_norm, norm_mean, norm_variance = compare(norm, self.norm_mean, self.norm_variance)
        is_spike = high_loss | high_norm
        steps, spikes = self.usual_steps + 1, self.spikes + is_spike
        return is_spike, Spikes(loss_mean, loss_variance, norm_mean, norm_variance, steps, spikes)
