"""Sources: which files a name leads to, in which order, and what decides that two sources are the same text."""

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from raygpt import storage
from raygpt.corpus.sources import Source, resolve
from raygpt.errors import RaygptError

ENDINGS = ".txt, .md, .jsonl or .parquet, each also .gz, .xz or .zst"


def write(folder: Path, *names: str) -> Path:
    """Files that hold their own name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    return folder


def found(spec: str | Path, base: str | Path) -> list[str]:
    return [file.uri.removeprefix(f"{base}/") for file in resolve(str(spec)).files]


def refusal(spec: str | Path) -> str:
    with pytest.raises(RaygptError) as caught:
        resolve(str(spec))
    return str(caught.value)


# What a path leads to


def test_a_folder_gives_its_files_of_known_endings_sorted_by_path(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a.md", "c/d.jsonl.gz", "c/a.parquet", "a/z.txt.zst", "z.txt.xz", "c.md.zst")
    write(tmp_path, "code.py", "table.csv", "notes.html", "x.gz", "readme")  # not text by their ending
    names = ["a.md", "a/z.txt.zst", "b.txt", "c.md.zst", "c/a.parquet", "c/d.jsonl.gz", "z.txt.xz"]
    assert found(tmp_path, tmp_path) == names
    assert found(f"{tmp_path}/", tmp_path) == names


def test_hidden_files_and_folders_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", ".hidden.txt", ".git/notes.txt", "b/.cache/c.txt", "b/d.txt")
    assert found(tmp_path, tmp_path) == ["a.txt", "b/d.txt"]
    assert found(tmp_path / "**/*.txt", tmp_path) == ["a.txt", "b/d.txt"]


def test_a_folder_inside_a_hidden_one_is_read_when_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / ".cache" / "texts", "a.txt")
    assert found(tmp_path / ".cache" / "texts", tmp_path / ".cache" / "texts") == ["a.txt"]


def test_a_file_that_is_named_outright_is_text_whatever_its_ending(tmp_path: Path) -> None:
    write(tmp_path, "code.py", "noending", "old.log.gz")
    for name, compression in (("code.py", None), ("noending", None), ("old.log.gz", ".gz")):
        (file,) = resolve(str(tmp_path / name)).files
        assert (file.format, file.compression) == ("text", compression)


def test_the_ending_says_format_and_compression(tmp_path: Path) -> None:
    formats = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
    write(tmp_path, *(f"x{ending}{packed}" for ending in formats for packed in ("", ".gz", ".xz", ".zst")))
    files = resolve(str(tmp_path)).files
    assert len(files) == 16
    for file in files:
        _, ending, *packed = Path(file.uri).name.split(".")
        assert file.format == formats[f".{ending}"]
        assert file.compression == (f".{packed[0]}" if packed else None)
        assert file.size == Path(file.uri).stat().st_size


def test_a_glob_gives_what_it_matches_sorted(tmp_path: Path) -> None:
    write(tmp_path, "b.py", "a.py", "sub/c.py", "a.txt")
    assert found(tmp_path / "*.py", tmp_path) == ["a.py", "b.py"]
    assert found(tmp_path / "**/*.py", tmp_path) == ["a.py", "b.py", "sub/c.py"]
    assert found(tmp_path / "[ab].*", tmp_path) == ["a.py", "a.txt", "b.py"]


def test_paths_are_absolute_and_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "texts/a.txt", "texts/b/c.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("texts", "texts/**/*.txt", "~/texts"):
        assert found(spec, tmp_path) == ["texts/a.txt", "texts/b/c.txt"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path: Path) -> None:
    write(tmp_path, "a[1].txt", "a1.txt")
    assert found(tmp_path / "a[1].txt", tmp_path) == ["a[1].txt"]


def test_empty_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / "b.txt").touch()
    assert found(tmp_path, tmp_path) == ["a.txt"]


def test_stdlib_is_the_running_python_without_its_tests() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    source = resolve("stdlib")
    names = [Path(file.uri).relative_to(root).as_posix() for file in source.files]
    assert len(names) > 500
    assert 8e6 < source.size < 16e6
    assert {"ast.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert names == sorted(names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert {file.format for file in source.files} == {"text"}


# What is refused, and the line that says so


def test_what_does_not_exist_is_refused_with_what_to_write(tmp_path: Path) -> None:
    choices = "write a path, stdlib, hf:OWNER/NAME or one of openwebtext, wikitext-103, tinystories, fineweb-edu"
    for spec in (tmp_path / "none.txt", tmp_path / "*.txt", "wikitext-3"):
        assert refusal(spec) == f"no text at {str(spec)!r}: no such file, folder or match; {choices}"
    message = "no text at 'stdin': standard input cannot be read twice; write it to a file first"
    assert refusal("stdin") == message


def test_a_folder_without_text_is_refused_with_the_endings_that_count(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.csv")
    assert refusal(tmp_path) == f"no text at {str(tmp_path)!r}: the folder has no file that ends in {ENDINGS}"


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    for spec in (tmp_path, tmp_path / "a.txt"):
        assert refusal(spec) == f"{spec} is empty; name a file or folder with text in it"


@pytest.mark.parametrize("ending", [".json", ".csv", ".pdf", ".zip", ".tar.gz", ".bin", ".docx", ".txt.bz2"])
def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, f"x{ending}") / f"x{ending}"
    shown = {".tar.gz": ".tar", ".txt.bz2": ".bz2"}.get(ending, ending)
    assert refusal(path) == f"{path}: {shown} is not read as text; convert it to {ENDINGS}"


# What two sources that are the same text have in common


def test_the_content_decides_identity_and_not_the_place(tmp_path: Path) -> None:
    first = write(tmp_path / "one", "a.txt", "b/c.jsonl")
    shutil.copytree(first, tmp_path / "elsewhere" / "two")
    assert resolve(str(first)).identity() == resolve(str(tmp_path / "elsewhere" / "two")).identity()


def test_one_other_byte_is_another_identity(tmp_path: Path) -> None:
    before = resolve(str(write(tmp_path, "a.txt", "b.txt"))).identity()
    path = tmp_path / "b.txt"
    path.write_bytes(path.read_bytes()[:-2] + b"X\n")
    assert resolve(str(tmp_path)).identity() != before


def test_the_order_of_the_files_is_part_of_the_identity(tmp_path: Path) -> None:
    before = resolve(str(write(tmp_path, "a.txt", "b.txt"))).identity()
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert resolve(str(tmp_path)).identity() != before


def test_the_rule_and_the_column_are_part_of_the_identity(tmp_path: Path) -> None:
    path = str(write(tmp_path, "a.jsonl") / "a.jsonl")
    identities = [resolve(path), resolve(path, "body"), resolve(f"wikitext:{path}")]
    assert len({str(source.identity()) for source in identities}) == 3
    assert [source.rule for source in identities] == ["file", "file", "wikitext"]


def sparse(path: Path, size: int, changes: dict[int, bytes]) -> str:
    """The digest of a file of zeros but for some bytes."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, content in changes.items():
            file.seek(offset)
            file.write(content)
    (found,) = resolve(str(path)).files
    return found.digest


def test_a_large_file_is_known_by_its_size_and_blocks_from_start_to_end(tmp_path: Path) -> None:
    size = 100 * 2**20
    path = tmp_path / "large.txt"
    plain = sparse(path, size, {})
    others = [sparse(path, size, {offset: b"x"}) for offset in (0, 2**20 - 1, size // 15 * 7, size - 1)]
    others.append(sparse(path, size + 1, {}))
    assert len({plain, *others}) == 6
    assert sparse(path, size, {2 * 2**20: b"x"}) == plain  # between the blocks: the price of not reading it all
    assert sparse(path, size, {}) == plain


def test_a_file_of_64_mib_is_read_whole(tmp_path: Path) -> None:
    path, size = tmp_path / "x.txt", 64 * 2**20
    assert sparse(path, size, {}) != sparse(path, size, {2 * 2**20: b"x"})


# Names


@pytest.mark.parametrize(
    ("spec", "slug"),
    [
        ("stdlib", "stdlib"),
        ("/data/My Texts/", "my-texts"),
        ("texts/war_and_peace.txt.gz", "war-and-peace"),
        ("a/*.jsonl.gz", "corpus"),
        ("s3://bucket/texts", "texts"),
        ("wikitext-103", "wikitext-103"),
        ("hf:Owner/Name:config:train@0123abc", "name-config-train"),
        ("wikitext:data/wiki.valid.tokens", "wiki"),
        ("x" * 100, "x" * 40),
    ],
)
def test_a_source_has_a_short_name_for_folders(spec: str, slug: str) -> None:
    assert Source(spec, (), "file", "text").slug == slug


# An object store


@pytest.fixture(scope="module")
def bucket(s3: str) -> str:
    """A folder in the bucket with the same files as `write` makes."""
    for name in ("a.txt", "b.jsonl.gz", "sub/c.md", "sub/deep/d.txt", "code.py", ".hidden.txt", "sub/.cache/e.txt"):
        storage.write_bytes(f"{s3}/sources/{name}", f"this is {name}\n".encode())
    return f"{s3}/sources"


def test_an_object_store_has_files_folders_and_globs_as_a_disk_has(bucket: str, tmp_path: Path) -> None:
    names = ("a.txt", "b.jsonl.gz", "sub/c.md", "sub/deep/d.txt", "code.py", ".hidden.txt", "sub/.cache/e.txt")
    local = write(tmp_path, *names)
    for spec in (
        "",
        "/",
        "/a.txt",
        "/code.py",
        "/sub",
        "/*",
        "/*.txt",
        "/**/*.txt",
        "/sub/*",
        "/sub/**/*.[mt]*",
        "/s*/c*",
    ):
        there, here = resolve(f"{bucket}{spec}"), resolve(f"{local}{spec}")
        assert [file.uri.removeprefix(bucket) for file in there.files] == [
            file.uri.removeprefix(str(local)) for file in here.files
        ], spec
        assert there.identity() == here.identity()
        assert [replace(file, uri="") for file in there.files] == [replace(file, uri="") for file in here.files]


def test_what_is_not_in_an_object_store_is_refused(bucket: str) -> None:
    for spec in (f"{bucket}/none.txt", f"{bucket}/none", f"{bucket}/*.none", "s3://no-such-bucket-here/x"):
        assert refusal(spec) == (
            f"no text at {spec!r}: no such file or match, nor a folder with a file that ends in {ENDINGS}; "
            "check the address"
        )


def test_an_address_without_a_bucket_is_refused_in_one_line(s3: str) -> None:
    message = refusal("s3:///x.txt")
    assert message.startswith("s3:///x.txt: ")
    assert message.endswith("a local path or s3://bucket/path is expected")
