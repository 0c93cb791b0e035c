"""Prepares a token store from text: `raygpt prepare`, and the first thing that `raygpt train` does.

The store of a source is a pure function of the source's text, the tokenizer and the settings below. A folder with some
of its shards is completed, a complete one is opened, and one that belongs to something else is refused.
"""

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raygpt import storage
from raygpt.cluster import connected
from raygpt.corpus import pipeline, tokenizers
from raygpt.corpus.documents import DocumentReader, check_beginnings, row_count
from raygpt.corpus.extents import Extent
from raygpt.corpus.index import INDEX, Index
from raygpt.corpus.pipeline import Holdout, Part, Unit, part_bytes
from raygpt.corpus.scatter import RUNS, VAL_SHARD, scatter
from raygpt.corpus.shards import SCATTERED, VERSION, Header, dtype_for, shard_name, write_shard
from raygpt.corpus.sources import File, Source, resolve
from raygpt.corpus.store import FAILED, PLAN, TokenStore, TokenStream, open_store
from raygpt.errors import RaygptError, StorageError, TransientError, first_line

SAMPLE = 32 * 2**20  # characters that bpe:N is trained on
LARGE = 10**9  # bytes of source from which on it is scattered, unless data.scatter says otherwise
UNSCATTERED = "unscattered"  # tokens in the order of the text, deleted when they are scattered
STOP_S = 30.0  # a part takes a second or two; a thread that takes longer ends with the process


class Progress(NamedTuple):
    """The progress of prepare."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    source_bytes: int = 0  # read so far, of `source_total`, as stored
    source_total: int = 0
    seconds: float = 0.0
    scattered: float | None = None  # the share of the scattering that is done, where there is any


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """One source to prepare: everything that determines the content of the store."""

    source: Source
    tokenizer: str  # as the recipe names it
    val: float | Source
    split: str = "documents"
    split_seed: int = 2357
    mixture: tuple[Source, ...] = ()  # all texts that share one tokenizer, if there are several
    scatter: bool = False  # spread the documents over the shards at random
    dedup: str | None = None  # exact: without copies of documents

    @property
    def texts(self) -> tuple[Source, ...]:
        """The texts that char and bpe:N are made from."""
        return self.mixture or (self.source, *([self.val] if isinstance(self.val, Source) else []))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of text, tokenizer and settings."""
        made = tokenizers.ready_made(self.tokenizer)
        texts = [text.identity() for text in self.texts]
        identity = {
            "version": VERSION,
            "source": self.source.identity(),
            "val": self.val.identity() if isinstance(self.val, Source) else self.val,
            "split": [self.split, self.split_seed],
            "tokenizer": tokenizers.fingerprint(made) if made else [self.tokenizer, texts],
        }
        if self.scatter:  # otherwise the same as before there was this setting
            identity |= {"scatter": SCATTERED, "dedup": self.dedup}
        return storage.digest(json.dumps(identity, sort_keys=True))


def prepare(
    source: str,
    folder: str,
    tokenizer: str,
    *,
    val: float | str = 0.05,
    split: str = "documents",
    split_seed: int = 2357,
    column: str = "text",
    limit: int | None = None,
    scatter: bool | None = None,
    dedup: str | None = None,
    watch: Watch = lambda progress: None,
) -> TokenStore:
    """Tokenise a source into a store. The arguments are those of a recipe's `data`."""
    held_out = resolve(val, column) if isinstance(val, str) else val
    text = resolve(source, column, limit)
    scattered = is_scattered(text, scatter, dedup)
    job = Job(text, tokenizer, held_out, split, split_seed, scatter=scattered, dedup=dedup)
    for text in job.texts:
        check_beginnings(text)
    return run(job, folder, watch)


def is_scattered(source: Source, scatter: bool | None, dedup: str | None) -> bool:
    """Whether a text's documents are scattered: as asked for, or if there is much text, or copies are to be removed."""
    return bool(dedup) or (source.size >= LARGE if scatter is None else scatter)


def run(job: Job, folder: str, watch: Watch = lambda progress: None, cpus: float | None = None) -> TokenStore:
    """Create, complete or open the store of a job in a folder; with all CPUs, or at most `cpus`."""
    folder = storage.absolute(folder)  # Ray's workers run in other folders
    if job.scatter:
        return _run_scattered(job, folder, watch, cpus)
    if _is_complete(folder, job.fingerprint):
        return open_store(folder)
    rows = _row_counts(job)
    units = _units(job, rows)
    held_out = _held_out_rows(job, sum(rows))
    _write_plan(job, folder, units)
    tokenizer = _tokenizer(job, folder)
    share = job.val if job.split == "documents" and isinstance(job.val, float) else 0.0
    parts = []
    progress, started = Progress(source_total=sum(f.size for u in units for f in u.files)), time.monotonic()
    holdout = Holdout(share, job.split_seed, frozenset(held_out))
    watch(progress)  # Ray may take a while to start, or to have a CPU free
    with connected():
        for part in pipeline.run(units, holdout, folder, tokenizers.fingerprint(tokenizer), cpus):
            parts.append(part)
            progress = _advance(progress, part, time.monotonic() - started)
            watch(progress)
    parts.sort(key=lambda part: (part.stream, part.unit, part.part))
    _write_index(job, folder, tokenizer, parts, held_out)
    return open_store(folder)


def _run_scattered(job: Job, folder: str, watch: Watch, cpus: float | None) -> TokenStore:
    """Tokenise in the order of the text into a folder aside, scatter that, and delete it.

    Two runs may do this at once, and the first that is done deletes what the other one reads.
    """
    try:
        if not _is_complete(folder, job.fingerprint):
            _scatter(job, folder, watch, cpus)
    except Exception:
        if not _is_complete(folder, job.fingerprint):
            raise
    with contextlib.suppress(StorageError):  # they only take space
        for name in (UNSCATTERED, RUNS):  # also if the run that wrote the index was killed here
            storage.delete_folder(storage.join(folder, name))
    return open_store(folder)


def _scatter(job: Job, folder: str, watch: Watch, cpus: float | None) -> None:
    _write_plan(job, folder, [])
    aside, last = storage.join(folder, UNSCATTERED), Progress()

    def tokenised(progress: Progress) -> None:
        nonlocal last
        last = progress._replace(scattered=0.0)
        watch(last)

    plain = run(replace(job, scatter=False, dedup=None), aside, tokenised, cpus)
    started = time.monotonic() - last.seconds

    def scattered(done: int, total: int) -> None:
        watch(last._replace(scattered=done / total, seconds=time.monotonic() - started))

    with connected():
        seed, by_content = job.split_seed, job.dedup == "exact"
        index = scatter(plain, folder, job.fingerprint, seed=seed, by_content=by_content, cpus=cpus, advance=scattered)
    index.write(folder)


class Background:
    """A job in a thread of this process, while its store is read by `growing.py`."""

    def __init__(self, job: Job, folder: str, watch: Watch = lambda progress: None, cpus: float | None = None):
        self._job, self._folder, self._watch, self._cpus = job, storage.absolute(folder), watch, cpus
        self._stopped = threading.Event()
        storage.delete(self._failed)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current part, if it is still running; running the job again continues it."""
        self._stopped.set()
        self._thread.join(STOP_S)

    @property
    def _failed(self) -> str:
        return storage.join(self._folder, FAILED)

    def _work(self) -> None:
        try:
            run(self._job, self._folder, self._report, self._cpus)
        except BaseException as error:  # any error: otherwise readers would wait for ever
            failure = {"error": first_line(error), "is_transient": isinstance(error, TransientError)}
            storage.write_json(self._failed, failure)

    def _report(self, progress: Progress) -> None:
        if self._stopped.is_set():
            raise TransientError(f"{self._folder} is not complete: training ended first; run the same command again")
        self._watch(progress)


def _advance(progress: Progress, part: Part, seconds: float) -> Progress:
    return Progress(
        documents=progress.documents + part.documents,
        tokens=progress.tokens + part.tokens + part.val_tokens,
        text_bytes=progress.text_bytes + part.text_bytes,
        source_bytes=progress.source_bytes + part.source_bytes,
        source_total=progress.source_total,
        seconds=seconds,
    )


def _is_complete(folder: str, fingerprint: str) -> bool:
    """Whether the job's store exists already. A store of another job is refused."""
    index = storage.read_json(storage.join(folder, INDEX))
    if index and index.get("fingerprint") != fingerprint:
        raise _another(folder)
    return index is not None


def _another(folder: str) -> RaygptError:
    return RaygptError(
        f"{folder} holds tokens of another source, tokenizer or setting; choose another folder, or delete it"
    )


def _write_plan(job: Job, folder: str, units: Sequence[Unit]) -> None:
    """Record what is being prepared. A folder is for one corpus: shards of two would be mixed up."""
    plan = {
        "fingerprint": job.fingerprint,
        "source": job.source.spec,
        "column": job.source.column,
        "limit": job.source.limit,
        "tokenizer": job.tokenizer,
        "val": job.val.spec if isinstance(job.val, Source) else job.val,
        "split": job.split,
        "split_seed": job.split_seed,
        "units": sum(unit.stream == "train" for unit in units),
        "val_units": sum(unit.stream == "val" for unit in units),
    }
    plan |= {"scatter": True, "dedup": job.dedup} if job.scatter else {}
    uri = storage.join(folder, PLAN)
    begun = storage.read_json(uri) or plan
    if begun["fingerprint"] != plan["fingerprint"]:
        counted = {"fingerprint": "", "units": 0, "val_units": 0}
        if {**begun, **counted} != {**plan, **counted}:
            raise _another(folder)
        _begin_again(folder)
    storage.write_json(uri, plan)


def _begin_again(folder: str) -> None:
    """Delete the shards so far: the same command, but its files have changed since."""
    for name in storage.sizes(folder):
        if name.endswith(".tokens") or name == tokenizers.FILE_NAME:
            storage.delete(storage.join(folder, name))
    for name in (UNSCATTERED, RUNS):
        storage.delete_folder(storage.join(folder, name))


def _row_counts(job: Job) -> list[int]:
    """Rows of each file, if the split needs them."""
    if job.split != "huggingface":
        return []
    rows_are_documents = job.source.rule == "file" and all(file.format == "parquet" for file in job.source.files)
    if not rows_are_documents or not isinstance(job.val, float):
        raise RaygptError(
            "data.split: huggingface needs parquet files whose rows are documents, and a fraction as data.val; "
            "use data.split: documents"
        )
    return [row_count(file) for file in job.source.files]


def _units(job: Job, rows: Sequence[int]) -> list[Unit]:
    """Units with validation text first: it is small, and evaluation needs it from the start."""
    train = _units_of(job.source, "train", rows=rows)
    val = _units_of(job.val, "val", first=len(train)) if isinstance(job.val, Source) else []
    return val + train


def _units_of(source: Source, stream: str, first: int = 0, rows: Sequence[int] = ()) -> list[Unit]:
    """Small files together, large ones alone. One unit for all if they must be read in sequence: WikiText's articles
    may continue in the next file, and a limit counts rows across files."""
    in_one = source.rule == "wikitext" or source.limit
    groups: list[list[File]] = [[]]
    for file in source.files:
        full = sum(f.size for f in groups[-1]) + file.size > part_bytes(source)
        if groups[-1] and full and not in_one:
            groups.append([])
        groups[-1].append(file)
    first_rows = dict(zip(source.files, itertools.accumulate(rows, initial=0), strict=False))
    return [
        Unit(stream, number, source, tuple(files), first_rows.get(files[0], 0))
        for number, files in enumerate(groups, start=first)
    ]


def _tokenizer(job: Job, folder: str) -> tokenizers.Tokenizer:
    """The job's tokenizer, saved in the store; one made from the corpus is made once."""
    if storage.exists(storage.join(folder, tokenizers.FILE_NAME)):
        return tokenizers.load(folder)
    made = tokenizers.ready_made(job.tokenizer)
    if made is None:
        budget = sys.maxsize if job.tokenizer == "char" else SAMPLE  # char must see every character
        made = tokenizers.make(job.tokenizer, _sample(job, budget))
    tokenizers.save(made, folder)
    return made


def _sample(job: Job, budget: int) -> Iterator[str]:
    """Text from every unit, the same amount of each, up to the budget in all."""
    units = [unit for source in job.texts for unit in _units_of(source, "train")]
    for unit in units:
        left = max(1, budget // len(units))
        for piece in DocumentReader(unit.source, unit.files).pieces():
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                break


def _held_out_rows(job: Job, rows: int) -> list[int]:
    """The rows that `datasets`' train_test_split(test_size=val, seed=split_seed) holds out, in its order."""
    if job.split != "huggingface" or not isinstance(job.val, float):
        return []
    shuffled = np.random.default_rng(job.split_seed).permutation(rows)
    return [int(row) for row in shuffled[: math.ceil(job.val * rows)]]


def _write_index(
    job: Job, folder: str, tokenizer: tokenizers.Tokenizer, parts: Sequence[Part], held_out: Sequence[int]
) -> None:
    """Merge the validation shards into one, and write the index, which makes the store complete."""
    index = Index(
        fingerprint=job.fingerprint,
        source=job.source.spec,
        tokenizer=tokenizers.fingerprint(tokenizer),
        vocab=tokenizer.vocab,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype_for(tokenizer.vocab).str,
        documents=sum(part.documents for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        train=_extents(parts, "train"),
        val=_extents(parts, "val"),
        notes=tuple(_smaller_tokenizer(job, tokenizer)),
    )
    if not index.train and not (isinstance(job.val, float) and index.val):
        raise RaygptError(f"{job.source.spec} has no text in it: every document is blank; name another source")
    if index.train and index.val:
        index = _gather_val(index, folder, held_out)
    elif isinstance(job.val, float) and job.val:
        index = _hold_out_tail(index, folder, job.val, job.split)
    index.write(folder)


def _smaller_tokenizer(job: Job, tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """A note if a short text had too few pairs for the merges of bpe:N."""
    kind, _, wanted = job.tokenizer.partition(":")
    if kind == "bpe" and tokenizer.vocab < int(wanted):
        yield f"{job.tokenizer} came out with {tokenizer.vocab:,} tokens: the text has no more pairs to merge"


def _extents(parts: Sequence[Part], stream: str) -> tuple[Extent, ...]:
    counts = [(part, part.tokens if stream == "train" else part.val_tokens) for part in parts]
    return tuple(Extent(shard_name(stream, part.unit, part.part), 0, tokens) for part, tokens in counts if tokens)


def _gather_val(index: Index, folder: str, held_out: Sequence[int]) -> Index:
    """One shard of all held-out documents: thousands of small files would be slow to read from an object store."""
    runs = list(TokenStream(folder, index.val, index).runs())
    if held_out:  # in the order of Hugging Face's split; in the shards they are in the order of their rows
        ids = np.concatenate(runs)
        documents = np.split(ids, np.flatnonzero(ids == index.end_of_text)[:-1] + 1)
        runs = [documents[place] for place in np.argsort(np.argsort(held_out))]
    tokens = sum(len(run) for run in runs)
    write_shard(storage.join(folder, VAL_SHARD), runs, Header(np.dtype(index.dtype), tokens, index.tokenizer))
    return replace(index, val=(Extent(VAL_SHARD, 0, tokens),))


def _hold_out_tail(index: Index, folder: str, share: float, split: str) -> Index:
    """Hold out the last `share` of the tokens for validation, from a document's start if one is near enough.

    This is the split `tail`, and the fallback if drawing from few documents put all of them on one side.
    """
    drawn, extents = ("no document", index.train) if index.train else ("each document", index.val)
    stream = TokenStream(folder, extents, index)
    cut = int((len(stream) - 1) * (1 - share))  # the last end-of-text is not counted as text
    start = _document_start(stream, cut, index.end_of_text)
    train, val = _cut(extents, start or cut)
    held_out = f"the last {sum(extent.tokens for extent in val) / len(stream):.1%} of the tokens are held out"
    notes = []
    if split != "tail":
        notes.append(f"{drawn} of {index.documents} was drawn for validation: {held_out}")
    elif start is None:
        notes.append(f"no document begins near enough to the cut: {held_out}, from within a document on")
    return replace(index, train=train, val=val, notes=(*index.notes, *notes))


def _document_start(stream: TokenStream, cut: int, end_of_text: int) -> int | None:
    """The document start nearest to the cut, if what follows it is between half and twice as much as wanted."""
    share = len(stream) - cut
    low, high = len(stream) - 2 * share, len(stream) - (share + 1) // 2
    starts: list[int] = []
    position = 0
    for run in stream.runs():
        if low <= position + len(run) and position < high:
            starts += (np.flatnonzero(run == end_of_text) + position + 1).tolist()
        position += len(run)
    return min(
        (start for start in starts if max(1, low) <= start <= high), key=lambda start: abs(start - cut), default=None
    )


def _cut(extents: Sequence[Extent], tokens: int) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Extents up to a number of tokens, and from there on."""
    head, tail = [], []
    for extent in extents:
        taken = min(tokens, extent.tokens)
        tokens -= taken
        if taken:
            head.append(replace(extent, tokens=taken))
        if taken < extent.tokens:
            tail.append(Extent(extent.shard, extent.start + taken, extent.tokens - taken))
    return tuple(head), tuple(tail)
