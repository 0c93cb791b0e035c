"""Causal attention by the fastest kernel of the hardware: cuDNN or Triton on NVIDIA, Splash on TPUs, else XLA."""

import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from raygpt.config import Model
from raygpt.engines import choices
from raygpt.engines.jax.devices import accurate, name_of
from raygpt.engines.jax.kernels import launch

Array = jax.Array
# query [rows, time, heads, head], key and value [rows, time, kv_heads, head] to [rows, time, heads, head]
Attention = Callable[[Array, Array, Array], Array]
KEPT = "attention"  # the name of what a fused kernel's backward pass needs, for jax.checkpoint


def xla(query: Array, key: Array, value: Array) -> Array:
    """The plain formula, scores and softmax in fp32 at least; XLA fuses what it can."""
    time = query.shape[1]
    visible = jnp.tril(jnp.ones((time, time), dtype=bool))
    return _attend(query, [_by_heads(key)], [_by_heads(value)], visible)


def _attend(query: Array, keys: Sequence[Array], values: Sequence[Array], visible: Array) -> Array:
    """Keys and values come in parts, each [rows, kv_heads, time, head]; the rest is [rows, time, heads, head]."""
    rows, time, heads, head = query.shape
    groups = heads // keys[0].shape[1]  # heads that share a key: one product, as if they were more queries
    grouped = _by_heads(query).reshape(rows, heads // groups, groups * time, head)
    score = functools.partial(jnp.einsum, "bhqe,bhke->bhqk", preferred_element_type=accurate(query.dtype))
    scores = jnp.concatenate([score(grouped, part) for part in keys], axis=-1) / head**0.5
    scores = scores.reshape(rows, heads, time, -1)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(query.dtype)
    weights = weights.reshape(*grouped.shape[:3], -1)
    parts = jnp.split(weights, np.cumsum([part.shape[2] for part in values])[:-1], axis=-1)
    mixed = [jnp.einsum("bhqk,bhke->bhqe", *part) for part in zip(parts, values, strict=True)]
    return _by_heads(functools.reduce(jnp.add, mixed).reshape(rows, heads, time, head))


def _by_heads(x: Array) -> Array:
    """[rows, heads, time, head] of [rows, time, heads, head], and back."""
    return jnp.swapaxes(x, 1, 2)


def cudnn(query: Array, key: Array, value: Array) -> Array:
    """NVIDIA's fused attention: never stores the scores. bf16 or fp16 only."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def triton(mesh: Mesh, interpret: bool = False) -> Attention:
    """JAX's own kernel for GPUs: slower than cuDNN's, but its sums have a fixed order, so it is deterministic.

    `interpret` computes it on any device, slowly.
    """

    def attention(query: Array, key: Array, value: Array) -> Array:
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

        blocks = BlockSizes(*TRITON_BLOCKS)
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))  # it has no groups
        scale = query.shape[-1] ** -0.5
        return mha(query, key, value, None, scale, causal=True, block_sizes=blocks, interpret=interpret)

    return _on_each(mesh, attention)


# Along queries and keys: forward, for the gradients of keys and values, and for that of queries.
TRITON_BLOCKS = (128, 64, 64, 64, 64, 64)


def splash(mesh: Mesh, interpret: bool = False) -> Attention:
    """JAX's own TPU kernel: never stores the scores, and skips what is above the diagonal.

    Where rows are divided along `context`, a device has the queries of its own tokens, and gathers the keys and values
    of all. `interpret` computes it on any device, slowly.
    """
    spec, shards = P(("data", "fsdp"), "context", "tensor", None), mesh.shape["context"]

    def own(kernel: Any, query: Array, key: Array, value: Array) -> Array:
        rows, time, heads, size = query.shape  # of this device
        query, key, value = (_by_heads(x) for x in (query * size**-0.5, key, value))  # [rows, heads, time, head]
        if shards > 1:
            key, value = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (key, value))
        kv_heads = key.shape[1]
        if kv_heads == heads:
            return _by_heads(jax.vmap(kernel)(query, key, value))
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, time, size)
        return _by_heads(jax.vmap(jax.vmap(kernel))(grouped, key, value).reshape(query.shape))

    if shards > 1:  # all keys and values are gathered again in the backward pass, not kept
        own = jax.checkpoint(own, policy=jax.checkpoint_policies.save_only_these_names(KEPT))

    def attention(query: Array, key: Array, value: Array) -> Array:
        (time, heads), kv_heads = query.shape[1:3], key.shape[2]
        local = heads // mesh.shape["tensor"] if kv_heads == heads else heads // kv_heads
        kernel = _splash_kernel(time, local, shards, kv_heads != heads, interpret)
        masks = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, "context")))
        # Without check_vma: what a kernel returns does not say along which axes it varies.
        shared = jax.shard_map(own, mesh=mesh, in_specs=(masks, spec, spec, spec), out_specs=spec, check_vma=False)
        return shared(kernel, query, key, value)

    return attention


LARGEST_BLOCK = 512  # whose scores, 1 MiB in fp32, fit into a core's fast memory beside the rest


def _splash_kernel(time: int, heads: int, shards: int, shared_key: bool, interpret: bool) -> Any:
    """Of queries [heads, time, head], divided among so many devices, and as many keys and values or one [time, head]
    that all heads share."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # slow to import, and only TPUs need it

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = dict.fromkeys((f"block_{name}" for name in names), gcd(time // shards, LARGEST_BLOCK))
    make = kernels.make_splash_mqa if shared_key else kernels.make_splash_mha
    return make(
        kernels.MultiHeadMask([kernels.CausalMask((time, time), shard_count=shards)] * heads),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )


def _on_each(mesh: Mesh, attention: Attention) -> Attention:
    """Each device computes its rows and its heads."""
    spec = P(("data", "fsdp"), None, "tensor", None)
    # Without check_vma: what a kernel returns does not say along which axes it varies.
    shared = jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def compute(query: Array, key: Array, value: Array) -> Array:
        in_shard_map = jax.sharding.get_abstract_mesh().manual_axes  # already: fused.py has its own
        return (attention if in_shard_map else shared)(query, key, value)

    return compute


class Cache(NamedTuple):
    """Keys and values of the tokens so far: [layers, rows, kv_heads, context, head], or without layers inside one."""

    keys: Array
    values: Array

    def updated(self, keys: Array, values: Array, start: Array) -> "Cache":
        """The cache with tokens [rows, time, kv_heads, head] written from `start` on, one number or one per row."""

        def write(cached: Array, new: Array) -> Array:
            if jnp.ndim(start) == 0:
                return jax.lax.dynamic_update_slice(cached, _by_heads(new), (0, 0, start, 0))
            one = lambda cached, new, start: jax.lax.dynamic_update_slice(cached, new, (0, start, 0))  # noqa: E731
            return jax.vmap(one)(cached, _by_heads(new), start)

        return Cache(write(self.keys, keys), write(self.values, values))

    def attend(self, query: Array, keys: Array, values: Array, start: Array) -> Array:
        """Attention of new tokens, the first of them at position `start`, to those before and to each other.

        The new keys are not read from the updated cache: XLA on a CPU would copy all of it for every token.
        """
        time, context = query.shape[1], self.keys.shape[-2]
        earlier = jnp.arange(context) < jnp.reshape(start, (-1, 1, 1, 1))  # [rows or 1, 1, 1, context]
        causal = jnp.tril(jnp.ones((time, time), dtype=bool))
        shape = (len(earlier), 1, time)
        visible = jnp.concatenate(
            [jnp.broadcast_to(earlier, (*shape, context)), jnp.broadcast_to(causal, (*shape, time))], axis=-1
        )
        return _attend(query, [self.keys, _by_heads(keys)], [self.values, _by_heads(values)], visible)


def choose_attention(
    device: Any, dtype: Any, mesh: Mesh, model: Model, deterministic: bool = False
) -> tuple[Attention, str]:
    """The kernel for a device and a model, and its name."""
    capability, precision = float(getattr(device, "compute_capability", 0)), name_of(dtype)
    has_triton = launch.triton is not None
    name = choices.attention(device.platform, capability, precision, mesh.shape, model, deterministic, has_triton)
    return {"cuDNN": cudnn, "Triton": triton(mesh), "Splash": splash(mesh), "XLA": xla}[name], name
