"""Saves memory by recomputation: what a block's backward pass needs is computed again instead of stored."""

from collections.abc import Collection
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
    # Dropout uses keys, so there is no random state. `blocks` has a policy too: without one the compiler keeps the
    # results of Triton kernels.
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, PRODUCTS if what == "products" else ()))
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


def _policy(kept: Collection[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
