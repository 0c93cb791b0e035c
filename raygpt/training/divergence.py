"""Detects divergence: a non-finite loss ends the run; a spike is a warning or an error, as the recipe says."""

import math
from collections.abc import Callable, Mapping

from raygpt.config import Training
from raygpt.errors import DivergedError


class DivergenceCheck:
    """Checks the metrics of steps when they are logged, and again before they are saved."""

    def __init__(self, training: Training, precision: str, warn: Callable[[str], None]):
        self._training, self._warn = training, warn
        self._skips_overflows = precision == "fp16"
        self._spikes = 0.0  # reported so far

    def begin(self, spikes: float) -> None:
        """Do not report spikes that the restored state has counted already."""
        self._spikes = spikes

    def check_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise, or warn of spikes since the last step that was logged."""
        self._check_finite(step, metrics)
        self._check_spikes(step, metrics["spikes"])

    def check_saved(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise if the state must not be saved; with `on_spike: stop` also after a spike."""
        self._check_finite(step, metrics)
        if self._training.on_spike == "stop":
            self._check_spikes(step, metrics["spikes"])

    def _check_finite(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise if the loss or the gradient norm is not finite.

        In fp16 a gradient may overflow; the engine skipped that step, and the state did not change.
        """
        is_sound = math.isfinite(metrics["grad_norm"]) or self._skips_overflows
        if self._training.on_nan == "skip" or (math.isfinite(metrics["loss"]) and is_sound):
            return
        raise DivergedError(
            f"the loss is not a number any more at step {step} (loss {metrics['loss']}, gradient norm "
            f"{metrics['grad_norm']}); the checkpoints before it are intact. Lower optimizer.learning_rate, lengthen "
            "schedule.warmup_steps, or write training.on_nan: skip to leave such steps out"
        )

    def _check_spikes(self, step: int, found: float) -> None:
        news = found - self._spikes
        if news <= 0 or self._training.on_spike not in ("warn", "stop"):
            return
        text = f"loss or gradient norm was {self._training.spike_sigmas:g} standard deviations above what is usual"
        if self._training.on_spike == "stop":  # also of a later step that is being saved meanwhile
            raise DivergedError(
                f"{text}, at or before step {step}; the checkpoints before it are intact. Lower "
                "optimizer.learning_rate, or write training.on_spike: skip to leave such steps out"
            )
        self._spikes = found
        self._warn(f"{text} in {news:.0f} of the steps up to {step}")
