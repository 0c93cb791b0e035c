"""The model's parameters under Hugging Face's names: what both engines and the outside world share.

Ours differ in name, in that a kernel is [out, in], as nn.Linear has it, in that queries, keys and values come head by
head, and in that the token table is padded.
Transformers' own model has the names and kernels already; only its padding is cut off.
"""

import re

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from raygpt.engines.torch.model import padded_vocab

BLOCK = {  # ours -> Hugging Face's, below transformer.h.N
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
TOP = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
WITH_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")  # their padding stays inside


def hugging_face_name(name: str) -> str:
    """blocks.3.qkv.bias -> transformer.h.3.attn.c_attn.bias; one of theirs stays as it is."""
    if not name.startswith("blocks."):
        return TOP.get(name, name)
    _, layer, part, kind = name.split(".")
    return f"transformer.h.{layer}.{BLOCK[part]}.{kind}"


def to_hugging_face(name: str, tensor: Tensor, vocab: int, heads: int) -> Tensor:
    """A parameter of that name as Hugging Face has it: kernels [in, out], all queries first, no padding."""
    if _is_our_qkv(name):
        tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    if _is_our_kernel(name):
        return tensor.T
    return tensor[:vocab] if hugging_face_name(name) in WITH_VOCABULARY else tensor


def from_hugging_face(name: str, tensor: Tensor, vocab: int, heads: int) -> Tensor:
    """The way back; the padding is zero."""
    if _is_our_kernel(name):
        tensor = tensor.T
    if _is_our_qkv(name):
        return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    padding = padded_vocab(vocab) - vocab if hugging_face_name(name) in WITH_VOCABULARY else 0
    return F.pad(tensor, (0, 0, 0, padding)) if padding else tensor


def _is_our_qkv(name: str) -> bool:
    return re.fullmatch(r"blocks\.\d+\.qkv\.(weight|bias)", name) is not None


def _is_our_kernel(name: str) -> bool:
    return re.fullmatch(r"blocks\.\d+\.(qkv|out|up|down)\.weight", name) is not None
