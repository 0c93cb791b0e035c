"""Prepare when something goes wrong: what is refused in one line, and what a killed one continues."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import gzip
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_prepare import _cluster, check, contents, ids, large, of_bytes, refusal, sides, text_file, times, words  # noqa: F401

from raygpt.corpus.prepare import Progress, prepare


def test_what_is_wrong_in_a_file_is_said_in_one_line_and_mended(large: tuple[str, list[str]], tmp_path: Path) -> None:
    source, folder = tmp_path / "texts", tmp_path / "store"
    shutil.copytree(large[0], source)
    third = source / "2.txt"
    good = third.read_bytes()
    place = good.index(b"\n", 2_000_000)
    third.write_bytes(good[:place] + b"\xff" + good[place:])
    message = f"{third}: invalid UTF-8 at byte {place}; convert it, e.g. iconv -f latin1 -t utf-8"
    for _ in range(2):
        assert refusal(str(source), str(folder), "bytes", val=0.2) == message
        assert not (folder / "index.json").exists()
    third.write_bytes(good)
    check(prepare(str(source), str(folder), "bytes", val=0.2), *map(of_bytes, sides(large[1], 0.2)))


def test_a_broken_archive_is_said_in_one_line_and_mended(tmp_path: Path) -> None:
    documents = [words(seed, 2000) for seed in range(9)]
    source, folder = tmp_path / "texts", tmp_path / "store"
    for number in range(3):
        text_file(source / f"{number}.txt", documents[3 * number : 3 * number + 3])
    plain = (source / "1.txt").read_bytes()
    (source / "1.txt").unlink()
    (source / "1.txt.gz").write_bytes(gzip.compress(plain)[:-20])
    message = refusal(str(source), str(folder), "bytes", val=0.2)
    assert message.startswith(f"{source}/1.txt.gz is not a complete .gz file (")
    assert message.endswith("; download or write it again")
    assert not (folder / "index.json").exists()
    (source / "1.txt.gz").write_bytes(gzip.compress(plain))
    check(prepare(str(source), str(folder), "bytes", val=0.2), *map(of_bytes, sides(documents, 0.2)))


def test_shards_of_files_that_have_changed_since_are_not_used(tmp_path: Path) -> None:
    source, folder = tmp_path / "x.txt", tmp_path / "store"
    old, new = [[words(seed, 200) for seed in range(first, first + 50)] for first in (0, 100)]
    prepare(text_file(source, old), str(folder), "bpe:300", val=0.2)
    (folder / "index.json").unlink()
    store = prepare(text_file(source, new), str(folder), "bpe:300", val=0.2)
    undisturbed = prepare(str(source), str(tmp_path / "other"), "bpe:300", val=0.2)
    assert contents(folder) == contents(tmp_path / "other")
    assert store.tokenizer.decode(ids(undisturbed.val).tolist()) == "".join(
        f"{text}<|endoftext|>" for text in sides(new, 0.2)[1]
    )


def test_a_corpus_of_blank_documents_is_refused(tmp_path: Path) -> None:
    source = text_file(tmp_path / "x.txt", [" \n", "\n\n", "\t\n"])
    assert refusal(source, str(tmp_path / "store"), "bytes", val=0.1) == (
        f"{source} has no text in it: every document is blank; name another source"
    )
    assert not (tmp_path / "store" / "index.json").exists()


def test_a_folder_of_another_corpus_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    first = text_file(tmp_path / "a.txt", [words(seed, 20) for seed in range(40)])
    other = text_file(tmp_path / "b.txt", [words(seed, 20) for seed in range(100, 140)])
    folder = tmp_path / "store"
    prepare(first, str(folder), "bytes", val=0.2)
    message = f"{folder} holds tokens of another source, tokenizer or setting; choose another folder, or delete it"
    for whole in (True, False):  # a store, and one that is not finished
        before = times(folder)
        changes: list[dict[str, Any]] = [
            {"source": other},
            {"tokenizer": "char"},
            {"val": 0.3},
            {"val": other},
            {"split": "tail"},
            {"split_seed": 1},
        ]
        for change in changes:
            assert (
                refusal(**{"source": first, "folder": str(folder), "tokenizer": "bytes", "val": 0.2} | change)
                == message
            )
        assert times(folder) == before
        if whole:
            (folder / "index.json").unlink()


def test_an_index_that_was_lost_is_all_that_is_made_again(tmp_path: Path) -> None:
    documents = [words(seed, 20) for seed in range(40)]
    source, folder = text_file(tmp_path / "x.txt", documents), tmp_path / "store"
    prepare(source, str(folder), "bytes", val=0.2)
    before, files = times(folder), contents(folder)
    (folder / "index.json").unlink()
    watched: list[Progress] = []
    check(prepare(source, str(folder), "bytes", val=0.2, watch=watched.append), *map(of_bytes, sides(documents, 0.2)))
    assert contents(folder) == files
    shards = {name for name in files if name.startswith(("train-", "val-"))}
    assert shards
    assert {name: times(folder)[name] for name in shards} == {name: before[name] for name in shards}
    assert (watched[-1].documents, watched[-1].source_bytes) == (40, Path(source).stat().st_size)


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "plan.json").write_text('{"fing')
    source = text_file(tmp_path / "x.txt", ["text"])
    message = refusal(source, str(tmp_path / "store"), "bytes")
    assert message.startswith(f"{tmp_path}/store/plan.json is damaged (")
    assert message.endswith("; delete it and run the same command again")


GATED = """
import time
from raygpt import cli
from raygpt.corpus import pipeline, prepare

real, prepare.part_bytes = pipeline._tokenise, lambda source: 1  # each file is a unit

def tokenise(row, **options):
    while row["unit"] == 3:  # the last; only one, or it would keep the others from a core
        time.sleep(0.1)
    return real(row, **options)

pipeline._tokenise = tokenise
cli.main()
"""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, Path]:
    """A source, and the folder of a `raygpt prepare` that was killed when the last of four units was missing."""
    for number in range(4):
        text_file(tmp_path / "texts" / f"{number}.txt", [words(100 * number + seed, 50) for seed in range(100)])
    folder = tmp_path / "killed"
    root = str(Path(sys.modules["raygpt"].__file__ or "").parents[1])
    command = [sys.executable, "-c", GATED, "prepare", str(tmp_path / "texts"), "--out", str(folder), "--val", "0.2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": root}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while len(list(folder.glob("*.tokens"))) < 6:  # of each unit one to train on, one to validate
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return tmp_path / "texts", folder


def test_a_prepare_that_was_killed_continues_where_it_stopped(
    killed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygpt.corpus.prepare.part_bytes", lambda source: 1)
    source, folder = killed
    before, found = times(folder), contents(folder)
    assert "index.json" not in found
    (folder / ".train-00003-00000.tokens.0123abcd.tmp").write_bytes(b"half a shard")  # as a killed writer leaves it
    store = prepare(str(source), str(folder), "gpt2", val=0.2)
    prepare(str(source), str(tmp_path / "whole"), "gpt2", val=0.2)
    whole = contents(tmp_path / "whole")
    assert contents(folder) == whole
    shards = {name for name in found if name.endswith(".tokens")}
    assert len(shards) == 6
    assert sum(name.startswith("train-") for name in whole) == 4
    assert all(found[name] == whole[name] for name in shards)  # none was half a shard
    after = times(folder)
    assert {name: after[name] for name in shards} == {name: before[name] for name in shards}
    assert store.index.documents == 4 * 100


@pytest.mark.extended  # test_cli.py has it for the command in this process
def test_the_command_says_what_is_wrong_in_one_line_and_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"fine\n\xff\n")
    root = str(Path(sys.modules["raygpt"].__file__ or "").parents[1])
    command = [sys.executable, "-m", "raygpt", "prepare", str(path), "--out", str(tmp_path / "store")]
    done = subprocess.run(
        [*command, "--tokenizer", "bytes"], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    message = f"error: {path}: invalid UTF-8 at byte 5; convert it, e.g. iconv -f latin1 -t utf-8\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
