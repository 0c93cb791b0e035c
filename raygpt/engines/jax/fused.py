"""The training loss by fused kernels: model.py's parameters and mathematics, laid out for a GPU.

Between attentions the residual stream is [rows · time, width], and each kernel spans what XLA would compute in several
passes over memory: the end of one half of a block (bias, dropped or not, and sum) goes together with the norm that
begins the next. On an H200 a step of GPT-2 124M with 64 × 1024 tokens takes 105 to 110 ms so, and 137 plain.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from raygpt.config import Model
from raygpt.engines.jax.attention import Attention
from raygpt.engines.jax.embedding import embed
from raygpt.engines.jax.kernels import add_norm, bias_gelu, cross_entropy, launch
from raygpt.engines.jax.kernels.cross_entropy import CHUNK_LOGITS
from raygpt.engines.jax.kernels.launch import LANES
from raygpt.engines.jax.loss import chunk_count
from raygpt.engines.jax.model import Layers, dropout, unstack
from raygpt.engines.jax.step import Losses

Array = jax.Array
TILE_ROWS = 16  # the most that a kernel takes at a time; a context of a multiple of it fits with any number of rows


def choose_kernels(device: Any, dtype: Any, mesh: Mesh, model: Model, layers: Layers) -> str:
    """`fused` where the kernels can compute and pay, `plain` elsewhere.

    That is on NVIDIA from Ampere on, in bf16, with layers one after another, on a mesh that shares out rows alone, and
    with a JAX that has Triton.
    """
    hardware = device.platform == "gpu" and float(device.compute_capability) >= 8 and launch.triton is not None
    tiles = model.width % LANES == 0 and model.context % TILE_ROWS == 0
    whole = mesh.size == mesh.shape["data"]  # every device has all parameters
    return "fused" if hardware and tiles and whole and dtype == jnp.bfloat16 and not layers.scanned else "plain"


def make_fused_losses(model: Model, dtype: Any, attention: Attention, mesh: Mesh, vocab: int, layers: Layers) -> Losses:
    """What step.make_losses makes, with kernels. Each device computes its own rows; gradients are summed at the end."""

    def own(parameters: Any, inputs: Array, targets: Array, weights: Array, keys: Array | None) -> tuple[Array, Array]:
        hidden = hidden_state(parameters, inputs, attention, keys, model, layers, dtype)
        table = parameters["tokens" if model.tied_head else "head"]["embedding"]
        by_token = jnp.broadcast_to(weights[:, None], targets.shape).reshape(-1)
        chunks = chunk_count(targets.size, len(table), CHUNK_LOGITS)
        total, nll = cross_entropy(hidden, table, targets.reshape(-1), by_token, vocab, chunks)
        return total[None], nll.reshape(targets.shape).sum(1)

    def losses(
        parameters: Any, inputs: Array, targets: Array, weights: Array, keys: Array | None = None
    ) -> tuple[Array, Array]:
        places = (P(), *[P("data")] * 4)
        # Without check_vma: what a kernel returns does not say along which axes it varies.
        shared = jax.shard_map(own, mesh=mesh, in_specs=places, out_specs=P("data"), check_vma=False)
        compute = own if mesh.size == 1 else shared
        totals, by_row = compute(parameters, inputs, targets, weights, keys)
        return totals.sum(), by_row

    return losses


@jax.custom_vjp
def project(x: Array, kernel: Array, bias: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, each [rows, width], of x [rows, width] by kernel [width, 3, width].

    Three products, because cuDNN's attention takes three dense arrays: a single one would have to be split, and its
    gradient merged, in passes of their own. Only queries get their bias [width] here. That of the keys adds one number
    to all scores of a query, which softmax does not see, so it has no gradient; that of the values is the caller's.
    """
    query, key, value = (x @ kernel[:, i].astype(x.dtype) for i in range(3))
    return query + bias.astype(x.dtype), key, value


def _project_backward(saved: tuple[Array, Array], gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    x, kernel = saved
    exact = jnp.promote_types(x.dtype, jnp.float32)
    parts = [(d @ kernel[:, i].astype(x.dtype).T).astype(exact) for i, d in enumerate(gradients)]
    d_kernel = jnp.stack([(x.T @ d).astype(kernel.dtype) for d in gradients], axis=1)
    return sum(parts[1:], parts[0]).astype(x.dtype), d_kernel, gradients[0].sum(0, dtype=exact)


project.defvjp(lambda x, kernel, bias: (project(x, kernel, bias), (x, kernel)), _project_backward)


def hidden_state(
    parameters: Any,
    ids: Array,
    attention: Attention,
    keys: Array | None,
    model: Model,
    layers: Layers,
    dtype: Any,
) -> Array:
    """model.GPT's final hidden state of ids [rows, time], as [rows · time, width]. `keys` [rows] turn dropout on."""
    rows, time = ids.shape
    width, heads = model.width, model.heads

    def product(x: Array, parameters: Any, inner: int) -> Array:
        return x @ parameters["kernel"].reshape(inner, -1).astype(dtype)

    def bias(parameters: Any, size: int = width) -> Array:
        return parameters["bias"].reshape(-1) if model.bias else jnp.zeros(size)

    def drop(x: Array, site: Array | int) -> Array:
        return dropout(x.reshape(rows, time, width), keys, site, model.dropout).reshape(x.shape)

    def join(stream: Array, update: Array, own_bias: Array, norm: Any, site: Array | int) -> tuple[Array, Array]:
        if keys is not None:  # what is dropped has its bias already
            update, own_bias = drop(update + own_bias.astype(dtype), site), jnp.zeros(width)
        return add_norm(stream, update, own_bias, norm["scale"], bias(norm), model.norm_epsilon)

    @jax.jit  # traced once, and its kernels compiled once, for all layers
    @layers.recomputed
    def block(stream: Array, normed: Array, p: Any, following: Any, layer: Array | int) -> tuple[Array, Array]:
        """The stream after a block, and normed as what follows wants it."""
        biases = bias(p["qkv"], 3 * width).reshape(3, width)
        qkv = project(normed, p["qkv"]["kernel"].reshape(width, 3, width), biases[0])
        mixed = attention(*(x.reshape(rows, time, heads, width // heads) for x in qkv)).reshape(-1, width)
        # Attention's weights sum to 1: the values' bias passes through them, and is added with the output's.
        passed = biases[2] @ p["out"]["kernel"].reshape(width, -1) if model.bias else 0.0
        stream, normed = join(
            stream, product(mixed, p["out"], width), bias(p["out"]) + passed, p["norm2"], 2 * layer + 1
        )
        hidden = bias_gelu(product(normed, p["up"], width), bias(p["up"], 4 * width))  # [rows · time, 4 · width]
        return join(stream, product(hidden, p["down"], 4 * width), bias(p["down"]), following, 2 * layer + 2)

    blocks = unstack(parameters["blocks"], model.layers)
    stream = drop(embed(parameters["tokens"]["embedding"], parameters["positions"]["embedding"], ids, dtype), 0)
    first = blocks[0]["norm1"]
    stream, normed = add_norm(
        stream, jnp.zeros_like(stream), jnp.zeros(width), first["scale"], bias(first), model.norm_epsilon
    )
    for layer, p in enumerate(blocks):
        following = blocks[layer + 1]["norm1"] if layer + 1 < model.layers else parameters["norm"]
        stream, normed = block(stream, normed, p, following, layer)
    return normed
