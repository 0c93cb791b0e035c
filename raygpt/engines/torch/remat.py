"""Saves memory by recomputation: what a block's backward pass needs is computed again instead of stored."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
PRODUCTS = {  # most of the time, but few of the bytes
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: nn.Module, what: str) -> None:
    """Make a block keep everything (`none`), only its matrix products (`products`), or only its input (`blocks`)."""
    if what == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # dropout uses keys
    if what == "products":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    block.forward = partial(checkpoint, block.forward, **options)


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
