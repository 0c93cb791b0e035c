"""File operations on local paths and object stores (`s3://…`): the few that raygpt needs.

Writes are atomic: on a disk a temporary file is written and renamed; in an object store a put is atomic.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from raygpt.errors import DamagedError, RaygptError, StorageError, first_line

REREAD_S = (0.0, 0.01, 0.03, 0.1, 0.3)  # pauses before a file that was replaced during the read is read again


def is_remote(uri: str) -> bool:
    """True for `s3://…` and the like, False for a path."""
    return "://" in uri


def join(folder: str, *names: str) -> str:
    """`folder/name`, for paths and URIs."""
    return "/".join([folder.rstrip("/"), *names])


def absolute(folder: str) -> str:
    """An absolute path or URI, valid in every process."""
    return folder if is_remote(folder) else str(Path(folder).expanduser().absolute())


def digest(text: str) -> str:
    """A short hash, for names."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def filesystem(uri: str) -> tuple[Any, str]:
    """Arrow's file system for a remote URI, and the path within it."""
    from pyarrow import fs

    if uri.startswith("hf://"):
        return fs.PyFileSystem(fs.FSSpecHandler(_hugging_face())), uri.removeprefix("hf://")
    if not uri.startswith("s3://"):  # Arrow knows others, e.g. gs://, and tries for minutes to reach them
        scheme = uri.partition("://")[0]
        raise RaygptError(f"{uri}: {scheme}:// is not supported; a local path or s3://bucket/path is expected")
    try:
        with reached(uri):  # S3 is asked for the bucket's region
            system, path = fs.FileSystem.from_uri(quote(uri, safe=":/"))  # names may hold spaces, umlauts, # and %
    except ValueError as error:
        raise RaygptError(f"{uri}: {error}; a local path or s3://bucket/path is expected") from error
    return system, path


def require_hugging_face() -> None:
    """Raise if the extra is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise RaygptError("Hugging Face datasets need the extra hf: pip install 'raygpt[hf]'")


def _hugging_face() -> Any:
    require_hugging_face()
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def exists(uri: str) -> bool:
    """Whether a file of that name exists."""
    if not is_remote(uri):
        return Path(uri).is_file()
    from pyarrow import fs

    system, path = filesystem(uri)
    with reached(uri):
        return bool(system.get_file_info(path).type == fs.FileType.File)


def sizes(folder: str) -> dict[str, int]:
    """Name and size of every file directly in a folder; empty if there is no such folder."""
    if not is_remote(folder):
        return _local_sizes(folder)
    from pyarrow import fs

    system, path = filesystem(folder)
    with reached(folder):
        found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return {info.base_name: info.size for info in found if info.type == fs.FileType.File}


def _local_sizes(folder: str) -> dict[str, int]:
    found = {}
    for entry in os.scandir(folder) if Path(folder).is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another process's temporary file, renamed since
            if not _is_circular(entry) and entry.is_file():
                found[entry.name] = entry.stat().st_size
    return found


def _is_circular(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a link that leads back to itself, which `is_file` raises for."""
    return entry.is_symlink() and not Path(entry.path).exists()


def files(folder: str) -> dict[str, int]:
    """Name and size of every file in a folder and those below it, e.g. {"part/x": 12}."""
    if not is_remote(folder):
        return _local_files(Path(folder))
    from pyarrow import fs

    system, path = filesystem(folder)
    with reached(folder):
        listed = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return {info.path.removeprefix(f"{path}/"): info.size for info in listed if info.type == fs.FileType.File}


def _local_files(folder: Path) -> dict[str, int]:
    found = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted since
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def folders(folder: str) -> list[str]:
    """Names of the folders directly in a folder."""
    if not is_remote(folder):
        return sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) if Path(folder).is_dir() else []
    from pyarrow import fs

    system, path = filesystem(folder)
    with reached(folder):
        listed = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(info.base_name for info in listed if info.type == fs.FileType.Directory)


def open_read(uri: str) -> BinaryIO:
    """A stream of the file's bytes."""
    if not is_remote(uri):
        return Path(uri).open("rb")
    system, path = filesystem(uri)
    with reached(uri):
        return io.BufferedReader(system.open_input_file(path), 2**20)


def read_bytes(uri: str) -> bytes:
    """The file's content at one moment.

    Arrow asks an object store for the size first, then for that many bytes. If the file is replaced in between, the
    result is truncated, or padded with null bytes to the old size: such a read is repeated.
    """
    if not is_remote(uri):
        return Path(uri).read_bytes()  # an open file keeps its old content when it is replaced
    system, path = filesystem(uri)
    for pause in (*REREAD_S, 0.0):
        with reached(uri), system.open_input_file(path) as stream:
            content, version = bytes(stream.readall()), stream.metadata()  # version: ETag and date, if any
            if not version or system.open_input_file(path).metadata() == version:
                return content
        time.sleep(pause)
    raise StorageError(f"{uri} was replaced each time it was read; run the same command again")


def read_json(uri: str, remedy: str = "delete it and run the same command again", form: Any = None) -> Any:
    """The content of a JSON file; None if there is no file. Invalid JSON, or what does not have the type `form` (for an
    object: a dataclass with the keys that it must have), is read again before it is refused."""
    for pause in (*REREAD_S, None):
        try:
            content = read_bytes(uri)
            read = json.loads(content)
            if form is not None:
                TypeAdapter(form).validate_json(content, strict=True)
            return read
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            break
        except ValueError as error:
            if pause is None:
                raise DamagedError(f"{uri} is damaged ({_reason(error)}); {remedy}") from error
            time.sleep(pause)
    return None


def _reason(error: ValueError) -> str:
    """Why a JSON file was refused, e.g. "renewed: Input should be a valid number"."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def write_bytes(uri: str, content: bytes) -> None:
    """Write a file atomically, replacing one of that name."""
    with atomic_write(uri) as path:
        path.write_bytes(content)


def write_json(uri: str, value: Any) -> None:
    """Write a JSON file atomically, indented for people who open it."""
    write_bytes(uri, json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def atomic_write(uri: str) -> Iterator[Path]:
    """Yields a temporary local file to write. It becomes `uri` when the block succeeds; otherwise it is deleted.

    with atomic_write("s3://bucket/x") as path:
        path.write_bytes(...)
    """
    aside = _aside(uri)
    try:
        yield aside
        if is_remote(uri):
            _upload(aside, uri)
        else:
            with aside.open("rb") as file:
                os.fsync(file.fileno())  # otherwise a power cut could leave an empty file
            aside.replace(uri)
    except OSError as error:
        raise _explained(error, str(aside.parent) if is_remote(uri) else uri) from error
    finally:
        with contextlib.suppress(OSError):  # renamed already, or never created, e.g. on a read-only disk
            aside.unlink()


def _aside(uri: str) -> Path:
    """The temporary file of a write: beside the final one, or in the temporary folder if that is remote."""
    unique = f".{uri.rsplit('/', 1)[-1]}.{uuid.uuid4().hex[:8]}.tmp"
    if is_remote(uri):
        return Path(tempfile.gettempdir()) / unique
    make_folder(str(Path(uri).parent))
    return Path(uri).parent / unique


def _upload(path: Path, uri: str) -> None:
    from pyarrow import fs

    system, target = filesystem(uri)
    with reached(uri):
        fs.copy_files(str(path), target, source_filesystem=fs.LocalFileSystem(), destination_filesystem=system)


def download(uri: str, path: Path) -> None:
    """Copy a remote file to a local one, atomically."""
    from pyarrow import fs

    if not exists(uri):
        raise RaygptError(f"{uri} no longer exists; copy it there again, or prepare the source again")
    system, source = filesystem(uri)
    with atomic_write(str(path)) as aside, reached(uri):
        fs.copy_files(source, str(aside), source_filesystem=system, destination_filesystem=fs.LocalFileSystem())


def delete(uri: str) -> None:
    """Remove a file, if it exists."""
    if not is_remote(uri):
        Path(uri).unlink(missing_ok=True)
    elif exists(uri):
        system, path = filesystem(uri)
        with reached(uri):
            system.delete_file(path)


def delete_folder(uri: str) -> None:
    """Remove a folder and its contents, if it exists."""
    if not is_remote(uri):
        shutil.rmtree(uri, ignore_errors=True)
        return
    system, path = filesystem(uri)
    with reached(uri), contextlib.suppress(FileNotFoundError):
        system.delete_dir(path)  # a thousand files a request


def move_file(path: Path, uri: str) -> None:
    """Move a local file to a path on the same disk, or upload it to an object store."""
    if is_remote(uri):
        _upload(path, uri)
        path.unlink()
        return
    make_folder(str(Path(uri).parent))
    path.replace(uri)


def fetch_to_node(uri: str, group: str) -> Path:
    """A path that can be memory-mapped: the file itself, or a copy of a remote one, fetched once per node."""
    if not is_remote(uri):
        return Path(uri)
    path = cache_folder() / group / uri.rsplit("/", 1)[-1]
    make_folder(str(path.parent))
    try:
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the node's other workers wait for the first one's download
            if not path.exists():
                download(uri, path)
    except OSError as error:
        raise _explained(error, str(path)) from error
    return path


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; False if another has it locked, which its process has not closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """This node's cache, which may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raygpt"


def make_folder(folder: str) -> None:
    """Make a local folder and those above it; an object store needs none."""
    if is_remote(folder):
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explained(error, folder) from error


def ensure_writable(folder: str) -> None:
    """Refuse a local folder that cannot be written, or made; an object store answers when it is used."""
    if is_remote(folder):
        return
    there = next(path for path in (Path(folder), *Path(folder).parents) if os.access(path, os.F_OK))
    if not os.access(there, os.W_OK):
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise _explained(OSError(errno.EROFS if is_read_only else errno.EACCES, ""), folder)


@contextlib.contextmanager
def reached(uri: str) -> Iterator[None]:
    """Convert exceptions of an object store's client into one-line errors; those of the local disk have an errno."""
    try:
        yield
    except OSError as error:
        if error.errno:
            raise
        raise StorageError(
            f"{uri} cannot be reached ({first_line(error)}); check the name, the credentials and the network"
        ) from error


def _explained(error: OSError, uri: str) -> StorageError:
    """An error that names the file, the cause and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"no space left for {uri}; free some or use another disk, then run the same command again")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StorageError(f"{uri} cannot be made: a file is where a folder should be; choose another folder")
    reason = os.strerror(error.errno) if error.errno else error
    return StorageError(f"{uri} cannot be written ({reason}); choose a folder that you may write to")
