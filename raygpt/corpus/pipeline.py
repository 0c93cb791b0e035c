"""The Ray Data pipeline of prepare: files in, shards out, on every core and node, with bounded memory.

    units ──read──▶ parts of about 16 MB of text ──tokenise──▶ shards in the store

A unit is a few complete files of the source. One task reads it and passes on parts as it reads; other tasks tokenise
parts and write each as a shard, named by unit and part. A shard's content depends on the source alone, never on timing
or on the number of cores: the same text always gives the same shards, and an existing shard is not made again.
"""

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.corpus.documents import DocumentReader, Piece
from raygpt.corpus.shards import Header, Ids, dtype_for, read_header, shard_name, write_shard
from raygpt.corpus.sources import File, Source
from raygpt.errors import RaygptError, first_line

# Text in a part. 16 MiB are 1 s of GPT-2's BPE on one core and a shard of 8 MB, 2,400 of them in 9 billion tokens.
# A small source has smaller parts, so that every core gets some.
SMALLEST_PART, LARGEST_PART = 4 * 2**20, 16 * 2**20


def part_bytes(source: Source) -> int:
    """How much text of a source makes a shard: a function of the source alone."""
    return min(max(source.size // 4, SMALLEST_PART), LARGEST_PART)


@dataclass(frozen=True)
class Unit:
    """Files of a source that one task reads."""

    stream: str  # train, or val for a separate validation source
    number: int  # unique within a store
    source: Source
    files: tuple[File, ...]
    first_row: int


@dataclass(frozen=True)
class Holdout:
    """Which documents of the train files are held out for validation."""

    share: float = 0.0  # of documents, by a keyed hash of their text
    seed: int = 0
    rows: frozenset[int] = frozenset()  # or these

    def holds_out(self, piece: Piece) -> bool:
        """Decided by the text, so that copies of a document are all on the same side."""
        if not self.share:
            return piece.row in self.rows
        digest = hashlib.blake2b(piece.text.encode(), digest_size=8, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64


@dataclass(frozen=True)
class Part:
    """The counts of one part, which the pipeline returns."""

    stream: str
    unit: int
    part: int
    tokens: int  # train
    val_tokens: int
    documents: int
    text_bytes: int
    source_bytes: int


def run(
    units: Sequence[Unit], holdout: Holdout, folder: str, tokenizer: str, cpus: float | None = None
) -> Iterator[Part]:
    """Make the shards of these units with the tokenizer in the folder, which has this fingerprint.

    Only counts are returned, so the driver holds no part of the corpus. `cpus` limits the CPUs of the cluster that it
    uses at once: otherwise its tasks would keep others, e.g. training workers, from starting.
    """
    import ray.data

    context, used, scheduling = _context(cpus)
    readers = max(1, int(used) // 2)  # one keeps three tokenisers busy
    with ray.data.DataContext.current(context):
        rows = ray.data.from_items([{"unit": n} for n in range(len(units))], override_num_blocks=len(units))
        # different resources keep Ray from fusing the two steps, which would tokenise a file on one core
        read = functools.partial(_read, units=tuple(units), holdout=holdout, folder=folder)
        texts = rows.flat_map(read, num_cpus=0.01, compute=ray.data.TaskPoolStrategy(size=readers), **scheduling)
        counts = texts.map(functools.partial(_tokenise, folder=folder, tokenizer=tokenizer), num_cpus=1, **scheduling)
        try:
            for row in counts.iter_rows():
                yield Part(**row)
        except Exception as error:
            raise _readable(error) from None


def each(task: Callable[[Any], dict[str, Any]], items: Sequence[Any], cpus: float | None = None) -> Iterator[Any]:
    """The task's results for each item, as they are done, on every core and node; or on at most `cpus` CPUs."""
    import ray.data

    if not items:
        return
    context, _, scheduling = _context(cpus)
    with ray.data.DataContext.current(context):
        rows = ray.data.from_items([{"item": n} for n in range(len(items))], override_num_blocks=len(items))
        done = rows.map(functools.partial(_on_item, task=task, items=tuple(items)), num_cpus=1, **scheduling)
        try:
            yield from done.iter_rows()
        except Exception as error:
            raise _readable(error) from None


def _on_item(row: dict[str, Any], task: Callable[[Any], dict[str, Any]], items: Sequence[Any]) -> dict[str, Any]:
    return task(items[row["item"]])


def _context(cpus: float | None) -> tuple[Any, float, dict[str, Any]]:
    """Ray Data's context, the CPUs that tasks use at once, and Ray's scheduling arguments."""
    import ray
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = SMALLEST_PART  # so that each part is a block, and tokenised by its own task
    available, scheduling = _choose_nodes(ray.nodes())  # type: ignore[no-untyped-call]
    used = min(available, cpus or available)
    if scheduling or cpus:  # at least one tokeniser and a reader
        context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(cpu=max(used, 1.5))
    return context, used, scheduling


def _choose_nodes(nodes: Sequence[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """The number of CPUs for the tasks, and Ray's scheduling arguments.

    If only some nodes have accelerators, the tasks run on those without: the CPUs of the others are for training.
    """
    with_cpus = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
    plain = [node for node in with_cpus if not any(node["Resources"].get(kind) for kind in ("GPU", "TPU"))]
    chosen = plain or with_cpus
    cpus = sum(node["Resources"]["CPU"] for node in chosen)
    if len(chosen) == len(with_cpus):
        return cpus, {}
    ids = ",".join(node["NodeID"] for node in chosen)
    # the fallback: if those nodes are lost, others do the work
    return cpus, {
        "label_selector": {"ray.io/node-id": f"in({ids})"},
        "fallback_strategy": [{"label_selector": {}}],
    }


def _readable(error: BaseException) -> BaseException:
    """The RaygptError that a task raised, unwrapped from Ray's."""
    cause: BaseException | None = error
    while cause is not None:
        inner = getattr(cause, "cause", None)
        if isinstance(inner, RaygptError):
            return type(inner)(first_line(inner))  # Ray adds lines of its own
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    return error


def _read(row: dict[str, Any], units: Sequence[Unit], holdout: Holdout, folder: str) -> Iterator[dict[str, Any]]:
    """Parts of a unit, as rows for `_tokenise`. If a part's shard exists already, only its name is passed on."""
    unit = units[row["unit"]]
    existing = storage.sizes(folder)
    reader = DocumentReader(unit.source, unit.files, unit.first_row, keep_blank=bool(holdout.rows))
    position = 0
    for number, (pieces, last) in enumerate(_parts(_marked(reader.pieces(), unit, holdout), part_bytes(unit.source))):
        exists = shard_name(unit.stream, unit.number, number) in existing
        pieces = [] if exists else pieces
        texts = [piece.text.encode() for piece in pieces]
        yield {
            "stream": unit.stream,
            "unit": unit.number,
            "part": number,
            "last": last,
            "exists": exists,
            "text": b"".join(texts),  # one column of bytes: Ray copies it without looking into it
            "lengths": np.array([len(text) for text in texts], dtype=np.int64).tobytes(),
            "ends": bytes(piece.ends for piece in pieces),
            "val": bytes(piece.val for piece in pieces),
            "source_bytes": reader.position - position,
        }
        position = reader.position


class Marked(NamedTuple):
    """A piece of text, whether its document ends with it, and whether that document is validation text."""

    text: str
    ends: bool
    val: bool


def _marked(pieces: Iterator[Piece], unit: Unit, holdout: Holdout) -> Iterator[Marked]:
    """Decide at a document's first piece on which side it is; the others follow, so it is never split."""
    val = False
    for piece in pieces:
        if piece.first:
            val = unit.stream == "val" or holdout.holds_out(piece)
        yield Marked(piece.text, piece.last, val)


def _parts(pieces: Iterator[Marked], target: int) -> Iterator[tuple[list[Marked], bool]]:
    """Group pieces into parts of about `target` bytes, each with whether it is the last; at least one, maybe empty."""
    part: list[Marked] = []
    size = 0
    for piece in pieces:
        if size >= target:
            yield part, False
            part, size = [], 0
        part.append(piece)
        size += len(piece.text.encode())
    yield part, True


def _tokenise(row: dict[str, Any], folder: str, tokenizer: str) -> dict[str, Any]:
    """Make a part's shards, unless they exist, and count them."""
    if not row["exists"]:
        _write(row, folder, tokenizer)
    place = {name: row[name] for name in ("stream", "unit", "part")}
    headers = {stream: _header(folder, stream, row) for stream in ("train", "val")}
    main = headers[row["stream"]]
    return {
        **place,
        "tokens": headers["train"].tokens,
        "val_tokens": headers["val"].tokens,
        "documents": main.documents,
        "text_bytes": main.text_bytes,
        "source_bytes": row["source_bytes"],
    }


def _write(row: dict[str, Any], folder: str, fingerprint: str) -> None:
    """Write held-out documents first, as a separate shard: the train shard, written last, implies that both exist."""
    tokenizer = _tokenizer(folder, fingerprint)
    ids = _encode(row, tokenizer)
    for stream in ("val", "train"):
        chosen = [part for part, val in zip(ids, row["val"], strict=True) if val == (stream == "val")]
        if stream == row["stream"] or (chosen and stream == "val"):
            header = Header(
                dtype=dtype_for(tokenizer.vocab),
                tokens=sum(map(len, chosen)),
                tokenizer=fingerprint,
                documents=sum(row["ends"]),
                text_bytes=len(row["text"]),
                last=row["last"],
            )
            write_shard(storage.join(folder, shard_name(stream, row["unit"], row["part"])), chosen, header)


@functools.cache  # a worker makes many parts
def _tokenizer(folder: str, fingerprint: str) -> tokenizers.Tokenizer:
    return tokenizers.load(folder)


def _encode(row: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> list[Ids]:
    """Ids of each piece, with end-of-text where its document ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks already use all cores
    bounds = np.concatenate([[0], np.cumsum(np.frombuffer(row["lengths"], dtype=np.int64))]).tolist()
    texts = [row["text"][start:stop].decode() for start, stop in itertools.pairwise(bounds)]
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    return [np.concatenate([ids, end[:ends]]) for ids, ends in zip(tokenizer.encode(texts), row["ends"], strict=True)]


def _header(folder: str, stream: str, row: dict[str, Any]) -> Header:
    uri = storage.join(folder, shard_name(stream, row["unit"], row["part"]))
    return read_header(uri) if storage.exists(uri) else Header(np.dtype("<u2"), 0, "")
