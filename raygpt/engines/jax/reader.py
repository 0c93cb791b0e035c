"""A trained model read by JAX on one device: texts scored, and written on through a cache.

Unlike the training engine's, the layers' parameters and caches are arrays of their own: a layer cut out of a stack is
copied for every token, which for GPT-2 on a CPU costs more than the arithmetic.
"""

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from raygpt import config
from raygpt.engines.base import Arrays, bucket, fill
from raygpt.engines.jax.attention import Attention, Cache, choose_attention
from raygpt.engines.jax.engine import DTYPES, choose_precision
from raygpt.engines.jax.model import GPT, Block
from raygpt.engines.jax.names import from_hugging_face
from raygpt.engines.jax.sharding import make_mesh

Array = jax.Array


class Parameters(NamedTuple):
    """The model's, on the device."""

    tokens: Array  # [padded vocabulary, width]
    positions: Array
    blocks: tuple[Any, ...]  # a tree for each layer
    norm: Any
    head: Array  # the tokens' where it is tied


class JaxReader:
    """Compiled once for each bucket of lengths, and once for a single token."""

    def __init__(self, model: config.Model, vocab: int, *, device: Any = None, precision: str | None = None):
        self.model, self.vocab, self.context = model, vocab, model.context
        self._device = device or jax.local_devices()[0]
        self.precision = precision or choose_precision(model.precision, self._device)
        self._dtype = DTYPES[self.precision]
        self._param_dtype = jnp.promote_types(self._dtype, jnp.float32)
        mesh = make_mesh(config.Mesh().sizes(), [self._device])
        self._attention, _ = choose_attention(self._device, self._dtype, mesh, model)

    def describe(self) -> dict[str, str]:
        """Device and precision, for people."""
        return {
            "engine": f"jax {jax.__version__}",
            "device": self._device.device_kind,
            "precision": self.precision,
        }

    def load(self, parameters: Arrays) -> Parameters:
        """The parameters, under Hugging Face's names, on the device."""
        kinds = {"dtype": self._dtype, "param_dtype": self._param_dtype}
        gpt = nnx.eval_shape(lambda: GPT(self.model, self.vocab, rngs=nnx.Rngs(0), **kinds))
        like = nnx.to_pure_dict(nnx.split(gpt)[1])
        ours = from_hugging_face(parameters, like, self.model, self.vocab)
        blocks = tuple(jax.tree.map(lambda leaf: leaf[n], ours["blocks"]) for n in range(self.model.layers))  # noqa: B023
        tokens, positions = (ours[name]["embedding"] for name in ("tokens", "positions"))
        tokens = jax.device_put(tokens, self._device)
        head = tokens if self.model.tied_head else jax.device_put(ours["head"]["embedding"], self._device)
        positions, blocks, norm = jax.device_put((positions, blocks, ours["norm"]), self._device)
        return Parameters(tokens, positions, blocks, norm, head)

    def prefill(self, state: Parameters, ids: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read prompts [rows, time], filled up to a bucket. What fills up is overwritten before it is looked at."""
        rows, time = ids.shape
        filled = np.zeros((rows, bucket(time, self.context)), dtype=np.int32)
        filled[:, :time] = ids
        shape = (rows, self.model.heads, self.context, self.model.width // self.model.heads)
        empty = lambda: jnp.zeros(shape, self._dtype, device=self._device)  # noqa: E731
        caches = tuple(Cache(empty(), empty()) for _ in range(self.model.layers))
        return self._read(state, filled, 0, time - 1, caches)

    def decode(
        self, state: Parameters, ids: NDArray[np.int32], start: int, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read one id a row, [rows, 1], after `start` earlier ones."""
        return self._read(state, ids, start, ids.shape[1] - 1, cache)

    def _read(self, state: Parameters, ids: NDArray[np.int32], start: int, last: int, caches: Any) -> Any:
        """Two programs: in one, XLA on a CPU would copy the caches before it writes into what it also reads."""
        logits, new = self._extend(state, ids, start, last, caches)
        return np.asarray(logits), self._write(caches, new, start)

    def grade(
        self, state: Parameters, windows: NDArray[np.int32]
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        rows, time = len(windows), windows.shape[1] - 1
        filled = fill(windows, self.context)
        graded = self._grade(state, filled[:, :-1], filled[:, 1:])
        logs, hits = (np.asarray(part)[:rows, :time] for part in graded)
        return logs, hits

    @cached_property
    def _extend(self) -> Any:
        def extend(
            parameters: Parameters, ids: Array, start: Array, last: Array, caches: tuple[Cache, ...]
        ) -> tuple[Array, list[tuple[Array, Array]]]:
            new = []

            def attend(layer: int) -> Attention:
                def attention(query: Array, key: Array, value: Array) -> Array:
                    new.append((key, value))
                    return caches[layer].attend(query, key, value, start)

                return attention

            hidden = self._hidden(parameters, ids, start, [attend(layer) for layer in range(self.model.layers)])
            one = jax.lax.dynamic_index_in_dim(hidden, last, axis=1, keepdims=False)  # [rows, width]
            return self._logits(parameters, one)[:, : self.vocab], new

        return jax.jit(extend)

    @cached_property
    def _write(self) -> Any:
        def write(caches: tuple[Cache, ...], new: list[tuple[Array, Array]], start: Array) -> tuple[Cache, ...]:
            return tuple(cache.updated(*pair, start) for cache, pair in zip(caches, new, strict=True))

        return jax.jit(write, donate_argnums=0)

    @cached_property
    def _grade(self) -> Any:
        def grade(parameters: Parameters, inputs: Array, targets: Array) -> tuple[Array, Array]:
            hidden = self._hidden(parameters, inputs, 0, [self._attention] * self.model.layers)

            def row(part: tuple[Array, Array]) -> tuple[Array, Array]:  # one at a time: GPT-2's logits are 200 MB each
                logits = self._logits(parameters, part[0])[:, : self.vocab]  # [time, vocabulary]
                picked = jnp.take_along_axis(logits, part[1][:, None], axis=1)[:, 0]
                return picked - jax.nn.logsumexp(logits, axis=1), logits.argmax(1) == part[1]

            return jax.lax.map(row, (hidden, targets))

        return jax.jit(grade)

    def _hidden(self, parameters: Parameters, ids: Array, start: Any, attentions: list[Attention]) -> Array:
        places = start + jnp.arange(ids.shape[1])
        x = parameters.tokens.astype(self._dtype)[ids] + parameters.positions.astype(self._dtype)[places]
        for block, attention in zip(parameters.blocks, attentions, strict=True):
            x = nnx.merge(self._graphs[0], block)(x, attention, None, 0, 0.0)
        return nnx.merge(self._graphs[1], parameters.norm)(x)

    def _logits(self, parameters: Parameters, hidden: Array) -> Array:
        """fp32 at least; ids that only pad the table are in it still."""
        head = parameters.head.astype(hidden.dtype)
        return jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=self._param_dtype)

    @cached_property
    def _graphs(self) -> tuple[Any, Any]:
        """How a block and the last norm compute, without their parameters."""
        model, kinds = self.model, {"dtype": self._dtype, "param_dtype": self._param_dtype}
        block = nnx.eval_shape(lambda: Block(model, rngs=nnx.Rngs(0), **kinds))
        settings = {"epsilon": model.norm_epsilon, "use_bias": model.bias, "use_fast_variance": False, **kinds}
        norm = nnx.eval_shape(lambda: nnx.LayerNorm(model.width, rngs=nnx.Rngs(0), **settings))
        return nnx.split(block)[0], nnx.split(norm)[0]


Reader = JaxReader
