"""The training loss by fused kernels: model.py's parameters and mathematics, laid out for a GPU.

Between attentions the residual stream is [rows · time, width], and each kernel spans what XLA would compute in several
passes over memory: the end of one half of GPT-2's block (bias, dropped or not, and sum) goes together with the norm
that begins the next. On an H200 a step of GPT-2 124M with 64 × 1024 tokens takes 105 to 110 ms so, and 137 plain.
Models without biases need no sums over rows in the backward pass, and XLA fuses their layers well in this layout.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from raygpt.config import Model
from raygpt.engines import choices
from raygpt.engines.chunks import IN_PLACE_LOGITS, chunk_count
from raygpt.engines.jax.devices import accurate, name_of
from raygpt.engines.jax.embedding import embed, look_up
from raygpt.engines.jax.kernels import add_norm, bias_gelu, cross_entropy, launch, norm_rotate
from raygpt.engines.jax.layers import Array, AttentionInputs, Parameters, Shared, block, dropout, norm, norm_and_rotate
from raygpt.engines.jax.model import LayerCompilation, blocks_of, unstack
from raygpt.engines.jax.rope import Rotation, rotation
from raygpt.engines.jax.step import Forward, Losses
from raygpt.models import value_table_of

Norm = tuple[Array, Array]  # gain and bias


def choose_kernels(device: Any, dtype: Any, mesh: Mesh, model: Model, compilation: LayerCompilation) -> str:
    """`fused` where the kernels can compute and pay, `plain` elsewhere."""
    capability, has_triton = float(getattr(device, "compute_capability", 0)), launch.triton is not None
    precision, scanned = name_of(dtype), compilation.scanned
    return choices.kernels(device.platform, capability, precision, mesh.shape, model, scanned, has_triton)


def make_fused_losses(forward: Forward) -> Losses:
    """What step.make_losses makes, with kernels. Each device computes its own rows; gradients are summed at the end."""
    table_name, mesh = forward.description.output_table, forward.mesh

    def own(parameters: Any, inputs: Array, targets: Array, weights: Array, keys: Array | None) -> tuple[Array, Array]:
        hidden_state = modern_hidden_state if forward.gpt.model.unlike_gpt2 else gpt2_hidden_state
        hidden, table = hidden_state(parameters, inputs, keys, forward), parameters[table_name]
        chunks = chunk_count(targets.size, len(table), IN_PLACE_LOGITS)
        tokens = targets.reshape(-1), weights.reshape(-1)
        total, nll = cross_entropy(hidden, table, *tokens, forward.vocab, chunks, forward.gpt.model.softcap)
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
def project(x: Array, kernels: tuple[Array, Array, Array], bias: Array | None) -> tuple[Array, Array, Array]:
    """Queries, keys and values [rows, …] of x [rows, width] by three kernels [width, …].

    Three products, because cuDNN's attention takes three dense arrays: a single one would have to be split, and its
    gradient merged, in passes of their own. Only queries get their bias here. That of the keys adds one number
    to all scores of a query, which softmax does not see, so it has no gradient; that of the values is the caller's.
    """
    query, key, value = (x @ kernel.astype(x.dtype) for kernel in kernels)
    return query if bias is None else query + bias.astype(x.dtype), key, value


def _project_backward(saved: Any, gradients: tuple[Array, Array, Array]) -> Any:
    x, kernels, bias = saved
    exact = accurate(x.dtype)
    parts = [(d @ kernel.astype(x.dtype).T).astype(exact) for kernel, d in zip(kernels, gradients, strict=True)]
    d_kernels = tuple((x.T @ d).astype(kernel.dtype) for kernel, d in zip(kernels, gradients, strict=True))
    d_bias = gradients[0].sum(0, dtype=exact) if bias is not None else None
    return sum(parts[1:], parts[0]).astype(x.dtype), d_kernels, d_bias


project.defvjp(lambda x, kernels, bias: (project(x, kernels, bias), (x, kernels, bias)), _project_backward)


def modern_hidden_state(parameters: Parameters, ids: Array, keys: Array | None, forward: Forward) -> Array:
    """model.GPT's final hidden state of ids [rows, time], as [rows · time, width], of a model without biases."""
    model, compilation, dtype = forward.gpt.model, forward.gpt.compilation, forward.gpt.dtype

    has_kernel = norm_rotate.can_run(jax.local_devices()[0], dtype, ids.shape[1], model)
    normalise = _norm_and_rotate_by_kernel if has_kernel else norm_and_rotate

    def by_head(own: Parameters, x: Array, model: Model, rotation: Rotation | None) -> AttentionInputs:
        kernels = [own[f"{name}.kernel"] for name in ("query", "key", "value")]  # [width, heads, head]
        made = project(x, tuple(kernel.reshape(model.width, -1) for kernel in kernels), None)
        query, key, value = (y.reshape(*ids.shape, *k.shape[1:]) for y, k in zip(made, kernels, strict=True))
        query = normalise(own, "query_norm", query, model, rotation)
        return query, normalise(own, "key_norm", key, model, rotation), value

    found = {name: look_up(parameters[name], ids, dtype) for name in forward.description.token_tables}
    x = found["tokens"]
    if model.position == "learned":
        x = embed(parameters["tokens"], parameters["positions"], ids, dtype)
    if model.embedding_norm:
        x = norm(parameters, "embedding_norm", x, model)
    x = dropout(x, keys, 0, model.dropout)
    shared = Shared(rotation(model, jnp.arange(ids.shape[1]), dtype), x if model.x0_mixing else None)

    @jax.jit  # traced once for all layers
    @compilation.recomputed
    def compute(x: Array, own: Parameters, value: Array | None, layer: Array | int) -> Array:
        return block(own, x, forward.gpt.attention, model, shared, value, keys, layer, by_head)

    for layer, own in enumerate(unstack(blocks_of(parameters), model.layers)):
        table = value_table_of(model, layer)
        value = None if table is None else parameters["value_gains"][table[1]].astype(dtype) * found[table[0]]
        x = compute(x, own, value, layer)
    return norm(parameters, "norm", x, model)


def _norm_and_rotate_by_kernel(own: Parameters, name: str, x: Array, model: Model, rotation: Rotation | None) -> Array:
    """layers.norm_and_rotate for RMSNorm and RoPE at positions that all rows share."""
    assert rotation is not None
    cos, sin = (angles[:, 0] for angles in rotation)  # [time, head / 2]
    return norm_rotate.norm_rotate(x, cos, sin, own.get(f"{name}.gain"), model.norm_epsilon)


def gpt2_hidden_state(parameters: Parameters, ids: Array, keys: Array | None, forward: Forward) -> Array:
    """model.GPT's final hidden state of ids [rows, time], as [rows · time, width]. `keys` [rows] turn dropout on."""
    model, compilation, dtype = forward.gpt.model, forward.gpt.compilation, forward.gpt.dtype
    (rows, time), width = ids.shape, model.width

    def product(x: Array, own: Parameters, name: str) -> Array:
        return x @ own[f"{name}.kernel"].reshape(x.shape[1], -1).astype(dtype)

    def bias(own: Parameters, name: str, size: int = width) -> Array:
        found = own.get(f"{name}.bias")
        return jnp.zeros(size) if found is None else found.reshape(-1)

    def drop(x: Array, site: Array | int) -> Array:
        return dropout(x, keys, site, model.dropout)

    def join(stream: Array, update: Array, own_bias: Array, norm: Norm, site: Array | int) -> tuple[Array, Array]:
        if keys is not None:  # what is dropped has its bias already
            update, own_bias = drop(update + own_bias.astype(dtype), site), jnp.zeros(width)
        return add_norm(stream, update, own_bias, *norm, model.norm_epsilon)

    def norm_of(own: Parameters, name: str) -> Norm:
        return own[f"{name}.gain"], bias(own, name)

    @jax.jit  # traced once, and its kernels compiled once, for all layers
    @compilation.recomputed
    def block(stream: Array, normed: Array, own: Parameters, following: Norm, layer: Array | int) -> Any:
        """The stream after a block, and normed as what follows wants it."""
        kernels = [own[f"{name}.kernel"] for name in ("query", "key", "value")]  # [width, heads, head]
        qkv = project(normed, tuple(kernel.reshape(width, -1) for kernel in kernels), bias(own, "query"))
        by_head = (x.reshape(rows, time, *kernel.shape[1:]) for x, kernel in zip(qkv, kernels, strict=True))
        mixed = forward.gpt.attention(*by_head).reshape(len(normed), -1)
        # Attention's weights sum to 1: the values' bias passes through them, and is added with the output's.
        passed = bias(own, "value") @ own["out.kernel"].reshape(-1, width) if model.bias else 0.0
        out = product(mixed, own, "out"), bias(own, "out") + passed
        stream, normed = join(stream, *out, norm_of(own, "norm2"), 2 * layer + 1)
        up = product(normed, own, "up")
        hidden = bias_gelu(up, bias(own, "up", up.shape[1]))  # [rows · time, hidden]
        return join(stream, product(hidden, own, "down"), bias(own, "down"), following, 2 * layer + 2)

    blocks = unstack(blocks_of(parameters), model.layers)
    norms = [*(norm_of(own, "norm1") for own in blocks), norm_of(parameters, "norm")]
    stream = drop(embed(parameters["tokens"], parameters["positions"], ids, dtype), 0)
    stream, normed = add_norm(stream, jnp.zeros_like(stream), jnp.zeros(width), *norms[0], model.norm_epsilon)
    for layer, own in enumerate(blocks):
        stream, normed = block(stream, normed, own, norms[layer + 1], layer)
    return normed
