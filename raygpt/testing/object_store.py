"""An object store on loopback, with a token store of any size that exists as arithmetic only, and with faults.

    python -m raygpt.testing.object_store --shards 1000000 --latency 0.05

It speaks as much of S3 as Arrow's client needs to read. The bytes of any range are generated when they are requested;
index and shards are what `raygpt prepare` would write.
"""

import argparse
import contextlib
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from raygpt.corpus import tokenizers
from raygpt.corpus.blocks import BLOCK
from raygpt.corpus.extents import Buckets
from raygpt.corpus.index import Index
from raygpt.corpus.permutation import keyed
from raygpt.corpus.shards import SCATTERED, Header, Ids

NO_FILES = (
    b'<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>'
)
PER_BLOCK = BLOCK // 2  # tokens
CHUNK = 64 * 2**10  # bytes that are sent at once

Fault = Callable[[int, str], str | None]  # (number of the request, file) to: fail, hang, short, wrong; None is no fault


class ArithmeticStore:
    """A scattered store of uint16 ids; token i of a shard is a function of (shard, i)."""

    def __init__(self, shards: int, tokens: int, vocab: int = 257, seed: int = 0):
        spread = np.random.default_rng(seed).integers(-tokens // 20, tokens // 20 + 1, shards)
        self.counts, self.vocab = tokens + spread, vocab
        self.tokenizer = tokenizers.Bytes()
        self._fingerprint = tokenizers.fingerprint(self.tokenizer)
        self._base = np.random.default_rng(seed + 1).integers(0, vocab, PER_BLOCK, dtype=np.int32)
        self._shifted: dict[int, tuple[Ids, int]] = {}  # each block is one of `vocab`; with its checksum

    @property
    def index(self) -> Index:
        buckets, name = Buckets(self.counts), f"{len(self.counts):x}".zfill(16)
        return Index(name, "arithmetic", self._fingerprint, self.vocab, 256, "<u2", 0, 0, buckets, (), (), SCATTERED)

    def files(self) -> dict[str, bytes]:
        """index.json and tokenizer.json."""
        fields = {**self.index.__dict__, "train": self.index.train.to_json()}  # type: ignore[attr-defined]
        described = json.dumps(self.tokenizer.describe()).encode()
        return {"index.json": json.dumps(fields).encode(), tokenizers.FILE_NAME: described}

    def header(self, shard: int) -> Header:
        return Header(np.dtype("<u2"), int(self.counts[shard]), self._fingerprint, version=SCATTERED)

    def _block(self, shard: int, number: int) -> tuple[Ids, int]:
        shift = int(keyed(shard, number)[0] % np.uint64(self.vocab))
        if shift not in self._shifted:
            ids = ((self._base + shift) % self.vocab).astype("<u2")
            self._shifted[shift] = ids, zlib.crc32(ids.data.cast("B"))
        return self._shifted[shift]

    def ids(self, shard: int, first: int, end: int) -> Ids:
        """Tokens first…end-1 of a shard."""
        parts = []
        for block in range(first // PER_BLOCK, -(-end // PER_BLOCK)):
            begin, stop = max(first - block * PER_BLOCK, 0), min(end - block * PER_BLOCK, PER_BLOCK)
            parts.append(self._block(shard, block)[0][begin:stop])
        return np.concatenate(parts)

    def head(self, shard: int) -> bytes:
        """Header and checksums, as `blocks.pack_table` makes them."""
        header = self.header(shard)
        whole, rest = divmod(header.tokens, PER_BLOCK)
        sums = [self._block(shard, number)[1] for number in range(whole)]
        if rest:
            sums.append(zlib.crc32(self.ids(shard, whole * PER_BLOCK, header.tokens).data.cast("B")))
        head = header.pack() + np.array(sums, dtype="<u4").tobytes()
        return (head + zlib.crc32(head).to_bytes(4, "little")).ljust(header.offset, b"\0")

    def size(self, shard: int) -> int:
        return self.header(shard).offset + self.header(shard).size

    def read(self, shard: int, start: int, end: int) -> bytes:
        """Bytes start…end-1 of a shard's file."""
        offset = self.header(shard).offset
        head = self.head(shard)[start:end] if start < offset else b""
        if end <= offset:
            return head
        first, last = max(start - offset, 0), end - offset
        ids: bytes = self.ids(shard, first // 2, -(-last // 2)).tobytes()
        return head + ids[first % 2 : first % 2 + last - first]


class ObjectStore:
    """The server. `requests` and `sent` count what was delivered, of shards."""

    def __init__(
        self,
        store: ArithmeticStore,
        latency: float = 0.0,
        bytes_per_s: float = 0.0,
        fault: Fault = lambda number, name: None,
        hang_s: float = 5.0,
    ):
        self.store, self.latency, self.bytes_per_s, self.fault, self.hang_s = store, latency, bytes_per_s, fault, hang_s
        self.counts: Counter[str] = Counter()
        self._files = store.files()
        self._lock, self._free_at = threading.Lock(), 0.0
        outer = self

        class Handler(_Handler):
            object_store = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def size(self, name: str) -> int | None:
        if name in self._files:
            return len(self._files[name])
        shard = _shard(name)
        return None if shard is None or shard >= len(self.store.counts) else self.store.size(shard)

    def read(self, name: str, start: int, end: int) -> bytes:
        shard = _shard(name)
        return self._files[name][start:end] if shard is None else self.store.read(shard, start, end)

    def count(self, name: str, size: int) -> int:
        """Count a request of a shard; returns its number."""
        with self._lock:
            self.counts["requests"] += 1
            self.counts["bytes"] += size
            self.counts["heads" if size < BLOCK // 64 else "blocks"] += 1
            return self.counts["requests"] - 1

    def wait(self, size: int) -> None:
        """The time that so many bytes take on the link, which all requests share."""
        if self.bytes_per_s:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_s
                until = self._free_at
            time.sleep(max(0.0, until - time.monotonic()))

    def pause(self, seconds: float) -> None:
        """The link stands still."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + seconds


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    object_store: ObjectStore

    def do_HEAD(self) -> None:
        size = self.object_store.size(self._name)
        time.sleep(self.object_store.latency)
        self._answer(404 if size is None else 200, size or 0)

    def do_GET(self) -> None:
        server, name = self.object_store, self._name
        if name == "counts":
            return self._send(200, json.dumps(server.counts).encode())
        if "list-type" in self.path:
            return self._send(200, NO_FILES)
        size = server.size(name)
        if size is None:
            return self._send(404, b"")
        start, end = self._range(size)
        fault = None
        if _shard(name) is not None:
            fault = server.fault(server.count(name, end - start), name)
            time.sleep(server.latency)
        return self._deliver(server.read(name, start, end), start, size, fault)

    def _deliver(self, content: bytes, start: int, size: int, fault: str | None) -> None:
        if fault == "fail":
            return self._send(503, b"")
        if fault == "hang":
            time.sleep(self.object_store.hang_s)
            self.close_connection = True
            return None
        if fault == "wrong":
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault == "short":
            content = content[: len(content) // 2]
        placed = f"bytes {start}-{start + len(content) - 1}/{size}"
        return self._send(206, content, {"Content-Range": placed})

    @property
    def _name(self) -> str:
        return self.path.partition("?")[0].rstrip("/").rpartition("/")[-1]

    def _range(self, size: int) -> tuple[int, int]:
        wanted = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        return (int(wanted[0]), min(int(wanted[2] or size) + 1, size)) if wanted[0] else (0, size)

    def _answer(self, status: int, length: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", f'"{zlib.crc32(self._name.encode())}"')
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, content: bytes, more: dict[str, str] | None = None) -> None:
        self._answer(status, len(content), more)
        with contextlib.suppress(ConnectionError):  # the client has given up
            for start in range(0, len(content), CHUNK):
                self.object_store.wait(len(content[start : start + CHUNK]))
                self.wfile.write(content[start : start + CHUNK])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each request would be all that a test prints."""


def _shard(name: str) -> int | None:
    number = name.removeprefix("train-").removesuffix(".tokens")
    return int(number) if number.isdecimal() else None


def main() -> None:
    """Serve until the process is ended; the endpoint is printed first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=15_000_000, help="of a shard")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds a request")
    parser.add_argument("--bytes-per-s", type=float, default=0.0, help="of the link; 0 is no limit")
    parser.add_argument("--hiccup-every", type=float, default=0.0, help="seconds between pauses of 5 s")
    words = parser.parse_args()
    server = ObjectStore(ArithmeticStore(words.shards, words.tokens), words.latency, words.bytes_per_s)
    print(server.endpoint, flush=True)
    while True:
        time.sleep(words.hiccup_every or 3600)
        if words.hiccup_every:
            server.pause(5.0)


if __name__ == "__main__":
    main()
