"""Triton kernels for the memory-bound part of a training step on a GPU, each beside its twin in plain PyTorch."""
