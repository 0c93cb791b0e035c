"""Parameters before the first step, each drawn by a generator of its own: whoever needs one draws the same."""

import hashlib

import torch
from torch import Tensor

from raygpt.config import Model, Recipe
from raygpt.engines.torch.model import padded_vocab

EMBEDDINGS = ("transformer.wte.weight", "transformer.wpe.weight")


def initial(name: str, recipe: Recipe, vocab: int) -> Tensor:
    """The parameter of that Hugging Face name, in its layout, fp32, on the CPU."""
    shape = _shape(name, recipe.model, vocab)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    key = hashlib.blake2b(f"{recipe.training.seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key) >> 1)  # PyTorch takes 63 bits
    if recipe.model.init == "xavier" and name not in EMBEDDINGS:
        limit = (6 / _fans(name, shape)) ** 0.5
        return torch.empty(shape).uniform_(-limit, limit, generator=generator)
    return torch.empty(shape).normal_(0, _deviation(name, recipe.model), generator=generator)


def _deviation(name: str, model: Model) -> float:
    """GPT-2's 0.02, smaller for the projections that add to the residual stream; beside Xavier's kernels Flax's own."""
    if model.init == "xavier":
        return float(model.width**-0.5)
    return 0.02 / (2 * model.layers) ** 0.5 if name.endswith("c_proj.weight") else 0.02


def _shape(name: str, model: Model, vocab: int) -> tuple[int, ...]:
    width, (part, kind) = model.width, name.split(".")[-2:]
    if part.startswith("ln_"):
        return (width,)
    if part in ("wte", "wpe", "lm_head"):
        return (model.context if part == "wpe" else vocab, width)
    inside, outside = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, 4 * width),
        "mlp.c_proj": (4 * width, width),
    }[".".join(name.split(".")[-3:-1])]
    return (outside,) if kind == "bias" else (inside, outside)


def _fans(name: str, shape: tuple[int, ...]) -> int:
    """Numbers in plus numbers out of the matrix; Q, K and V, which share a kernel, are three of width × width."""
    if name.endswith("c_attn.weight"):
        return 2 * shape[0]
    rows = padded_vocab(shape[0]) if name == "lm_head.weight" else shape[0]
    return rows + shape[1]
