"""Memory while a corpus is tokenised and read at once: does it grow with the corpus?

    python benchmarks/streaming.py                     # 128, 512 and 1,536 MB of text; Ray's object store has 80 MB
    python benchmarks/streaming.py --megabytes 64 4096

The text is Python's standard library, over and over, in files of 16 MB. Ray Data tokenises it by bytes while a reader
in a training worker's place, with the same feed but no model, asks for every batch. Each size runs in a process of its
own, which is looked at twice a second with all its descendants.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from rich.console import Console
from rich.table import Table

from raygpt.corpus.feed import Feed
from raygpt.corpus.growing import GrowingStore
from raygpt.corpus.prepare import Background, Job
from raygpt.corpus.sources import resolve
from raygpt.host import cores

STORE = 80_000_000  # bytes of shared memory for Ray's objects: about the least that Ray takes
FILE = 16_000_000
ROWS, CONTEXT = 64, 1024
KINDS = {"ray::Reader": "reader", "ray::": "tasks"}  # by a process's title


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[128, 512, 1536], help="text of each run")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # the part that runs in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(stream(arguments.one)))
        return
    figures = {"object_store_mb": STORE / 1e6, "runs": [_apart(size) for size in arguments.megabytes]}
    Console().print(_table(figures["runs"]))
    print(f"written to {record.save('streaming', figures).relative_to(Path.cwd())}")


def _apart(megabytes: int) -> dict[str, Any]:
    """One size in a process of its own: memory that Python once had it keeps."""
    command = [sys.executable, __file__, "--one", str(megabytes)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table("peak, MB", *(f"{run['text_mb']:.0f} MB of text" for run in runs))
    for row in runs[0]["peak_mb"]:
        table.add_row(row, *(f"{run['peak_mb'][row]:.0f}" for run in runs))
    return table


def stream(megabytes: int) -> dict[str, Any]:
    """Peaks of memory while so much text is tokenised and read."""
    import ray

    with tempfile.TemporaryDirectory() as folder:
        size = write_text(Path(folder, "texts"), megabytes * 1_000_000)
        Path(folder, "val.txt").write_text("a text to validate on\n" * 100)
        job = Job(resolve(f"{folder}/texts"), "bytes", resolve(f"{folder}/val.txt"))
        quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
        ray.init(address="local", num_cpus=cores() + 1, object_store_memory=STORE, **quiet)
        with watched() as peaks:
            started = time.monotonic()
            background = Background(job, f"{folder}/store", cpus=cores())
            batches, first, last = ray.get(ray.remote(Reader).remote().read.remote(f"{folder}/store", size))
            background.stop()
    return {
        "text_mb": size / 1e6,
        "batches": batches,
        "first_batch_s": round(first - started, 1),
        "last_batch_s": round(last - started, 1),
        "peak_mb": {kind: round(size / 1e6, 1) for kind, size in peaks.items()},
    }


class Reader:
    """In a training worker's place: it asks for batch after batch while the store grows."""

    def read(self, folder: str, tokens: int) -> tuple[int, float, float]:
        """How many batches of so many tokens there were, and when the first and the last came."""
        feed = Feed([GrowingStore(folder).train], context=CONTEXT, batch_rows=ROWS, order="sequential")
        batches = tokens // (ROWS * CONTEXT)
        feed.rows(0)
        first = time.monotonic()
        for batch in range(1, batches):
            feed.rows(batch)
        return batches, first, time.monotonic()


def write_text(folder: Path, size: int) -> int:
    """Files of FILE bytes, and how many bytes there are; with tokenizer `bytes`, so many tokens at least."""
    folder.mkdir()
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in library).decode("utf-8", "ignore").encode()
    for number in range(size // FILE):
        start = number * 7919 % len(text)  # no two files are the same
        copies = -(-FILE // len(text)) + 1
        (folder / f"{number:04d}.txt").write_bytes((text * copies)[start : start + FILE])
    return size // FILE * FILE


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Peaks in bytes, complete when the block ends. Memory is what no one else has and the system cannot take back."""
    peaks: dict[str, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for kind, size in look().items():
                peaks[kind] = max(peaks.get(kind, 0), size)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def look() -> dict[str, int]:
    """Bytes by kind, now."""
    import psutil
    import ray
    from ray._private.internal_api import node_stats

    now = dict.fromkeys(("driver", "reader", "tasks", "ray itself", "mapped by the reader"), 0)
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            title = " ".join(process.cmdline())
            kind = next((KINDS[part] for part in KINDS if title.startswith(part)), "ray itself")
            kind = "driver" if process == this else kind
            memory = _memory(process.pid)
            now[kind] += memory["RssAnon"]
            now["mapped by the reader"] += memory["RssFile"] if kind == "reader" else 0
    (node,) = ray.nodes()
    objects = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    return {**now, "object store": objects.object_store_bytes_used, "spilled in all": objects.spilled_bytes_total}


def _memory(pid: int) -> dict[str, int]:
    """Of a process, in bytes, as Linux counts it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines) if "Rss" in key
    }


if __name__ == "__main__":
    main()
