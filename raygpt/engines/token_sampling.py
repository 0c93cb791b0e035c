"""Draws a token from each row of logits, with the row's own seed, temperature, top-k and top-p; for both engines.

A row's token depends on its logits, its seed and how many tokens its text has, so that no other row matters. `xp` is
numpy, jax.numpy or torch; the noise is the same in all of them, but for the last digits of a logarithm.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from raygpt.models.random_numbers import mix, uniform

LOWEST = -(2**31)  # of int32
Loop = Callable[[int, int, Callable[[Any, Any], Any], Any], Any]  # as jax.lax.fori_loop


def loop(first: int, end: int, body: Callable[[Any, Any], Any], value: Any) -> Any:
    """jax.lax.fori_loop in Python."""
    for n in range(first, end):
        value = body(n, value)
    return value


def draw(logits: Any, bias: Any, rows: Any, xp: Any) -> Any:
    """One id per row of fp32 logits [rows, vocabulary], with the row's bias, whatever its top-k and top-p."""
    return pick(scale(logits, bias, rows.temperatures, xp), rows.top_ks * 0 + LOWEST, rows, xp)


def draw_limited(logits: Any, bias: Any, rows: Any, xp: Any, loop: Loop = loop) -> Any:
    """The same within each row's top-k and top-p."""
    scaled = scale(logits, bias, rows.temperatures, xp)
    smallest = smallest_of_top_k(scaled, rows.top_ks, xp, loop)
    return pick(scaled, smallest_of_top_p(scaled, smallest, rows.top_ps, xp, loop), rows, xp)


def scale(logits: Any, bias: Any, temperatures: Any, xp: Any) -> Any:
    """Logits [rows, vocabulary] with their bias, divided by the temperature; by 1 where that is 0."""
    return (logits + bias) / xp.where(temperatures > 0, temperatures, 1.0)[:, None]


def pick(scaled: Any, smallest: Any, rows: Any, xp: Any) -> Any:
    """One id per row, of those whose rank is at least `smallest` [rows]. Adding Gumbel noise and taking the largest
    samples from the softmax."""
    noisy = xp.where(rows.temperatures[:, None] > 0, scaled + _noise(scaled, rows, xp), scaled)
    return xp.where(rank(scaled, xp) >= smallest[:, None], noisy, -xp.inf).argmax(-1)


def _noise(scaled: Any, rows: Any, xp: Any) -> Any:
    ids = xp.arange(scaled.shape[1], dtype=xp.int32, **({"device": scaled.device} if xp.__name__ == "torch" else {}))
    bits = mix(mix(ids ^ mix(rows.seeds)[:, None]) + mix(rows.counts)[:, None])
    return -xp.log(-xp.log((uniform(bits, xp) + 1) / 2))


def rank(scaled: Any, xp: Any) -> Any:
    """int32 in the order of the floats."""
    bits = scaled.view(xp.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def smallest_of_top_k(scaled: Any, top_ks: Any, xp: Any, loop: Loop = loop) -> Any:
    """The rank of each row's k-th largest number, [rows]; of the smallest where k is 0."""
    ranks, most = rank(scaled, xp), xp.where(top_ks > 0, top_ks, scaled.shape[1])
    return _largest(lambda least: (ranks >= least[:, None]).sum(-1) >= most, top_ks, xp, loop)


def smallest_of_top_p(scaled: Any, smallest: Any, top_ps: Any, xp: Any, loop: Loop = loop) -> Any:
    """The rank of the last of each row's likeliest tokens that together have a share p of the probability, [rows].

    Only tokens whose rank is at least `smallest` count: top-p comes after top-k. At least one token is left, and tokens
    as likely as the last are too.
    """
    ranks = rank(scaled, xp)
    among = ranks >= smallest[:, None]
    highest = xp.amax(scaled, -1)[:, None]
    mass = xp.where(among, xp.exp(scaled - highest), 0.0)
    enough = xp.where(top_ps < 1, top_ps * mass.sum(-1), 0.0)
    found = _largest(lambda least: xp.where(ranks >= least[:, None], mass, 0.0).sum(-1) >= enough, smallest, xp, loop)
    return xp.where(top_ps < 1, xp.maximum(found, smallest), smallest)


def _largest(holds: Callable[[Any], Any], like: Any, xp: Any, loop: Loop) -> Any:
    """The largest int32 of each row for which something holds that holds for all smaller ones: bit by bit."""

    def next_bit(n: Any, found: Any) -> Any:
        tried = found ^ (like * 0 + 1 << (31 - n))
        return xp.where(holds(tried), tried, found)

    return loop(0, 32, next_bit, like * 0 + LOWEST)


def fold_seed(seed: int) -> int:
    """A seed of any size as an int32; small ones stay as they are."""
    low, high = (np.array([seed >> shift & 0xFFFFFFFF], np.uint32).view(np.int32) for shift in (0, 32))
    with np.errstate(over="ignore"):
        return int((mix(low ^ mix(high)) if high[0] else low)[0])
