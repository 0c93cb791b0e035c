"""A node's disk cache of blocks of shards: bounded, and shared by all processes of the node.

    ~/.cache/raygpt/blocks/
      lock                           held while files are added or evicted
      needs/1f0c3a7b.json            blocks that a live process will need, and when; it holds a lock on this file
      0123456789abcdef/0000042/17    block 17 of shard 42 of the store with that fingerprint

What no process needs is evicted first, then what is needed last. The limit holds at all times: room is made before a
block is written. A file here is complete, or was cut off by a power failure, which its checksum shows.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from raygpt import storage
from raygpt.errors import RaygptError

FREE_SHARE = 0.5  # of the disk space that is free or cached already: the default limit
SPARE_SHARE = 1 / 16  # of the limit: so much of what nobody needs is evicted at once, since listing takes a while
NEVER = float("inf")
FULL = (errno.ENOSPC, errno.EDQUOT)


class Block(NamedTuple):
    """A block of a shard; number -1 is the shard's head: header and checksums."""

    store: str  # fingerprint
    shard: int
    number: int


class Need(NamedTuple):
    """Blocks first…end-1 of a shard, needed at a time of this node's clock."""

    store: str
    shard: int
    first: int
    end: int
    when: float


class BlockCache:
    """Blocks by name, at most `limit` bytes of them."""

    def __init__(self, limit: int | None = None, folder: Path | None = None):
        self.folder = folder or storage.cache_folder() / "blocks"
        storage.make_folder(str(self.folder / "needs"))
        (self.folder / "lock").touch()
        self._used: int | None = None  # by the last count, plus what this process added since
        self.limit = limit or self._default_limit()
        self._needs = _NeedsFile(self.folder / "needs")

    def path(self, block: Block) -> Path:
        return self.folder / block.store / f"{block.shard:07d}" / str(block.number)

    def read(self, block: Block, start: int, length: int) -> bytes | None:
        """Some bytes of a block; None if it is not here."""
        try:
            file = os.open(self.path(block), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.pread(file, length, start)
        finally:
            os.close(file)

    def publish(self, needs: Sequence[Need]) -> None:
        """Publish for the node's other processes what this one will need, unless the disk is full."""
        with _full_disk_ignored():
            self._needs.write(needs)

    def make_room(self, size: int, when: float) -> bool:
        """Whether `size` more bytes fit, if need be after evicting what is needed after `when`."""
        with self._locked():
            return self._make_room(size, when) and shutil.disk_usage(self.folder).free >= size

    def add(self, blocks: Mapping[Block, bytes], when: float) -> bool:
        """Keep blocks that are needed at `when`. False if there is no room, or the disk is full."""
        with self._locked():
            new = {block: content for block, content in blocks.items() if not self.path(block).exists()}
            if not self._make_room(sum(map(len, new.values())), when):
                return False
            return all(self._write(self.path(block), content) for block, content in new.items())

    def remove(self, block: Block) -> None:
        """Delete a block that turned out to be damaged."""
        self.path(block).unlink(missing_ok=True)

    def close(self) -> None:
        self._needs.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._used = int(file.read() or -1)
            try:
                yield
            finally:  # the count is shared, so that files need not be listed each time
                file.seek(0)
                with _full_disk_ignored():
                    file.write(b"%20d" % self._used)  # always as long, so that a full disk has room for it

    def _default_limit(self) -> int:
        """Half of what is free, counting what is cached already as free."""
        with self._locked():
            cached = sum(length for _, length in self._list())
        return int((shutil.disk_usage(self.folder).free + cached) * FREE_SHARE)

    def _write(self, path: Path, content: bytes) -> bool:
        aside = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(content)
            aside.replace(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            if error.errno in FULL:
                return False
            raise RaygptError(
                f"{path} cannot be written ({os.strerror(error.errno or 0)}); set XDG_CACHE_HOME to a folder that you "
                "may write to"
            ) from error
        self._used = (self._used or 0) + len(content)
        return True

    def _make_room(self, size: int, when: float) -> bool:
        if self._used is not None and 0 <= self._used <= self.limit - size:
            return True
        needs = _by_shard(self._needs.all())
        held = [(_when(needs, block), length, block) for block, length in self._list()]
        self._used = sum(length for _, length, _ in held)
        wanted = self._used + size - self.limit
        for needed, length, block in sorted(held, key=lambda entry: -entry[0]):
            spare = needed == NEVER and wanted > -self.limit * SPARE_SHARE
            if not spare and (wanted <= 0 or needed <= when):
                break
            self.path(block).unlink(missing_ok=True)
            self._used -= length
            wanted -= length
        return wanted <= 0

    def _list(self) -> Iterator[tuple[Block, int]]:
        """Every block with its size. Files of writers that were killed, and folders whose blocks were all evicted, are
        deleted: only a lock's holder writes."""
        for store in _folders(self.folder):
            for shard in _folders(Path(store.path)) if store.name != "needs" else ():
                files = list(os.scandir(shard.path))
                if not files:
                    Path(shard.path).rmdir()
                for file in files:
                    if file.name.endswith(".tmp"):
                        Path(file.path).unlink()
                        continue
                    with contextlib.suppress(FileNotFoundError):  # damaged, and removed since
                        yield Block(store.name, int(shard.name), int(file.name)), file.stat().st_size


class _NeedsFile:
    """This process's needs, and those of the node's other live processes: each holds a lock on its file."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = (folder / f"{uuid.uuid4().hex[:8]}.json").open("wb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, needs: Sequence[Need]) -> None:
        # In place: a replaced file would have no lock. A reader that finds half of it takes it for no needs.
        self._file.seek(0)
        self._file.write(json.dumps(needs).encode() + b"\n")
        self._file.truncate()

    def all(self) -> Iterator[Need]:
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError, ValueError), path.open() as file:
                if path.name != Path(self._file.name).name and storage.try_lock(file):
                    path.unlink()  # its process has ended
                else:
                    yield from (Need(*need) for need in json.loads(file.read() or "[]"))

    def close(self) -> None:
        Path(self._file.name).unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def _full_disk_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def _folders(folder: Path) -> Iterator["os.DirEntry[str]"]:
    return (entry for entry in os.scandir(folder) if entry.is_dir())


def _by_shard(needs: Iterator[Need]) -> dict[tuple[str, int], list[Need]]:
    found: dict[tuple[str, int], list[Need]] = {}
    for need in needs:
        found.setdefault((need.store, need.shard), []).append(need)
    return found


def _when(needs: Mapping[tuple[str, int], Sequence[Need]], block: Block) -> float:
    """When a block is needed first; a head as soon as any of its shard's blocks."""
    mine = needs.get((block.store, block.shard), ())
    times = [need.when for need in mine if block.number < 0 or need.first <= block.number < need.end]
    return min(times, default=NEVER)


def now() -> float:
    """The clock of needs, which all processes of a node share."""
    return time.time()
