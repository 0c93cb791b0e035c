"""Bytes that a training step needs on a device, estimated from a model's description."""

from raygpt.models.description import Description

# A parameter, AdamW's two averages, the sum of gradients and those of one micro-batch, all fp32. Muon has one average
# of a matrix, and needs as much as the other one takes while it makes matrices orthogonal.
STATE_BYTES = 20


def state_bytes(description: Description, shards: int) -> int:
    """Of parameters, optimizer and gradients, of which a device has one of so many shards."""
    return description.count * STATE_BYTES // shards


def row_bytes(description: Description, remat: str, number_bytes: int, keeps_scores: bool, tensor: int) -> int:
    """What the backward pass needs of one row, on a device that has 1/tensor of heads and hidden layer.

    Counted per token and layer: the stream before attention and MLP and their norms; queries, keys and values, a copy
    of one of them, attention's result and its transpose; the MLP before and after its activation.
    """
    sizes = description.sizes
    width, hidden, context = sizes["width"], sizes["hidden"], sizes["context"]
    heads, kv_heads = (sizes[axis] * sizes["head"] for axis in ("heads", "kv_heads"))
    scores = sizes["heads"] * context * (number_bytes + 4) if keeps_scores else 0  # softmax is in fp32
    gate = 2 * hidden if "blocks.gate.kernel" in description.by_name else 0
    cut = (4 * heads + 2 * kv_heads + 2 * hidden + gate) * number_bytes + scores  # what a tensor axis divides
    everything = 4 * width * number_bytes + cut // tensor
    products = (3 * width + heads + 2 * kv_heads + hidden + gate // 2) * number_bytes
    kept = {"none": everything, "products": products, "blocks": width * number_bytes}[remat]
    again = 0 if remat == "none" else everything  # of the one layer that is computed again
    return context * (sizes["layer"] * kept + again)
