"""Inference by JAX on one device: log-probabilities of texts, and generation with a cache.

Unlike in the training engine, each layer's parameters and caches are separate arrays: a layer sliced from a stack is
copied for every token, which for GPT-2 on a CPU costs more than the arithmetic.
"""

import contextlib
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from raygpt import config
from raygpt.engines import base
from raygpt.engines.base import Arrays, Positions
from raygpt.engines.jax.attention import Attention, Cache, choose_attention
from raygpt.engines.jax.devices import accurate, dtype_of, precision_on
from raygpt.engines.jax.layers import Array, block, embed, norm, value_embedding
from raygpt.engines.jax.logits import logits
from raygpt.engines.jax.model import blocks_of
from raygpt.engines.jax.parameters import from_plain
from raygpt.engines.jax.sharding import make_mesh
from raygpt.engines.padding import bucket, pad_windows
from raygpt.models import describe


class ReaderState(NamedTuple):
    """The model's parameters on the device."""

    top: dict[str, Array]  # embeddings, the last norm, the head
    blocks: tuple[dict[str, Array], ...]  # of each layer


class JaxReader:
    """Compiled once for each bucket of lengths, and once for a single token."""

    def __init__(self, model: config.Model, vocab: int, *, device: Any = None, precision: str | None = None):
        self.model, self.vocab, self.context = model, vocab, model.context
        self.description = describe(model, vocab)
        self.device = device or jax.local_devices()[0]
        self.precision = precision or precision_on(self.device, model.precision)
        self.dtype = dtype_of(self.precision)
        mesh = make_mesh(config.Mesh().sizes(), [self.device])
        self._attention, _ = choose_attention(self.device, self.dtype, mesh, model)

    def describe(self) -> dict[str, str]:
        """Device and precision, for the console."""
        return {
            "engine": f"jax {jax.__version__}",
            "device": self.device.device_kind,
            "precision": self.precision,
        }

    def load(self, parameters: Arrays) -> ReaderState:
        """The parameters, as `PlainState` has them, on the device. Matrices are rounded once, not for every token."""
        arrays = from_plain(parameters, self.description, accurate(self.dtype))
        stacked = blocks_of(arrays)
        blocks = tuple({name: array[n] for name, array in stacked.items()} for n in range(self.model.layers))
        top = {name: array for name, array in arrays.items() if not name.startswith("blocks.")}
        rounded = jax.tree.map(lambda a: a.astype(self.dtype) if a.ndim > 1 else a, ReaderState(top, blocks))
        return jax.device_put(rounded, self.device)

    def prefill(self, state: ReaderState, ids: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read prompts [rows, time], padded to a bucket. Padding is overwritten before it is read."""
        rows, time = ids.shape
        padded = np.zeros((rows, bucket(time, self.context)), dtype=np.int32)
        padded[:, :time] = ids
        layers, *shape = self.cache_shape(rows)
        empty = lambda: jnp.zeros(shape, self.dtype, device=self.device)  # noqa: E731
        return self._read(state, padded, 0, time - 1, tuple(Cache(empty(), empty()) for _ in range(layers)))

    def decode(
        self, state: ReaderState, ids: NDArray[np.int32], start: Positions, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read one id per row, [rows, 1], after `start` earlier ones."""
        return self._read(state, ids, start, ids.shape[1] - 1, cache)

    def _read(self, state: ReaderState, ids: NDArray[np.int32], start: Positions, last: int, caches: Any) -> Any:
        """Two programs: in one, XLA on a CPU would copy the caches before it writes into what it also reads."""
        scores, new = self._extend(state, ids, start, last, caches)
        return np.asarray(scores), self._write(caches, new, start)

    def token_logprobs(
        self, state: ReaderState, windows: NDArray[np.int32]
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        rows, time = len(windows), windows.shape[1] - 1
        padded = pad_windows(windows, self.context)
        both = self._token_logprobs(state, padded[:, :-1], padded[:, 1:])
        logprobs, hits = (np.asarray(part)[:rows, :time] for part in both)
        return logprobs, hits

    @cached_property
    def _extend(self) -> Any:
        def extend(
            parameters: ReaderState, ids: Array, start: Array, last: Array, caches: tuple[Cache, ...]
        ) -> tuple[Array, list[tuple[Array, Array]]]:
            new = []

            def attend(layer: int) -> Attention:
                def attention(query: Array, key: Array, value: Array) -> Array:
                    new.append((key, value))
                    return caches[layer].attend(query, key, value, start)

                return attention

            hidden = self.hidden(parameters, ids, start, [attend(layer) for layer in range(self.model.layers)])
            one = jax.lax.dynamic_index_in_dim(hidden, last, axis=1, keepdims=False)  # [rows, width]
            return self.logits(parameters, one), new

        return jax.jit(extend)

    @cached_property
    def _write(self) -> Any:
        def write(caches: tuple[Cache, ...], new: list[tuple[Array, Array]], start: Array) -> tuple[Cache, ...]:
            return tuple(cache.updated(*pair, start) for cache, pair in zip(caches, new, strict=True))

        return jax.jit(write, donate_argnums=0)

    @cached_property
    def _token_logprobs(self) -> Any:
        def token_logprobs(parameters: ReaderState, inputs: Array, targets: Array) -> tuple[Array, Array]:
            hidden = self.hidden(parameters, inputs, 0, [self._attention] * self.model.layers)

            def row(part: tuple[Array, Array]) -> tuple[Array, Array]:  # one at a time: GPT-2's logits are 200 MB each
                scores = self.logits(parameters, part[0])  # [time, vocabulary]
                picked = jnp.take_along_axis(scores, part[1][:, None], axis=1)[:, 0]
                return picked - jax.nn.logsumexp(scores, axis=1), scores.argmax(1) == part[1]

            return jax.lax.map(row, (hidden, targets))

        return jax.jit(token_logprobs)

    def cache_shape(self, rows: int) -> tuple[int, ...]:
        """Of the keys, and of the values: [layers, rows, kv_heads, context, head_size]."""
        return self.description.cache_shape(rows)

    def hidden(self, parameters: ReaderState, ids: Array, start: Any, attentions: list[Attention]) -> Array:
        """The last hidden states [rows, time, width] of ids that follow `start` earlier ones."""
        top, model = parameters.top, self.model
        with self._arithmetic():
            x, shared = embed(top, ids, start, model, self.dtype)
            for layer, (own, attention) in enumerate(zip(parameters.blocks, attentions, strict=True)):
                x = block(own, x, attention, model, shared, value_embedding(top, ids, layer, model, self.dtype))
            return norm(top, "norm", x, model)

    def logits(self, parameters: ReaderState, hidden: Array) -> Array:
        """[rows, vocabulary] of hidden states [rows, width], without the vocabulary's padding."""
        table = parameters.top[self.description.output_table]
        with self._arithmetic():
            return logits(hidden, table, self.model.softcap)[:, : self.vocab]

    def _arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """fp32 is fp32, where XLA on a GPU would compute matrix products in TF32, whose log-probabilities differ in the
        third digit."""
        return jax.default_matmul_precision("highest") if self.precision == "fp32" else contextlib.nullcontext()


Reader: type[base.Reader] = JaxReader
