"""Resolves a recipe's `data.source` to files, in order, and the rule that splits them into documents.

stdlib                             the Python standard library that is running
notes.txt   texts/   'a/*.jsonl.gz'   s3://bucket/texts
wikitext-103   openwebtext   tinystories   fineweb-edu      presets of Hugging Face datasets
hf:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]                   any other that has parquet files
wikitext:PATH                      local files in WikiText's form, an article a document
"""

import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from raygpt import storage
from raygpt.errors import RaygptError, TransientError, first_line

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
KNOWN_ENDINGS = ".txt, .md, .jsonl or .parquet, each also .gz, .xz or .zst"
# Names of the test folders that some installs of Python lack; without them every 3.x has about the same text.
NOT_STDLIB = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
NOT_TEXT = {".json", ".csv", ".pdf", ".zip", ".tar", ".tgz", ".bz2", ".bin", ".docx"}
WHOLE_DIGEST = 64 * 2**20  # a larger file's digest is of its size and 16 blocks of 1 MiB spread over it
CONVERTED = "refs/convert/parquet"  # the branch for datasets that the Hub converted to parquet itself
A_SPLIT = re.compile(r"(^|[/_.-])(train|test|val|valid|validation|dev|eval)([/_.-]|$)")


class Preset(NamedTuple):
    """A Hugging Face dataset with a short name."""

    dataset: str
    files: str  # a pattern of its parquet files; {split} is train unless the source says otherwise
    rule: str = "file"


PRESETS = {
    # the original `openwebtext` is a loading script, which `datasets` 4 no longer runs: this is its parquet copy
    "openwebtext": Preset("Skylion007/openwebtext", "*{split}-*.parquet"),
    "wikitext-103": Preset("Salesforce/wikitext", "wikitext-103-raw-v1/{split}-*.parquet", rule="wikitext"),
    "tinystories": Preset("roneneldan/TinyStories", "data/{split}-*.parquet"),
    "fineweb-edu": Preset("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
}


@dataclass(frozen=True)
class File:
    """One file of a source. `digest` identifies its content, independent of its location."""

    uri: str
    size: int
    format: str  # text | jsonl | parquet
    compression: str | None
    digest: str


@dataclass(frozen=True)
class Source:
    """Files in order, and the rule that splits them into documents.

    `file`: a line `<|endoftext|>` ends a document of a text file, and so does the file's end; in jsonl and parquet
    every row is a document. `wikitext`: a title line begins a document, across files and rows.
    """

    spec: str
    files: tuple[File, ...]
    rule: str
    column: str
    limit: int | None = None  # read only the first rows, over all files: lines of text, rows of a table

    @property
    def size(self) -> int:
        """Bytes as stored, maybe compressed."""
        return sum(file.size for file in self.files)

    @property
    def slug(self) -> str:
        """A short name for folders."""
        last = re.split(r"[/\\]", self.spec.split("@")[0].rstrip("/"))[-1]
        return re.sub(r"[^A-Za-z0-9]+", "-", last.split(".")[0]).strip("-").lower()[:40] or "corpus"

    def identity(self) -> dict[str, object]:
        """What determines the text, for fingerprints: not the files' locations or names."""
        files = [{k: v for k, v in asdict(file).items() if k != "uri"} for file in self.files]
        limit = {"limit": self.limit} if self.limit else {}
        return {"files": files, "rule": self.rule, "column": self.column, **limit}


def resolve(spec: str, column: str = "text", limit: int | None = None, *, digests: bool = True) -> Source:
    """Find the files that a source names. Without digests, for which files are read, it cannot be prepared."""
    if spec == "stdlib":
        return Source(spec, tuple(_stdlib()), "file", column, limit)
    if not is_path(spec):
        rule = PRESETS[name].rule if (name := _dataset_name(spec)) in PRESETS else "file"
        return Source(spec, tuple(_dataset(spec)), rule, column, limit)
    rule, path = ("wikitext", spec.removeprefix("wikitext:")) if spec.startswith("wikitext:") else ("file", spec)
    return Source(spec, tuple(_files(path, None if digests else "")), rule, column, limit)


def is_path(spec: str) -> bool:
    """Whether a source is files, folders or a pattern, rather than a dataset or the standard library."""
    return not (spec == "stdlib" or spec.startswith("hf:") or re.split(r"[:@]", spec)[0] in PRESETS)


def _stdlib() -> list[File]:
    paths: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - NOT_STDLIB  # site-packages has ten times as many files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    found = sorted(Found(str(path), path.stat().st_size) for path in paths)
    return [_file(one) for one in found if one.size]


class Found(NamedTuple):
    """A file found by a path, folder or glob."""

    uri: str
    size: int


def _files(path: str, digest: str | None) -> list[File]:
    """The files of a path, folder or glob, sorted by name. A folder gives those with a known ending."""
    found = _find_remote(path) if storage.is_remote(path) else _find_local(path)
    if not found:
        raise RaygptError(f"no text at {path!r}: {_why_nothing(path)}")
    files = [_file(one, digest) for one in sorted(found) if one.size]
    if not files:
        raise RaygptError(f"{path} is empty; name a file or folder with text in it")
    return files


def _find_local(path: str) -> list[Found]:
    root = Path(path).expanduser()
    if root.is_dir():
        paths = [p for p in root.rglob("*") if _is_known(p.relative_to(root))]
    else:
        paths = [root] if root.is_file() else [Path(p) for p in glob.glob(str(root), recursive=True)]
    return [Found(str(p.absolute()), p.stat().st_size) for p in paths if p.is_file()]


def _find_remote(uri: str) -> list[Found]:
    from pyarrow import fs

    system, path = storage.filesystem(uri)
    path = path.rstrip("/")
    is_glob = any(mark in path for mark in "*?[")
    base = re.split(r"[*?[]", path)[0].rpartition("/")[0] if is_glob else path
    pattern = path[len(base) + 1 :].split("/")

    def is_wanted(info: Any) -> bool:
        below = PurePosixPath(info.path[len(base) + 1 :])
        return _matches(below.parts, pattern) and not _is_hidden(below) if is_glob else _is_known(below)

    try:
        infos = [system.get_file_info(base)]
        if infos[0].type != fs.FileType.File:
            infos = system.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
            infos = [info for info in infos if is_wanted(info)]
    except OSError as error:
        raise TransientError(f"{uri} cannot be reached ({first_line(error)}); check address and credentials") from error
    scheme = uri.split("://")[0]
    return [Found(f"{scheme}://{info.path}", info.size) for info in infos if info.type == fs.FileType.File]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a glob, as on a disk: `*` stays within a folder, `**` matches any depth."""
    if not parts or not pattern:
        return not parts and list(pattern) in ([], ["**"])
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _why_nothing(path: str) -> str:
    if path in ("stdin", "-"):
        return "standard input cannot be read twice; write it to a file first"
    if Path(path).expanduser().is_dir():
        return f"the folder has no file that ends in {KNOWN_ENDINGS}"
    if storage.is_remote(path):
        return f"no such file or match, nor a folder with a file that ends in {KNOWN_ENDINGS}; check the address"
    return f"no such file, folder or match; write a path, stdlib, hf:OWNER/NAME or one of {', '.join(PRESETS)}"


def _is_known(path: PurePosixPath | Path) -> bool:
    return Path(_without_compression(path.name)).suffix in FORMATS and not _is_hidden(path)


def _is_hidden(path: PurePosixPath | Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _without_compression(name: str) -> str:
    return str(Path(name).with_suffix("")) if Path(name).suffix in COMPRESSIONS else name


def _file(found: Found, digest: str | None = None) -> File:
    ending = Path(_without_compression(found.uri)).suffix
    if ending in NOT_TEXT:
        raise RaygptError(f"{found.uri}: {ending} is not read as text; convert it to {KNOWN_ENDINGS}")
    compression = Path(found.uri).suffix if Path(found.uri).suffix in COMPRESSIONS else None
    # a file named directly, or by a glob such as '*.py', is text whatever its ending
    format_ = FORMATS.get(ending, "text")
    return File(found.uri, found.size, format_, compression, _digest(found) if digest is None else digest)


def _digest(found: Found) -> str:
    """The content's fingerprint; reads at most 16 MiB of a large file."""
    digest = hashlib.blake2b(str(found.size).encode(), digest_size=16)
    try:
        with storage.open_read(found.uri) as stream:
            if found.size <= WHOLE_DIGEST:
                digest.update(stream.read())
            else:
                for block in range(16):
                    stream.seek(block * (found.size - 2**20) // 15)
                    digest.update(stream.read(2**20))
    except OSError as error:
        raise RaygptError(
            f"{found.uri} cannot be read ({error.strerror or error}); check the file and its permissions"
        ) from error
    return digest.hexdigest()


def _dataset_name(spec: str) -> str:
    return re.split(r"[:@]", spec.removeprefix("hf:"))[0]


def _dataset(spec: str) -> list[File]:
    """Parquet files of `PRESET[:SPLIT][@REVISION]` or `hf:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]`."""
    body, _, revision = spec.partition("@")
    name, *parts = body.removeprefix("hf:").split(":")
    if name in PRESETS:
        preset = PRESETS[name]
        has_splits = "{split}" in preset.files
        if len(parts) > has_splits:
            raise RaygptError(
                f"data.source {spec!r}: write {name}{', then :SPLIT' if has_splits else ''} and @REVISION as needed"
            )
        pattern = preset.files.format(split=parts[0] if parts else "train")
        return _dataset_files(preset.dataset, revision, lambda paths: fnmatch.filter(paths, pattern), spec)
    if name.count("/") != 1 or len(parts) > 2:
        raise RaygptError(f"data.source {spec!r}: write hf:OWNER/NAME, then :CONFIG, :SPLIT and @REVISION as needed")
    config, split = [*parts, *["", "train"][len(parts) :]]
    return _dataset_files(name, revision, lambda paths: _of_split(paths, config, split, spec), spec)


def _of_split(paths: Sequence[str], config: str, split: str, spec: str) -> list[str]:
    """The files whose path names the split, in the config's folder; if no path names a split, all are train."""
    within = {
        path: path.removeprefix(f"{config}/") for path in paths if path.startswith(f"{config}/" if config else "")
    }
    named = re.compile(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)")
    chosen = [path for path, rest in within.items() if named.search(rest)]
    if split == "train" and not any(A_SPLIT.search(rest) for rest in within.values()):
        chosen = list(within)
    folders = sorted({str(PurePosixPath(path).parent) for path in chosen})
    if not config and len(folders) > 1:
        some = ", ".join(folders[:8]) + (", …" if len(folders) > 8 else "")
        raise RaygptError(f"{spec} has files in several folders: {some}; write one as :CONFIG after the dataset's name")
    return chosen


def _dataset_files(dataset: str, revision: str, choose: Callable[[Sequence[str]], list[str]], spec: str) -> list[File]:
    """Parquet files of a dataset at one commit; if it has none, those that the Hub converted itself."""
    for branch in [revision] if revision else ["main", CONVERTED]:
        commit, files = _parquet_files(dataset, branch, spec)
        chosen = choose(sorted(files))
        if any(re.search(r"/partial[-/]", path) for path in chosen):
            raise RaygptError(
                f"{spec}: the Hub has converted only the first 5 GB of {dataset} to parquet; name a parquet copy"
            )
        if chosen:
            root = f"hf://datasets/{dataset}@{commit}"
            return [_file(Found(f"{root}/{path}", files[path][0]), files[path][1]) for path in chosen]
    raise RaygptError(f"{spec}: {dataset} has no such parquet files; check config and split on its page")


def _parquet_files(dataset: str, branch: str, spec: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The commit that a branch is at, and size and digest of each parquet file there."""
    storage.require_hugging_face()
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi()
    try:
        commit = str(api.dataset_info(dataset, revision=branch).sha)
        tree = api.list_repo_tree(dataset, repo_type="dataset", revision=commit, recursive=True)
        files = [entry for entry in tree if isinstance(entry, RepoFile) and entry.path.endswith(".parquet")]
    except Exception as error:  # offline, gated, misspelt: each has its own class there
        if branch == CONVERTED and isinstance(error, RevisionNotFoundError):
            return "", {}  # the Hub has not converted this one
        raise TransientError(
            f"{spec}: the dataset {dataset} cannot be reached ({first_line(error)}); check its name "
            "and the network, or name local parquet files"
        ) from error
    return commit, {file.path: (file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files}
