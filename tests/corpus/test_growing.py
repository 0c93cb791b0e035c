"""A store that is read while it is being written gives the rows of the finished one."""

import itertools
import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from raygpt import storage
from raygpt.config import Source
from raygpt.corpus import growing, tokenizers
from raygpt.corpus import prepare as preparing
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.growing import GrowingStream
from raygpt.corpus.index import Index
from raygpt.corpus.shards import Header, shard_name, write_shard
from raygpt.corpus.store import is_complete, open_store
from raygpt.errors import RaygptError, StorageError, TransientError

# tokens of each part of each unit; the third unit has no text, as a file of blank documents has none
UNITS = [[37, 20], [50], [0], [1, 0, 64], [28]]
TOTAL = 200
TOKENIZER = tokenizers.Bytes()


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "POLL_S", 0.005)


def begin(folder: str, split: str = "documents") -> None:
    """What prepare writes first."""
    plan = {"fingerprint": "f" * 16, "source": "test", "split": split, "units": len(UNITS)}
    storage.write_bytes(storage.join(folder, "plan.json"), json.dumps(plan).encode())
    tokenizers.save(TOKENIZER, folder)


def shards(folder: str) -> Iterator[Extent]:
    """Write shard after shard, of the ids 0…199; each is there when it is given."""
    position = 0
    for unit, parts in enumerate(UNITS):
        for part, tokens in enumerate(parts):
            header = Header(np.dtype("<u2"), tokens, tokenizers.fingerprint(TOKENIZER), last=part == len(parts) - 1)
            extent = Extent(shard_name("train", unit, part), 0, tokens)
            write_shard(storage.join(folder, extent.shard), [np.arange(position, position + tokens)], header)
            position += tokens
            yield extent


def finish(folder: str, train: list[Extent]) -> None:
    """What prepare writes last."""
    fingerprint = tokenizers.fingerprint(TOKENIZER)
    index = Index("f" * 16, "test", fingerprint, 257, 256, "<u2", 9, 200, tuple(e for e in train if e.tokens), ())
    index.write(folder)


def prepare(folder: str, pause: float = 0.0) -> None:
    train = []
    for extent in shards(folder):
        train.append(extent)
        time.sleep(pause)
    finish(folder, train)


def feed(stream: GrowingStream, rows: int = 3) -> Feed:
    return Feed([stream], context=8, batch_rows=rows, order="sequential")


def test_shards_are_named_by_where_their_text_stands() -> None:
    assert shard_name("train", 12, 3) == "train-00012-00003.tokens"
    assert shard_name("val", 0, 0) == "val-00000-00000.tokens"


@pytest.mark.parametrize("where", ["local", "s3"])
def test_batches_read_while_prepare_writes_are_those_of_the_finished_store(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = str(tmp_path) if where == "local" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    begin(folder)
    growing_feed = feed(GrowingStream(folder, patience_s=30))
    writer = threading.Thread(target=prepare, args=(folder, 0.02))
    writer.start()
    batches = [growing_feed.rows(batch).tolist() for batch in range(20)]  # 24 windows, so two epochs and a half
    writer.join()
    finished = Feed([open_store(folder).train], context=8, batch_rows=3, order="sequential")
    assert batches == [finished.rows(batch).tolist() for batch in range(20)]
    assert batches[0] == [[*range(9)], [*range(8, 17)], [*range(16, 25)]]
    assert batches[8] == batches[0]  # epoch 1


def test_training_begins_before_prepare_has_ended(tmp_path: Path) -> None:
    begin(str(tmp_path))
    writing = shards(str(tmp_path))
    next(writing)  # 37 tokens, so 4 windows
    stream = GrowingStream(str(tmp_path), patience_s=0.05)
    assert feed(stream, rows=4).rows(0)[:, 0].tolist() == [0, 8, 16, 24]
    assert len(stream) == 37
    with pytest.raises(RaygptError, match="no new shard"):
        feed(stream, rows=4).rows(1)
    next(writing)  # 20 tokens more
    next(writing)  # and 50
    assert feed(stream, rows=4).rows(1)[:, 0].tolist() == [32, 40, 48, 56]
    assert len(stream) == 107
    assert not is_complete(str(tmp_path))


def test_a_restarted_reader_gets_the_same_batch(tmp_path: Path) -> None:
    begin(str(tmp_path))
    prepare(str(tmp_path))
    first = feed(GrowingStream(str(tmp_path)))
    batches = [first.rows(batch).tolist() for batch in range(12)]
    for start in (11, 7, 0):
        assert feed(GrowingStream(str(tmp_path))).rows(start).tolist() == batches[start]


def test_a_reader_in_another_process_goes_on_from_what_was_there(tmp_path: Path) -> None:
    begin(str(tmp_path))
    writing = shards(str(tmp_path))
    next(writing)
    stream = GrowingStream(str(tmp_path), patience_s=1)
    stream.wait(37)
    carried = pickle.loads(pickle.dumps(stream))
    finish(str(tmp_path), [Extent(shard_name("train", 0, 0), 0, 37), *writing])
    assert carried.wait(TOTAL + 1) == TOTAL
    assert carried.windows([30], 40).tolist() == [[*range(30, 70)]]


def test_a_stalled_prepare_is_an_error_after_patience(tmp_path: Path) -> None:
    begin(str(tmp_path))
    next(shards(str(tmp_path)))
    stream = GrowingStream(str(tmp_path), patience_s=0.6)
    started = time.monotonic()
    with pytest.raises(RaygptError) as caught:
        stream.wait(38)
    assert str(caught.value) == f"{tmp_path}: no new shard for 1 s; prepare has stopped, run it again"
    assert time.monotonic() - started >= 0.6
    assert len(stream) == 37


@pytest.mark.parametrize("kind", [StorageError, RaygptError])
def test_a_job_that_fails_in_the_background_fails_its_readers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RaygptError]
) -> None:
    def fail(*job: object) -> None:
        raise kind("503 Slow Down")

    monkeypatch.setattr(preparing, "run", fail)
    begin(str(tmp_path))
    preparing.Background(preparing.Job(Source(source="a.txt", weight=1), "bytes", 0.1), str(tmp_path))._thread.join()
    with pytest.raises(RaygptError, match="503 Slow Down") as caught:
        GrowingStream(str(tmp_path)).wait(1)
    assert isinstance(caught.value, TransientError) == (kind is StorageError)


def test_patience_is_counted_anew_from_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(str(tmp_path))
    stream = GrowingStream(str(tmp_path), patience_s=60)
    clock, written, writing = [0.0], [], shards(str(tmp_path))

    def sleep(seconds: float) -> None:
        """Between two looks half a minute passes, and a shard is written: minutes in all."""
        clock[0] += 30
        written.extend(itertools.islice(writing, 1))
        if len(written) == sum(map(len, UNITS)):
            finish(str(tmp_path), written)

    monkeypatch.setattr(growing, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert stream.wait(10**9) == TOTAL
    assert clock[0] > 180


def test_the_tokenizer_is_waited_for(tmp_path: Path) -> None:
    """prepare makes bpe:N before the first shard, which takes a while."""
    writer = threading.Timer(0.1, begin, args=(str(tmp_path),))
    writer.start()
    stream = GrowingStream(str(tmp_path), patience_s=30)
    writer.join()
    assert (stream.index.vocab, stream.index.fingerprint) == (257, "f" * 16)
    with pytest.raises(RaygptError) as caught:
        GrowingStream(str(tmp_path / "nothing"), patience_s=0)
    assert str(caught.value) == f"{tmp_path}/nothing: no new shard for 0 s; prepare has stopped, run it again"


def test_the_end_is_where_the_index_says_that_the_store_is_whole(tmp_path: Path) -> None:
    begin(str(tmp_path))
    train = list(shards(str(tmp_path)))
    stream = GrowingStream(str(tmp_path), patience_s=0.05)
    assert stream.wait(TOTAL) == TOTAL
    with pytest.raises(RaygptError, match="no new shard"):
        stream.wait(TOTAL + 1)
    finish(str(tmp_path), train)
    assert stream.wait(TOTAL + 1) == TOTAL
    assert is_complete(str(tmp_path))


def test_a_tail_that_is_to_be_held_out_is_never_trained_on(tmp_path: Path) -> None:
    begin(str(tmp_path), split="tail")
    with pytest.raises(RaygptError) as caught:
        GrowingStream(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: data.split: tail holds out the end of the corpus, which prepare has yet to find; "
        "train when it has ended, or set data.split: documents"
    )


def test_a_tail_that_was_held_out_after_all_is_an_error(tmp_path: Path) -> None:
    begin(str(tmp_path))
    train = list(shards(str(tmp_path)))
    finish(str(tmp_path), [*train[:-1], replace(train[-1], tokens=8)])
    stream = GrowingStream(str(tmp_path))
    with pytest.raises(RaygptError) as caught:
        stream.wait(TOTAL + 1)
    assert str(caught.value) == (
        f"{tmp_path}: its documents were too few to draw from, so the end of its tokens is held out for validation; "
        "train again, the store is complete now"
    )
