"""Texts generated side by side by JAX: the slots' caches in one array, updated in place; tokens drawn on the device.

A step is two programs, one array to the device and one back, whatever the number of slots. The programs do not depend
on what others ask for: whether a text wants alternatives or a limit like top-p decides which further program runs on
the same logits, and that changes nothing for those who did not ask.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from raygpt.engines import base, token_sampling
from raygpt.engines.base import ALTERNATIVES, Drawn, SlotInputs
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

    def read(self, state: ReaderState, slot: int, ids: NDArray[np.int32], start: int) -> Array:
        hidden, new = self._read_part(state, self._caches, ids, slot, start)
        self._caches = self._write_part(self._caches, new, slot, start)
        return hidden

    def score(self, state: ReaderState, hidden: Array, following: NDArray[np.int32]) -> "Pending":
        logits = self._logits(state, hidden)
        return self._pending(logits, self._known(logits, following), True)

    def begin(self, state: ReaderState, slot: int, hidden: Array, last: int, rows: SlotInputs, top: bool) -> "Pending":
        row = rows.of(slot)
        numbers = self._send(row)
        logits, bias, drawn = self._read_first(state, hidden, last, self._bias, slot, numbers)
        drawn = self._limit(logits, bias, numbers, drawn) if row.limited.any() else drawn
        self._tokens = self._keep_first(self._tokens, drawn, slot)
        return self._pending(logits, drawn, top)

    def step(self, state: ReaderState, rows: SlotInputs, top: bool) -> "Pending":
        numbers = self._send(rows)
        logits, new, drawn = self._read_tokens(state, self._caches, self._tokens, self._bias, numbers)
        drawn = self._limit(logits, self._bias, numbers, drawn) if rows.limited.any() else drawn
        self._caches, self._tokens = self._write_tokens(self._caches, new, self._tokens, drawn, numbers)
        return self._pending(logits, drawn, top)

    def bias(self, slot: int, values: Mapping[int, float]) -> None:
        row = np.zeros(self.reader.vocab, np.float32)
        row[list(values)] = list(values.values())
        self._bias = self._put(self._bias, row[None], slot)

    def fetch(self, drawn: "Pending") -> Drawn:
        numbers, top = jax.device_get(drawn)
        return Drawn(numbers[0], numbers[1].view(np.float32), *(top or (None, None)))

    def _send(self, rows: SlotInputs) -> Array:
        return jax.device_put(rows.packed(), self.reader.device)

    def _pending(self, logits: Array, drawn: Array, top: bool) -> "Pending":
        pending = Pending(drawn, self._top(logits, drawn) if top else None)
        for array in jax.tree.leaves(pending):
            array.copy_to_host_async()
        return pending

    # Programs

    @cached_property
    def _read_tokens(self) -> Any:
        """Separate from writing: in one program, XLA on a CPU would copy the caches before it writes into them."""

        def read(
            state: ReaderState, caches: tuple[Cache, ...], tokens: Array, bias: Array, numbers: Array
        ) -> tuple[Array, New, Array]:
            rows = SlotInputs.unpacked(numbers, jnp.float32)
            hidden, new = self._hidden(state, tokens[:, None], rows.positions, caches)
            logits = self._exact(state, hidden[:, 0])
            return logits, new, _packed(logits, token_sampling.draw(logits, bias, rows, jnp))

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
        def write(
            caches: tuple[Cache, ...], new: New, tokens: Array, drawn: Array, numbers: Array
        ) -> tuple[tuple[Cache, ...], Array]:
            rows, pairs = SlotInputs.unpacked(numbers, jnp.float32), zip(caches, new, strict=True)
            written = tuple(cache.updated(*pair, rows.positions) for cache, pair in pairs)
            return written, jnp.where(rows.live, drawn[0], tokens)

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
    def _read_first(self) -> Any:
        def read(
            state: ReaderState, hidden: Array, last: Array, bias: Array, slot: Array, numbers: Array
        ) -> tuple[Array, Array, Array]:
            one = lambda array, row: jax.lax.dynamic_slice_in_dim(array, row, 1)  # noqa: E731
            logits, own = self._exact(state, one(hidden, last)), one(bias, slot)
            drawn = token_sampling.draw(logits, own, SlotInputs.unpacked(numbers, jnp.float32), jnp)
            return logits, own, _packed(logits, drawn)

        return jax.jit(read)

    @cached_property
    def _limit(self) -> Any:
        def limit(logits: Array, bias: Array, numbers: Array, drawn: Array) -> Array:
            rows = SlotInputs.unpacked(numbers, jnp.float32)
            again = token_sampling.draw_limited(logits, bias, rows, jnp, jax.lax.fori_loop)
            return jnp.where(rows.limited, _packed(logits, again, drawn[2].view(jnp.float32)), drawn)

        return jax.jit(limit)

    @cached_property
    def _logits(self) -> Any:
        return jax.jit(self._exact)

    @cached_property
    def _known(self) -> Any:
        return jax.jit(_packed)

    @cached_property
    def _top(self) -> Any:
        def top(logits: Array, drawn: Array) -> tuple[Array, Array]:
            values, ids = jax.lax.top_k(logits, min(ALTERNATIVES, self.reader.vocab))
            return ids, values - drawn[2].view(jnp.float32)[:, None]

        return jax.jit(top)

    @cached_property
    def _keep_first(self) -> Any:
        return jax.jit(lambda tokens, drawn, slot: jax.lax.dynamic_update_slice(tokens, drawn[0], (slot,)))

    @cached_property
    def _put(self) -> Any:
        return jax.jit(lambda array, row, slot: jax.lax.dynamic_update_slice_in_dim(array, row, slot, 0))

    def _exact(self, state: ReaderState, hidden: Array) -> Array:
        """Logits [rows, vocabulary] in fp32, in which tokens are drawn."""
        return self.reader.logits(state, hidden).astype(jnp.float32)


class Pending(NamedTuple):
    """Results on their way to the host."""

    drawn: Array  # as _packed makes it
    top: tuple[Array, Array] | None  # ids and log-probabilities of alternatives


def _packed(logits: Array, tokens: Array, total: Array | None = None) -> Array:
    """Tokens, their log-probabilities and the logarithm of the sum of all exponentials: int32 [3, rows], fp32 bit for
    bit."""
    total = jax.nn.logsumexp(logits, axis=1) if total is None else total
    logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - total
    return jnp.stack([tokens.astype(jnp.int32), logprobs.view(jnp.int32), total.view(jnp.int32)])


Slots: type[base.Slots] = JaxSlots
