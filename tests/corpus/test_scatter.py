"""Scattering: the documents sorted by a keyed hash, the same from any number of tasks; copies removed; continued."""

import contextlib
import functools
import hashlib
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygpt import storage
from raygpt.corpus import pipeline, prepare, scatter, tokenizers
from raygpt.corpus.extents import Extent
from raygpt.corpus.feed import Feed
from raygpt.corpus.index import Index
from raygpt.corpus.shards import Header, write_shard
from raygpt.corpus.store import TokenStore, open_store
from raygpt.corpus.summary import summarise
from raygpt.errors import RaygptError
from tests.corpus.test_order import slow_key

END = 256
BYTES = tokenizers.fingerprint(tokenizers.Bytes())


@pytest.fixture
def in_a_loop(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tasks run one after another in this process; returns those that have run."""
    done: list[Any] = []

    def each(task: Callable[[Any], dict[str, Any]], items: Sequence[Any], cpus: float | None) -> Iterator[Any]:
        for item in items:
            done.append(item)
            yield task(item)

    monkeypatch.setattr(pipeline, "each", each)
    return done


def documents(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(0, 256, rng.integers(0, 60)).tolist(), END] for _ in range(count)]


def plain_store(folder: Path, shards: Sequence[Sequence[Sequence[int]]]) -> TokenStore:
    """A store in the order of the text, with these documents in its shards."""
    extents = []
    for number, listed in enumerate(shards):
        ids = np.array([token for document in listed for token in document], dtype="<u2")
        extents.append(Extent(f"train-{number:05d}-00000.tokens", 0, len(ids)))
        write_shard(str(folder / extents[-1].shard), [ids], Header(np.dtype("<u2"), len(ids), BYTES))
    tokenizers.save(tokenizers.Bytes(), str(folder))
    count = sum(map(len, shards))
    Index("1" * 16, "test", BYTES, 257, END, "<u2", count, 9, tuple(extents), ()).write(str(folder))
    return open_store(str(folder))


def scattered(store: TokenStore, folder: Path, by_content: bool = False, **sizes: int) -> TokenStore:
    index = scatter.scatter(store, str(folder), "2" * 16, seed=7, by_content=by_content, **sizes)
    index.write(str(folder))
    return open_store(str(folder))


def shards_of(store: TokenStore) -> list[list[list[int]]]:
    """The documents of each shard."""
    found = []
    for run in store.train.runs():
        ends = (np.flatnonzero(run == END) + 1).tolist()
        found.append([run[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)])
    return found


def slow_scatter(shards: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """All documents, by the hash of shard and number."""
    keyed = []
    for number, listed in enumerate(shards):
        name = f"train-{number:05d}-00000.tokens".encode()
        place = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")
        keyed += [(slow_key(7, place, 0, n), document) for n, document in enumerate(listed)]
    return [document for _, document in sorted(keyed, key=lambda entry: entry[0])]


@pytest.mark.parametrize(
    "sizes",
    [
        {"bucket_bytes": 2000},
        {"bucket_bytes": 2000, "task_bytes": 3000},
        {"bucket_bytes": 700, "task_bytes": 3000, "fan_out": 4},  # three levels
        {"bucket_bytes": 10**9},
    ],
)
def test_the_shards_are_the_documents_sorted_by_a_keyed_hash(
    tmp_path: Path, in_a_loop: list[Any], sizes: dict[str, int]
) -> None:
    text = [documents(100, seed) for seed in range(4)]
    store = plain_store(tmp_path / "plain", text)
    result = scattered(store, tmp_path / "out", **sizes)
    found = [document for shard in shards_of(result) for document in shard]
    assert found == slow_scatter(text)
    assert len(result.index.train) == max(1, -(-2 * len(store.train) // sizes["bucket_bytes"]))
    assert result.index.documents == 400
    assert result.tokenizer.vocab == 257


def test_every_shard_is_a_fair_sample_of_a_sorted_text(tmp_path: Path, in_a_loop: list[Any]) -> None:
    text = [[[kind] * 20 + [END]] * 500 for kind in range(4)]
    result = scattered(plain_store(tmp_path / "plain", text), tmp_path / "out", bucket_bytes=8000)
    for shard in shards_of(result):
        kinds = np.bincount([document[0] for document in shard], minlength=4)
        expected = len(shard) / 4
        assert ((kinds - expected) ** 2 / expected).sum() < 21.1  # chi-square, 3 degrees of freedom, p = 0.0001


def test_copies_are_removed_and_counted(tmp_path: Path, in_a_loop: list[Any]) -> None:
    once = documents(200, 1)
    unique = {tuple(document) for document in once}
    text = [once[:150], [*once[150:], *once[20:60]], once[:10]]
    result = scattered(plain_store(tmp_path / "plain", text), tmp_path / "out", by_content=True, bucket_bytes=3000)
    found = [tuple(document) for shard in shards_of(result) for document in shard]
    assert sorted(found) == sorted(unique)
    copies = 250 - len(unique)
    tokens = sum(len(d) for part in text for d in part) - sum(map(len, unique))
    assert result.index.documents == len(unique)
    (note,) = result.index.notes
    assert note.startswith(f"{copies} copies of documents were removed: {tokens:,} tokens, ")


def test_different_documents_with_the_same_hash_are_kept(
    tmp_path: Path, in_a_loop: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "_content_key", lambda ids, seed: 5)
    text = [[[1, END], [2, END], [1, END], [3, END], [2, END]]]
    result = scattered(plain_store(tmp_path / "plain", text), tmp_path / "out", by_content=True)
    assert shards_of(result) == [[[1, END], [2, END], [3, END]]]


def test_a_document_that_is_cut_by_a_shards_end_is_ended_there(tmp_path: Path, in_a_loop: list[Any]) -> None:
    result = scattered(plain_store(tmp_path / "plain", [[[1, 2, 3]], [[4, 5, END]]]), tmp_path / "out")
    assert sorted(shards_of(result)[0]) == [[1, 2, 3, END], [4, 5, END]]


def test_a_killed_scatter_continues_with_what_is_missing(
    tmp_path: Path, in_a_loop: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plain_store(tmp_path / "plain", [documents(100, seed) for seed in range(4)])
    sizes = {"bucket_bytes": 700, "task_bytes": 3000, "fan_out": 4}
    whole = scattered(store, tmp_path / "whole", **sizes)
    written = []

    def dies(uri: str, *rest: Any) -> None:
        if len(written) == 11:
            raise KeyboardInterrupt
        written.append(uri)
        original(uri, *rest)

    original = scatter.write_bucket
    monkeypatch.setattr(scatter, "write_bucket", dies)
    with pytest.raises(KeyboardInterrupt):
        scattered(store, tmp_path / "out", **sizes)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tokens")}
    assert len(kept) == 11
    monkeypatch.setattr(scatter, "write_bucket", original)
    again = scattered(store, tmp_path / "out", **sizes)
    assert shards_of(again) == shards_of(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_memory_is_bounded_by_the_size_of_a_task(tmp_path: Path, in_a_loop: list[Any]) -> None:
    rng = np.random.default_rng(0)
    text = [[[*rng.integers(0, 256, 1000).tolist(), END]] * 50 for _ in range(60)]  # 6 MB
    store = plain_store(tmp_path / "plain", text)
    sizes = {"task_bytes": 600_000, "bucket_bytes": 300_000, "fan_out": 8}  # 21 buckets: two levels
    tracemalloc.start()
    scattered(store, tmp_path / "out", **sizes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * sizes["task_bytes"]  # read, joined, sorted, as bytes; less than the corpus


# prepare


def text_folder(folder: Path, count: int = 400) -> tuple[str, list[str]]:
    folder.mkdir()
    texts = [f"document {n} " + "word " * (n % 40) for n in range(count)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(texts[: count // 2]))
    (folder / "b.txt").write_text("\n<|endoftext|>\n".join(texts[count // 2 :]))
    return str(folder), texts


def test_prepare_scatters_on_ray_and_leaves_only_the_store(ray_cluster: None, tmp_path: Path) -> None:
    source, texts = text_folder(tmp_path / "text")
    watched: list[prepare.Progress] = []
    store = prepare.prepare(source, str(tmp_path / "out"), "bytes", scatter=True, watch=watched.append)
    plain = prepare.prepare(source, str(tmp_path / "plain"), "bytes", scatter=False)
    read = [bytes(d[:-1]).decode().strip() for shard in shards_of(store) for d in shard]
    assert sorted(read) == sorted(bytes(d[:-1]).decode().strip() for shard in shards_of(plain) for d in shard)
    assert read != sorted(read)
    assert [run.tolist() for run in store.val.runs()] == [run.tolist() for run in plain.val.runs()]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.json",
        "plan.json",
        "tokenizer.json",
        "train-0000000.tokens",
        "val.tokens",
    ]
    assert watched[-1].scattered == 1.0
    assert store.index.fingerprint != plain.index.fingerprint
    assert len(read) + sum(int((run == END).sum()) for run in plain.val.runs()) == len(texts)


@pytest.fixture
def job(tmp_path: Path, in_a_loop: list[Any], monkeypatch: pytest.MonkeyPatch) -> prepare.Job:
    """Of a text that is tokenised in the folder `out`, and scattered without Ray."""
    monkeypatch.setattr(prepare, "connected", contextlib.nullcontext)
    made = prepare.Job(prepare.resolve(text_folder(tmp_path / "text")[0]), "bytes", 0.05, scatter=True)
    plain = plain_store(tmp_path / "out" / "unscattered", [documents(100)])
    replace(plain.index, fingerprint=replace(made, scatter=False).fingerprint).write(plain.folder)
    return made


def test_of_two_runs_that_scatter_one_text_the_second_takes_what_the_first_completed(
    job: prepare.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, first = prepare.scatter, []

    def overtaken(*what: Any, **options: Any) -> Index:
        monkeypatch.setattr(prepare, "scatter", original)
        first.append(prepare.run(job, str(tmp_path / "out")))  # and deletes what this one is about to read
        return original(*what, **options)

    monkeypatch.setattr(prepare, "scatter", overtaken)
    second = prepare.run(job, str(tmp_path / "out"))
    assert shards_of(second) == shards_of(first[0])
    assert storage.folders(second.folder) == []


def test_folders_that_a_run_killed_at_the_end_has_left_are_deleted_by_the_next(
    job: prepare.Job, tmp_path: Path
) -> None:
    whole = shards_of(prepare.run(job, str(tmp_path / "out")))
    for name in ("unscattered", "runs"):
        storage.write_bytes(str(tmp_path / "out" / name / "x"), b"1")
    assert shards_of(prepare.run(job, str(tmp_path / "out"))) == whole
    assert storage.folders(str(tmp_path / "out")) == []


@pytest.mark.extended
def test_one_two_and_four_tasks_at_once_on_ray_write_the_same_bytes(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(scatter.scatter, bucket_bytes=1500, task_bytes=2000, fan_out=4)  # three levels
    monkeypatch.setattr(prepare, "scatter", small)
    source = prepare.resolve(text_folder(tmp_path / "text")[0])
    job = prepare.Job(source, "bytes", 0.05, scatter=True, dedup="exact")
    written = []
    for cpus in (1, 2, 4):
        store = prepare.run(job, str(tmp_path / str(cpus)), cpus=cpus)
        assert len(store.index.train) > 16
        written.append({path.name: path.read_bytes() for path in Path(store.folder).iterdir()})
    assert written[0] == written[1] == written[2]


@pytest.mark.extended
def test_tasks_on_ray_hold_little_of_a_corpus_of_ten_times_their_limit(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, peaks, original = 2_000_000, [], pipeline.each

    def each(task: Callable[[Any], dict[str, Any]], items: Sequence[Any], cpus: float | None) -> Iterator[Any]:
        def measured(item: Any) -> dict[str, Any]:  # in Ray's process
            tracemalloc.start()
            try:
                return {**task(item), "peak": tracemalloc.get_traced_memory()[1]}
            finally:
                tracemalloc.stop()

        for row in original(measured, items, cpus):
            peaks.append(row["peak"])
            yield row

    rng = np.random.default_rng(0)
    text = [[[*rng.integers(0, 256, 1000).tolist(), END]] * 100 for _ in range(100)]
    store = plain_store(tmp_path / "plain", text)
    assert len(store.train) * 2 > 10 * limit
    monkeypatch.setattr(pipeline, "each", each)
    found = scattered(store, tmp_path / "out", task_bytes=limit, bucket_bytes=limit // 2, fan_out=8)
    assert len(found.train) == len(store.train)
    assert len(peaks) > 2 * 10  # two levels, and the buckets
    assert max(peaks) < 6 * limit  # read, joined, sorted, as bytes


def test_text_is_scattered_by_itself_from_a_gigabyte_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = prepare.resolve(text_folder(tmp_path / "text")[0])
    assert not prepare.is_scattered(source, None, None)
    assert prepare.is_scattered(source, True, None)
    assert prepare.is_scattered(source, None, "exact")
    monkeypatch.setattr(prepare, "LARGE", source.size)
    assert prepare.is_scattered(source, None, None)
    assert not prepare.is_scattered(source, False, None)


def test_a_folder_of_unscattered_tokens_is_refused_for_scattered_ones(ray_cluster: None, tmp_path: Path) -> None:
    source, _ = text_folder(tmp_path / "text", 20)
    prepare.prepare(source, str(tmp_path / "out"), "bytes")
    with pytest.raises(RaygptError, match="holds tokens of another source, tokenizer or setting"):
        prepare.prepare(source, str(tmp_path / "out"), "bytes", scatter=True)
    assert storage.exists(str(tmp_path / "out" / "index.json"))


def test_a_scattered_store_in_an_object_store_has_the_rows_of_one_on_a_disk(
    ray_cluster: None, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, _ = text_folder(tmp_path / "text")
    near = prepare.prepare(source, str(tmp_path / "out"), "bytes", scatter=True, dedup="exact")
    far = prepare.prepare(source, f"{s3}/scattered", "bytes", scatter=True, dedup="exact")
    assert far.index == near.index
    assert set(storage.files(f"{s3}/scattered")) == {path.name for path in (tmp_path / "out").iterdir()}
    feeds = [Feed([store.train], context=16, batch_rows=8, seed=1) for store in (near, far)]
    for batch in (0, 3, 1000):
        assert feeds[0].rows(batch).tolist() == feeds[1].rows(batch).tolist()
    assert summarise(far) == summarise(near)
    far.train.close()
