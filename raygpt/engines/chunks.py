"""Into how many chunks the tokens of a micro-batch are cut, so that their logits fit.

The logits of 32 rows of GPT-2 are 6.6 GB in fp32: no engine holds those of a whole micro-batch.
"""

CHUNK_BYTES = 2**30  # of fp32 logits at a time, on each device
# Of 16-bit logits that a GPU's kernel turns into their gradient, 2 GiB. Fewer chunks read and write the table's
# gradient less often, 0.07 ms each.
IN_PLACE_LOGITS = 2**30
CACHE_BYTES, CACHE_TOKENS = 2**23, 512  # on a CPU what its caches hold; but products of fewer tokens are slow


def chunk_logits(vocab: int, on_cpu: bool) -> int:
    """The most logits of a chunk: a GiB of them in fp32, or what a CPU's caches hold."""
    room = min(CHUNK_BYTES, max(CACHE_BYTES, CACHE_TOKENS * vocab * 4)) if on_cpu else CHUNK_BYTES
    return room // 4


def chunk_count(tokens: int, vocab: int, limit: int) -> int:
    """How many chunks to cut tokens into: the fewest equal ones of at most `limit` logits."""
    wanted = -(-tokens * vocab // limit)
    return next(count for count in range(min(wanted, tokens), tokens + 1) if tokens % count == 0)
