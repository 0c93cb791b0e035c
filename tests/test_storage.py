"""Files on a disk and in S3: whole or not there, fetched once, and one line where a disk or a server says no."""

import errno
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from raygpt import storage
from raygpt.corpus.shards import Header, write_shard
from raygpt.errors import DamagedError, RaygptError, StorageError


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that does not exist yet, on either side."""
    if request.param == "local":
        return str(tmp_path / "new" / "folder")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies of remote files go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raygpt"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, where remote files are written first."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with these options."""
    path = tmp_path / "mounted"
    path.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount a tmpfs")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", str(path)], check=True)


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(RaygptError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What both sides do


def test_what_is_written_is_read(folder: str) -> None:
    content = os.urandom(3_000_000)
    storage.write_bytes(f"{folder}/x", content)
    assert storage.read_bytes(f"{folder}/x") == content
    with storage.open_read(f"{folder}/x") as stream:
        stream.seek(2_999_990)
        assert stream.read() == content[-10:]
    storage.write_bytes(f"{folder}/x", b"another")
    assert storage.read_bytes(f"{folder}/x") == b"another"


def test_a_file_exists_once_it_is_written_and_a_folder_is_no_file(folder: str) -> None:
    assert not storage.exists(f"{folder}/x")
    storage.write_bytes(f"{folder}/x", b"")
    assert storage.exists(f"{folder}/x")
    assert not storage.exists(folder)


def test_a_link_that_leads_back_to_itself_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "real").write_bytes(b"12")
    (tmp_path / "link").symlink_to("real")
    assert storage.sizes(str(tmp_path)) == {"real": 2, "link": 2}


def test_sizes_are_those_of_the_files_directly_in_a_folder(folder: str) -> None:
    assert storage.sizes(folder) == {}
    storage.write_bytes(f"{folder}/a", b"12345")
    storage.write_bytes(f"{folder}/b", b"")
    storage.write_bytes(f"{folder}/below/c", b"1")
    assert storage.sizes(folder) == {"a": 5, "b": 0}
    assert storage.sizes(f"{folder}/") == {"a": 5, "b": 0}


def test_deleting_removes_a_file_and_none_is_fine(folder: str) -> None:
    storage.write_bytes(f"{folder}/x", b"1")
    storage.write_bytes(f"{folder}/y", b"1")
    storage.delete(f"{folder}/x")
    storage.delete(f"{folder}/x")
    assert storage.sizes(folder) == {"y": 1}


def test_deleting_a_folder_removes_all_below_it_and_none_is_fine(folder: str) -> None:
    for name in ("x", "gone/x", "gone/below/x", "gone-not/x"):
        storage.write_bytes(f"{folder}/{name}", b"1")
    storage.delete_folder(f"{folder}/gone")
    storage.delete_folder(f"{folder}/gone")
    assert set(storage.files(folder)) == {"x", "gone-not/x"}
    assert storage.folders(folder) == ["gone-not"]


def test_the_files_of_a_remote_folder_are_not_deleted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Mock()
    monkeypatch.setattr(storage, "filesystem", lambda uri: (system, "bucket/folder"))
    storage.delete_folder("s3://bucket/folder")
    assert system.method_calls == [call.delete_dir("bucket/folder")]


def test_a_missing_file_is_a_file_not_found_error(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{folder}/missing")


class ReplacedWhileRead:
    """A file system where a file is replaced between the two requests of a read: its size, then its bytes."""

    def __init__(self, system: Any, contents: list[bytes]):
        self._system, self._contents = system, contents

    def open_input_file(self, path: str) -> Any:
        opened = self._system.open_input_file(path)  # asks for the size
        if self._contents:
            write_now(self._system, path, self._contents.pop(0))
        return opened


def write_now(system: Any, path: str, content: bytes) -> None:
    with system.open_output_stream(path) as stream:
        stream.write(content)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[bytes]], None]:
    def replace(uri: str, contents: list[bytes]) -> None:
        system, path = storage.filesystem(uri)
        monkeypatch.setattr(storage, "filesystem", lambda _: (ReplacedWhileRead(system, contents), path))

    return replace


@pytest.mark.parametrize("after", [b'{"10": 5.5, "20": 5.25}', b"{}"])  # longer: cut; shorter: filled with nulls
def test_a_remote_file_that_is_replaced_while_it_is_read_is_read_again(
    s3: str, tmp_path: Path, replaced: Callable[[str, list[bytes]], None], after: bytes
) -> None:
    uri = f"{s3}/{tmp_path.name}/scores.json"
    storage.write_bytes(uri, b'{"10": 5.5}')
    replaced(uri, [after, b"{}", after])
    assert storage.read_bytes(uri) == after


def test_a_remote_file_that_is_replaced_each_time_is_refused_in_one_line(
    s3: str, tmp_path: Path, replaced: Callable[[str, list[bytes]], None]
) -> None:
    uri = f"{s3}/{tmp_path.name}/busy.json"
    storage.write_bytes(uri, b"0")
    replaced(uri, [str(number).encode() for number in range(1, 100)])
    assert "was replaced each time it was read" in refusal(storage.read_bytes, uri)


def test_json_that_is_torn_twice_is_read_a_third_time(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_bytes(f"{folder}/x.json", b'{"10": 5.5, "20": 5.25}')
    whole = storage.read_bytes
    torn = [b'{"10": 5.5,', b'{"10": 5.5}\0\0']
    monkeypatch.setattr(storage, "read_bytes", lambda uri: torn.pop() if torn else whole(uri))
    assert storage.read_json(f"{folder}/x.json") == {"10": 5.5, "20": 5.25}


def test_json_that_is_damaged_is_refused_with_what_to_do_and_none_is_none(folder: str) -> None:
    assert storage.read_json(f"{folder}/x.json") is None
    storage.write_bytes(f"{folder}/x.json", b'{"10": 5.5,')
    with pytest.raises(DamagedError, match=r"x.json is damaged .*; copy it again"):
        storage.read_json(f"{folder}/x.json", "copy it again")


@pytest.mark.parametrize("name", ["two words.txt", "ü.txt", "100%.txt", "a#b?c=d&e+f.txt", "[x]*.txt"])
def test_names_may_hold_what_uris_escape(folder: str, name: str) -> None:
    storage.write_bytes(f"{folder}/{name}", name.encode())
    assert storage.sizes(folder) == {name: len(name.encode())}
    assert storage.read_bytes(f"{folder}/{name}") == name.encode()


def write_half(uri: str) -> None:
    with storage.atomic_write(uri) as path:
        path.write_bytes(b"half of it")
        raise ZeroDivisionError


def test_a_block_that_fails_leaves_nothing(folder: str, temporary: Path) -> None:
    storage.write_bytes(f"{folder}/x", b"before")
    for name in ("x", "y"):
        with pytest.raises(ZeroDivisionError):
            write_half(f"{folder}/{name}")
    assert storage.sizes(folder) == {"x": 6}
    assert list(temporary.iterdir()) == []


def test_a_file_has_its_name_only_after_the_block(folder: str, temporary: Path) -> None:
    with storage.atomic_write(f"{folder}/x") as path:
        path.write_bytes(b"whole")
        assert not storage.exists(f"{folder}/x")
    assert storage.read_bytes(f"{folder}/x") == b"whole"
    assert storage.sizes(folder) == {"x": 5}
    assert list(temporary.iterdir()) == []


# Names


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("runs/a", "runs/a/x/y"),
        ("/", "/x/y"),
        ("/runs/", "/runs/x/y"),
        ("s3://b", "s3://b/x/y"),
        ("s3://b/c/", "s3://b/c/x/y"),
    ],
)
def test_names_are_joined_with_one_slash(folder: str, expected: str) -> None:
    assert storage.join(folder, "x", "y") == expected


def test_an_absolute_name_means_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert storage.absolute("runs") == f"{tmp_path}/runs"
    assert storage.absolute("/runs") == "/runs"
    assert storage.absolute("~/runs") == "/home/someone/runs"
    assert storage.absolute("s3://bucket/runs") == "s3://bucket/runs"


@pytest.mark.parametrize("uri", ["ftp://host/x", "https://host/x", "gs://bucket/x"])
def test_a_scheme_that_is_not_known_is_refused(uri: str) -> None:
    message = refusal(storage.read_bytes, uri)
    assert message.startswith(f"{uri}: ")
    assert message.endswith("; a local path or s3://bucket/path is expected")


# Copies on this node


def test_a_local_file_is_used_where_it_lies(tmp_path: Path, cache: Path) -> None:
    assert storage.fetch_to_node(str(tmp_path / "x"), "group") == tmp_path / "x"
    assert not cache.exists()


def test_a_remote_file_is_fetched_once(s3: str, cache: Path, tmp_path: Path) -> None:
    uri = f"{s3}/{tmp_path.name}/x.tokens"
    storage.write_bytes(uri, b"content")
    path = storage.fetch_to_node(uri, "group")
    assert path == cache / "group" / "x.tokens"
    assert path.read_bytes() == b"content"
    storage.delete(uri)
    assert storage.fetch_to_node(uri, "group").read_bytes() == b"content"  # without a look at the server
    assert sorted(file.name for file in path.parent.iterdir()) == ["x.lock", "x.tokens"]


def test_files_of_two_groups_are_kept_apart(s3: str, cache: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        uri = f"{s3}/{tmp_path.name}/{number}/x.tokens"
        storage.write_bytes(uri, b"%d" % number)
        assert storage.fetch_to_node(uri, f"group-{number}").read_bytes() == b"%d" % number


def test_without_a_cache_folder_the_home_folder_has_one(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    storage.write_bytes(f"{s3}/{tmp_path.name}/x", b"1")
    expected = tmp_path / ".cache" / "raygpt" / "group" / "x"
    assert storage.fetch_to_node(f"{s3}/{tmp_path.name}/x", "group") == expected


def test_workers_of_a_node_that_want_the_same_file_fetch_it_once(
    s3: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, fetched = f"{s3}/{tmp_path.name}/x.tokens", []
    storage.write_bytes(uri, os.urandom(100_000))
    download, together = storage.download, threading.Barrier(4)

    def counted(uri: str, path: Path) -> None:
        fetched.append(uri)
        download(uri, path)

    def worker() -> None:
        together.wait(30)
        storage.fetch_to_node(uri, "group")

    monkeypatch.setattr(storage, "download", counted)
    workers = [threading.Thread(target=worker) for _ in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert fetched == [uri]


def test_a_remote_file_that_has_gone_is_refused_and_nothing_is_kept(s3: str, cache: Path) -> None:
    expected = f"{s3}/gone no longer exists; copy it there again, or prepare the source again"
    assert refusal(storage.fetch_to_node, f"{s3}/gone", "group") == expected
    assert [file.name for file in (cache / "group").iterdir()] == ["gone.lock"]


# What disks and servers refuse


def test_a_bucket_that_does_not_exist_is_refused_in_one_line(s3: str, temporary: Path) -> None:
    message = refusal(storage.write_bytes, "s3://no-such-bucket/x", b"1")
    assert message.startswith("s3://no-such-bucket/x cannot be reached (")
    assert "NO_SUCH_BUCKET" in message
    assert message.endswith("); check the name, the credentials and the network")
    assert list(temporary.iterdir()) == []


class Forbidding:
    """An object store to which one has no right: every call raises what Arrow's does."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body.\nmore")


@pytest.mark.parametrize("call", [storage.exists, storage.sizes, storage.read_bytes, storage.delete])
def test_a_server_that_refuses_is_named_in_one_line(
    call: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "filesystem", lambda uri: (Forbidding(), "bucket/x"))
    assert refusal(call, "s3://bucket/x") == (
        "s3://bucket/x cannot be reached (AWS Error ACCESS_DENIED during HeadObject operation: No response body.); "
        "check the name, the credentials and the network"
    )


def test_a_network_failure_before_the_first_request_is_of_the_storage_and_a_wrong_name_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrow asks S3 for a bucket's region when it opens the bucket: a retry may help that, but never a wrong name."""
    from pyarrow import fs

    failed = "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation"
    monkeypatch.setattr(fs, "FileSystem", Mock(from_uri=Mock(side_effect=OSError(failed))))
    with pytest.raises(StorageError, match=r"s3://b/x cannot be reached \(When resolving region"):
        storage.exists("s3://b/x")
    monkeypatch.setattr(fs, "FileSystem", Mock(from_uri=Mock(side_effect=ValueError("no bucket in it"))))
    with pytest.raises(RaygptError, match="s3://b/x: no bucket in it; a local path or s3://bucket/path") as refused:
        storage.exists("s3://b/x")
    assert not isinstance(refused.value, StorageError)


def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        expected = f"{folder} cannot be made: a file is where a folder should be; choose another folder"
        assert refusal(storage.write_bytes, f"{folder}/x", b"1") == expected
        assert refusal(storage.make_folder, str(folder)) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_where_a_file_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    expected = f"{tmp_path}/x cannot be written (Is a directory); choose a folder that you may write to"
    assert refusal(storage.write_bytes, str(tmp_path / "x"), b"1") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_folder_that_nobody_may_make_is_refused() -> None:
    expected = "/proc/x cannot be written (No such file or directory); choose a folder that you may write to"
    assert refusal(storage.write_bytes, "/proc/x/y", b"1") == expected


def test_a_read_only_disk_is_refused_before_anything_is_written(mounted: Callable[[str], Path]) -> None:
    folder = mounted("ro") / "runs" / "deep"
    assert refusal(storage.ensure_writable, str(folder)) == (
        f"{folder} cannot be written (Read-only file system); choose a folder that you may write to"
    )
    storage.ensure_writable("s3://bucket/runs")


def test_a_read_only_disk_is_refused(mounted: Callable[[str], Path]) -> None:
    disk = mounted("ro")
    remedy = "choose a folder that you may write to"
    expected = f"{disk}/x cannot be written (Read-only file system); {remedy}"
    assert refusal(storage.write_bytes, f"{disk}/x", b"1") == expected
    expected = f"{disk}/new cannot be written (Read-only file system); {remedy}"
    assert refusal(storage.write_bytes, f"{disk}/new/x", b"1") == expected


NO_SPACE = "no space left for {}; free some or use another disk, then run the same command again"


def test_a_full_disk_is_refused_and_nothing_half_made_is_left(mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=1m")
    assert refusal(storage.write_bytes, f"{disk}/x", bytes(2**21)) == NO_SPACE.format(f"{disk}/x")
    assert list(disk.iterdir()) == []
    storage.write_bytes(f"{disk}/x", bytes(2**19))  # what fits is still written


@pytest.mark.parametrize("tokens", [10**6, 600 * 1024])
def test_a_shard_that_does_not_fit_is_refused_and_nothing_half_made_is_left(
    mounted: Callable[[str], Path], tokens: int
) -> None:
    disk = mounted("size=1m")
    ids, header = np.zeros(tokens, dtype=np.uint16), Header(np.dtype("<u2"), tokens, "0" * 16)
    expected = NO_SPACE.format(f"{disk}/x.tokens")
    assert refusal(write_shard, f"{disk}/x.tokens", np.array_split(ids, 100), header) == expected
    assert refusal(write_shard, f"{disk}/x.tokens", [ids], header) == expected
    assert list(disk.iterdir()) == []


def test_a_copy_that_does_not_fit_on_this_node_is_refused(
    mounted: Callable[[str], Path], s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mounted("size=1m")
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    storage.write_bytes(f"{s3}/large", bytes(2**21))
    path = disk / "raygpt" / "group" / "large"
    assert refusal(storage.fetch_to_node, f"{s3}/large", "group") == NO_SPACE.format(path)
    assert [file.name for file in path.parent.iterdir()] == ["large.lock"]


def full(path: Path, content: bytes) -> None:
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    assert refusal(storage.write_bytes, f"{tmp_path}/x", b"1") == NO_SPACE.format(f"{tmp_path}/x")
    assert list(tmp_path.iterdir()) == []


def test_no_space_to_write_a_remote_file_aside_names_the_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    assert refusal(storage.write_bytes, "s3://bucket/x", b"1") == NO_SPACE.format(temporary)
    assert list(temporary.iterdir()) == []


def test_sizes_do_not_stumble_over_a_file_that_is_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"123")
    (tmp_path / ".y.tmp").write_bytes(b"1")
    entries = list(os.scandir(tmp_path))
    (tmp_path / ".y.tmp").rename(tmp_path / "y")
    monkeypatch.setattr(os, "scandir", lambda folder: iter(entries))
    assert storage.sizes(str(tmp_path)) == {"x": 3}
