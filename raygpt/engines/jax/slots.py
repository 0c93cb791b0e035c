"""Texts generated side by side by JAX: the slots' caches in one array, updated in place; tokens drawn on the device.

The programs do not depend on what others ask for: whether a text wants alternatives or top-p decides which further
program runs on the same logits, not how the token is computed.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from raygpt.engines import base, drawing
from raygpt.engines.base import ALTERNATIVES, Drawn, Rows
from raygpt.engines.jax.attention import Attention, Cache
from raygpt.engines.jax.layers import Array
from raygpt.engines.jax.reader import JaxReader, ReaderState

New = list[tuple[Array, Array]]  # keys and values of each layer


class JaxSlots:
    """A program for a step of all slots, one for a part of a prompt, and some for what is made of logits."""

    def __init__(self, reader: JaxReader, count: int):
        self.reader, self.count = reader, count
        self.part = min(base.PART["cpu" if reader.device.platform == "cpu" else "gpu"], reader.context)
        layers, *shape = reader.cache_shape(count)
        zeros = lambda *shape, dtype: jnp.zeros(shape, dtype, device=reader.device)  # noqa: E731
        empty = lambda: zeros(*shape, dtype=reader.dtype)  # noqa: E731
        self._caches = tuple(Cache(empty(), empty()) for _ in range(layers))
        self._tokens = zeros(count, dtype=jnp.int32)  # the last one of each slot, which the next step reads
        self._bias = zeros(count, reader.vocab, dtype=jnp.float32)
        self._all = {rows: zeros(rows, dtype=jnp.int32) + drawing.LOWEST for rows in (1, count)}

    def read(self, state: ReaderState, slot: int, ids: NDArray[np.int32], start: int) -> Array:
        hidden, new = self._read_part(state, self._caches, ids, slot, start)
        self._caches = self._write_part(self._caches, new, slot, start)
        return hidden

    def score(self, state: ReaderState, hidden: Array, following: NDArray[np.int32]) -> Drawn:
        return self._known(self._logits(state, hidden), jnp.asarray(following), True)

    def begin(self, state: ReaderState, slot: int, hidden: Array, last: int, rows: Rows, top: bool) -> Drawn:
        logits, row = self._logits(state, self._take(hidden, last)), rows.of(slot)
        drawn = self._pick(self._scaled(logits, self._take(self._bias, slot), row.temperatures), row)
        self._tokens = self._put(self._tokens, drawn, slot)
        return self._known(logits, drawn, top)

    def step(self, state: ReaderState, rows: Rows, top: bool) -> Drawn:
        logits, new = self._read_tokens(state, self._caches, self._tokens, rows.positions)
        self._caches = self._write_tokens(self._caches, new, rows.positions)
        drawn = self._pick(self._scaled(logits, self._bias, rows.temperatures), rows)
        self._tokens = self._where(rows.live, drawn, self._tokens)
        return self._known(logits, drawn, top)

    def bias(self, slot: int, values: Mapping[int, float]) -> None:
        row = np.zeros(self.reader.vocab, np.float32)
        row[list(values)] = list(values.values())
        self._bias = self._put(self._bias, row[None], slot)

    def fetch(self, drawn: Drawn) -> Drawn:
        return Drawn(*jax.device_get(tuple(drawn)))

    def _pick(self, scaled: Array, rows: Rows) -> Array:
        smallest = self._all[len(scaled)]
        if rows.top_ks.any():
            smallest = self._smallest_of_top_k(scaled, rows.top_ks)
        if (rows.top_ps < 1).any():
            smallest = self._smallest_of_top_p(scaled, smallest, rows.top_ps)
        return self._picked(scaled, smallest, rows)

    def _known(self, logits: Array, drawn: Array, top: bool) -> Drawn:
        found = Drawn(drawn, self._logprobs(logits, drawn), *(self._top(logits) if top else (None, None)))
        for array in found:
            if array is not None:
                array.copy_to_host_async()
        return found

    # Programs

    @cached_property
    def _read_tokens(self) -> Any:
        """Separate from writing: in one program, XLA on a CPU would copy the caches before it writes into them."""

        def read(state: ReaderState, caches: tuple[Cache, ...], tokens: Array, positions: Array) -> tuple[Array, New]:
            hidden, new = self._hidden(state, tokens[:, None], positions, caches)
            return self.reader.logits(state, hidden[:, 0]), new

        return jax.jit(read)

    @cached_property
    def _read_part(self) -> Any:
        def read(
            state: ReaderState, caches: tuple[Cache, ...], ids: Array, slot: Array, start: Array
        ) -> tuple[Array, New]:
            own = tuple(Cache(*(jax.lax.dynamic_slice_in_dim(a, slot, 1) for a in cache)) for cache in caches)
            hidden, new = self._hidden(state, ids[None], start, own)
            return hidden[0], new

        return jax.jit(read)

    def _hidden(self, state: ReaderState, ids: Array, start: Array, caches: tuple[Cache, ...]) -> tuple[Array, New]:
        new: New = []

        def attention(cache: Cache) -> Attention:
            def attend(query: Array, key: Array, value: Array) -> Array:
                new.append((key, value))
                return cache.attend(query, key, value, start)

            return attend

        return self.reader.hidden(state, ids, start, [attention(cache) for cache in caches]), new

    @cached_property
    def _write_tokens(self) -> Any:
        def write(caches: tuple[Cache, ...], new: New, positions: Array) -> tuple[Cache, ...]:
            return tuple(cache.updated(*pair, positions) for cache, pair in zip(caches, new, strict=True))

        return jax.jit(write, donate_argnums=0)

    @cached_property
    def _write_part(self) -> Any:
        def put(cached: Array, new: Array, slot: Array, start: Array) -> Array:  # new [1, part, kv_heads, head]
            return jax.lax.dynamic_update_slice(cached, jnp.swapaxes(new, 1, 2), (slot, 0, start, 0))

        def write(caches: tuple[Cache, ...], new: New, slot: Array, start: Array) -> tuple[Cache, ...]:
            pairs = zip(caches, new, strict=True)
            return tuple(
                Cache(*(put(old, array, slot, start) for old, array in zip(cache, pair, strict=True)))
                for cache, pair in pairs
            )

        return jax.jit(write, donate_argnums=0)

    @cached_property
    def _logits(self) -> Any:
        return jax.jit(self.reader.logits)

    @cached_property
    def _scaled(self) -> Any:
        return jax.jit(lambda logits, bias, heat: drawing.scale(logits.astype(jnp.float32), bias, heat, jnp))

    @cached_property
    def _smallest_of_top_k(self) -> Any:
        return jax.jit(lambda scaled, ks: drawing.smallest_of_top_k(scaled, ks, jnp, jax.lax.fori_loop))

    @cached_property
    def _smallest_of_top_p(self) -> Any:
        return jax.jit(lambda scaled, least, ps: drawing.smallest_of_top_p(scaled, least, ps, jnp, jax.lax.fori_loop))

    @cached_property
    def _picked(self) -> Any:
        return jax.jit(lambda scaled, least, rows: drawing.pick(scaled, least, rows, jnp).astype(jnp.int32))

    @cached_property
    def _logprobs(self) -> Any:
        def logprobs(logits: Array, tokens: Array) -> Array:
            return jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)

        return jax.jit(logprobs)

    @cached_property
    def _top(self) -> Any:
        def top(logits: Array) -> tuple[Array, Array]:
            values, ids = jax.lax.top_k(logits, min(ALTERNATIVES, self.reader.vocab))
            return ids, values - jax.nn.logsumexp(logits, axis=1)[:, None]

        return jax.jit(top)

    @cached_property
    def _where(self) -> Any:
        return jax.jit(jnp.where)

    @cached_property
    def _take(self) -> Any:
        return jax.jit(lambda array, row: jax.lax.dynamic_slice_in_dim(array, row, 1))

    @cached_property
    def _put(self) -> Any:
        return jax.jit(lambda array, row, slot: jax.lax.dynamic_update_slice_in_dim(array, row, slot, 0))


Slots: type[base.Slots] = JaxSlots
