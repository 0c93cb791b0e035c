"""Fused GPU kernels for the memory-bound part of a training step, each beside its twin in plain JAX."""

from raygpt.engines.jax.kernels.add_norm import add_norm
from raygpt.engines.jax.kernels.bias_gelu import bias_gelu
from raygpt.engines.jax.kernels.cross_entropy import cross_entropy

__all__ = ["add_norm", "bias_gelu", "cross_entropy"]
