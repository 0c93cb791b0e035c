"""Causal attention by what the hardware has: cuDNN on NVIDIA, Splash on TPUs, XLA elsewhere."""

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from raygpt.config import Model

Array = jax.Array
Attention = Callable[[Array, Array, Array], Array]  # query, key, value [rows, time, heads, head_dim] to the same shape
KEPT = "attention"  # the name of what a fused kernel's backward pass needs, for jax.checkpoint


def xla(query: Array, key: Array, value: Array) -> Array:
    """As the formula has it, scores and softmax in fp32 at least; XLA fuses what it can."""
    time = query.shape[1]
    return _attend(query, key, value, jnp.tril(jnp.ones((time, time), dtype=bool)))


def _attend(query: Array, key: Array, value: Array, visible: Array) -> Array:
    accurate = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key, preferred_element_type=accurate) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights.astype(value.dtype), value)


def cudnn(query: Array, key: Array, value: Array) -> Array:
    """NVIDIA's fused attention: never stores the scores. bf16 or fp16 only."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def splash(mesh: Mesh, interpret: bool = False) -> Attention:
    """JAX's own TPU kernel: never stores the scores, and leaves out what lies above the diagonal.

    Each device computes its rows and its heads; `interpret` computes it on any device, slowly.
    """
    spec = P(("data", "fsdp"), None, "tensor", None)

    def attention(query: Array, key: Array, value: Array) -> Array:
        _, time, heads, size = query.shape
        kernel = _splash_kernel(time, heads, interpret)
        by_heads = [jnp.swapaxes(x, 1, 2) for x in (query * size**-0.5, key, value)]  # [rows, heads, time, head_dim]
        return jnp.swapaxes(jax.vmap(kernel)(*by_heads), 1, 2)

    # Without check_vma: what the kernel returns does not say along which axes it varies.
    return jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


LANES = 128  # of a TPU's vector unit: the kernel's blocks are multiples
LARGEST_BLOCK = 512  # whose scores, 1 MiB in fp32, fit into a core's fast memory beside the rest


def _splash_kernel(time: int, heads: int, interpret: bool) -> Callable[[Array, Array, Array], Array]:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # slow to import, and only TPUs need it

    block = gcd(time, LARGEST_BLOCK)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([kernels.CausalMask((time, time))] * heads),
        block_sizes=kernels.BlockSizes(**sizes),
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )


class Cache(NamedTuple):
    """Keys and values of the tokens so far: [layers, rows, context, heads, head_dim], or without layers inside one."""

    keys: Array
    values: Array

    def updated(self, keys: Array, values: Array, start: Array) -> "Cache":
        """With those of the tokens from `start` on."""
        place = (0, start, 0, 0)
        return Cache(
            jax.lax.dynamic_update_slice(self.keys, keys, place),
            jax.lax.dynamic_update_slice(self.values, values, place),
        )


def cached(query: Array, keys: Array, values: Array, start: Array) -> Array:
    """Attention of new queries, the first of them at position `start`, to cached keys and values up to their own."""
    own = start + jnp.arange(query.shape[1])[:, None]  # [time, 1]
    return _attend(query, keys, values, jnp.arange(keys.shape[1]) <= own)


def choose_attention(device: Any, dtype: Any, mesh: Mesh, model: Model) -> tuple[Attention, str]:
    """The kernel for a device and a model, and its name. A row shared out over the context axis needs XLA's."""
    if mesh.shape["context"] == 1:
        if device.platform == "gpu" and _cudnn_can(float(device.compute_capability), dtype, model):
            return cudnn, "cuDNN"
        if device.platform == "tpu" and model.context % LANES == 0 and model.heads % mesh.shape["tensor"] == 0:
            return splash(mesh), "Splash"
    return xla, "XLA"


def _cudnn_can(capability: float, dtype: Any, model: Model) -> bool:
    """From Ampere on, in 16 bits, with heads of a multiple of 8 up to 128, on Hopper and later up to 256."""
    size = model.width // model.heads
    fits = size % 8 == 0 and size <= (256 if capability >= 9 else 128)
    return fits and capability >= 8 and dtype in (jnp.bfloat16, jnp.float16)
