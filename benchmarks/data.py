"""The data layer's speed: prepare beside raw tiktoken, rows read per second, a store of 9 billion tokens.

    python benchmarks/data.py TEXT       # 50 MB or more; results/data.json is of 96 MB of Wikipedia's articles

Each figure is the best of three: other processes only ever make it slower. Ray's start is not counted, nor that of
its worker processes: a small prepare goes before.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from rich.console import Console
from rich.table import Table

from raygpt.cluster import connected
from raygpt.corpus.documents import DocumentReader
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.prepare import prepare
from raygpt.corpus.shards import HEADER_BYTES, Header
from raygpt.corpus.sources import resolve
from raygpt.corpus.store import open_store
from raygpt.corpus.tokenizers import Gpt2

CONTEXT = 1024
SPARSE_TOKENS, SPARSE_SHARDS = 9_000_000_000, 90


def main() -> None:
    arguments = _arguments()
    if arguments.sparse:
        print(open_sparse(arguments.source))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = {**tokenising(arguments.source, Path(folder)), **reading(Path(folder)), **sparse(Path(folder))}
    table = Table("figure", "measured", "bar")
    for label, value, bar in _rows(figures):
        table.add_row(label, value, bar)
    Console().print(table)
    print(f"written to {record.save('data', figures).relative_to(Path.cwd())}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="TEXT", help="text to prepare, 50 MB or more")
    parser.add_argument(
        "--sparse", action="store_true", help=argparse.SUPPRESS
    )  # the part that runs in a process of its own
    return parser.parse_args()


def best_of(times: int, work: Callable[[], Any]) -> float:
    """The shortest of several runs, in seconds."""
    durations = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return min(durations)


def tokenising(source: str, folder: Path) -> dict[str, Any]:
    """prepare with GPT-2's BPE, and tiktoken alone on the same documents with as many threads as Ray has CPUs."""
    import tiktoken

    threads = os.cpu_count() or 1
    resolved = resolve(source)
    texts = [piece.text for piece in DocumentReader(resolved, resolved.files).pieces()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    encoding = tiktoken.Encoding(**_tiktoken_parts())
    rounds = []
    with connected():
        (folder / "small.txt").write_text("\n<|endoftext|>\n".join(texts[:2000]))
        prepare(str(folder / "small.txt"), str(folder / "small"), "gpt2")
        for _ in range(4):  # in turns: what else the machine does meets both
            tiktoken_s = best_of(1, lambda: encoding.encode_ordinary_batch(texts, num_threads=threads))
            rounds.append((tiktoken_s, best_of(1, lambda: _prepare_afresh(source, folder / "store"))))
    raw, ours = min(first for first, _ in rounds), min(second for _, second in rounds)
    return {
        "text_mb": megabytes,
        "threads": threads,
        "tiktoken_mb_per_s": megabytes / raw,
        "prepare_mb_per_s": megabytes / ours,
        "prepare_over_tiktoken": raw / ours,
        "rounds_s": [[round(seconds, 2) for seconds in pair] for pair in rounds],
    }


def _tiktoken_parts() -> dict[str, Any]:
    """tiktoken's own GPT-2 encoding, from whichever files are at hand."""
    from raygpt.corpus.tokenizers import END_OF_TEXT, GPT2_PATTERN

    ranks = Gpt2.from_files().ranks
    return {
        "name": "gpt2",
        "pat_str": GPT2_PATTERN,
        "mergeable_ranks": ranks,
        "special_tokens": {END_OF_TEXT: Gpt2.end_of_text},
    }


def _prepare_afresh(source: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    prepare(source, str(folder), "gpt2")


def reading(folder: Path) -> dict[str, Any]:
    """Shuffled rows from the store that was just made, one thread."""
    feed = Feed([open_store(str(folder / "store")).train], context=CONTEXT, batch_rows=64, order="shuffled", seed=1)
    batches = 100

    def read() -> None:
        for batch in range(batches):
            feed.rows(batch)

    return {"read_tokens_per_s": batches * 64 * CONTEXT / best_of(3, read)}


def sparse(folder: Path) -> dict[str, Any]:
    """Open a store of 9 billion tokens and read batch 1,000,000, in a fresh process whose memory is watched."""
    store = folder / "sparse"
    store.mkdir()
    header = Header(np.dtype("<u2"), SPARSE_TOKENS // SPARSE_SHARDS, "0" * 16)
    extents = tuple(Extent(f"train-{n:05d}-00000.tokens", 0, header.tokens) for n in range(SPARSE_SHARDS))
    for extent in extents:
        with (store / extent.shard).open("wb") as file:
            file.write(header.pack())
            file.truncate(HEADER_BYTES + 2 * header.tokens)  # a hole: no disk is used
    index = Index("0" * 16, "sparse", "0" * 16, 50257, 50256, "<u2", 0, 0, extents, ())
    index.write(str(store))
    output = subprocess.run(
        [sys.executable, __file__, str(store), "--sparse"], check=True, capture_output=True, text=True
    )
    seconds, megabytes = (float(word) for word in output.stdout.split())
    return {"sparse_tokens": SPARSE_TOKENS, "sparse_open_and_read_s": seconds, "sparse_extra_mb": megabytes}


def open_sparse(folder: str) -> str:
    """Seconds and megabytes of additional memory for opening the store and reading a batch."""
    before = _resident_mb()
    started = time.perf_counter()
    feed = Feed([open_store(folder).train], context=CONTEXT, batch_rows=512, order="shuffled", seed=1)
    rows = feed.rows(1_000_000)
    seconds = time.perf_counter() - started
    assert rows.shape == (512, CONTEXT + 1)
    return f"{seconds:.4f} {_resident_mb() - before:.1f}"


def _resident_mb() -> float:
    """Memory of this process now, mapped pages that were touched included (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def _rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    f = figures
    return [
        (f"tiktoken, {f['threads']} threads, {f['text_mb']:.0f} MB of text", f"{f['tiktoken_mb_per_s']:.1f} MB/s", ""),
        ("prepare, Ray Data", f"{f['prepare_mb_per_s']:.1f} MB/s", ""),
        ("prepare / tiktoken", f"{f['prepare_over_tiktoken']:.2f}", "≥ 0.8"),
        (f"rows read, context {CONTEXT}, one core", f"{f['read_tokens_per_s'] / 1e6:.0f} M tokens/s", "≥ 5 M"),
        ("9 billion tokens: open, read batch 1,000,000", f"{f['sparse_open_and_read_s']:.3f} s", "< 0.5 s"),
        ("… additional memory", f"{f['sparse_extra_mb']:.0f} MB", "< 100 MB"),
    ]


if __name__ == "__main__":
    main()
