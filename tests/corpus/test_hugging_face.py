"""Hugging Face datasets by name: which files, of which commit, and the line that says what is wrong with a name."""

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub, served

from raygpt.corpus.documents import DocumentReader
from raygpt.corpus.sources import PRESETS, resolve
from raygpt.errors import RaygptError

constants = pytest.importorskip("huggingface_hub.constants")


def parquet(*rows: str) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(rows))), "text": rows}), stream)
    return stream.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of this test's own, which huggingface_hub takes for the real one."""
    with served() as hub:
        point_at(hub.url, monkeypatch)
        yield hub


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def found(spec: str) -> list[str]:
    """Paths of the files within the dataset."""
    return [file.uri.split("@", 1)[1].split("/", 1)[1] for file in resolve(spec).files]


def texts(spec: str) -> list[str]:
    source = resolve(spec)
    return [piece.text for piece in DocumentReader(source, source.files).pieces()]


def refusal(spec: str) -> str:
    with pytest.raises(RaygptError) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Which files


TRAIN = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


def test_a_dataset_is_its_train_files_in_order_at_one_commit(hub: Hub) -> None:
    files = {name: parquet(name) for name in [*TRAIN[::-1], "data/test-00000-of-00001.parquet"]}
    sha = hub.commit("some/texts", files | {"README.md": b"about", "train.csv": b"a,b"})
    source = resolve("hf:some/texts")
    assert [file.uri for file in source.files] == [f"hf://datasets/some/texts@{sha}/{name}" for name in TRAIN]
    for file, name in zip(source.files, TRAIN, strict=True):
        assert (file.format, file.compression, file.size) == ("parquet", None, len(files[name]))
        assert file.digest == hashlib.sha256(files[name]).hexdigest()
    assert (source.rule, source.column, source.slug) == ("file", "text", "texts")


def test_rows_are_read_from_the_commit_that_was_found_even_when_the_branch_moves_on(hub: Hub) -> None:
    sha = hub.commit("some/texts", {name: parquet(name, f"{name} again") for name in TRAIN})
    source = resolve("hf:some/texts")
    hub.commit("some/texts", {name: parquet("something else") for name in TRAIN})
    hub.asked.clear()
    rows = [piece.text for piece in DocumentReader(source, source.files).pieces()]
    assert rows == [TRAIN[0], f"{TRAIN[0]} again", TRAIN[1], f"{TRAIN[1]} again"]
    read = [asked for asked in hub.asked if "/resolve/" in asked]
    assert read
    assert all(asked.startswith(f"/datasets/some/texts/resolve/{sha}/data/train-") for asked in read)
    assert all(" bytes=" in asked for asked in read)  # parts, not the whole file


def test_a_revision_is_a_branch_tag_or_commit(hub: Hub) -> None:
    old = hub.commit("some/texts", {"train.parquet": parquet("old")})
    hub.commit("some/texts", {"train.parquet": parquet("new")})
    hub.commit("some/texts", {"train.parquet": parquet("other")}, branch="v1.0")
    assert texts("hf:some/texts") == ["new"]
    assert texts("hf:some/texts@v1.0") == ["other"]
    assert texts(f"hf:some/texts@{old}") == ["old"]
    assert f"@{old}/" in resolve(f"hf:some/texts@{old}").files[0].uri


CONFIGS = [
    "20231101.en/train-00000-of-00001.parquet",
    "20231101.de/train-00000-of-00001.parquet",
    "20231101.de/test-00000-of-00001.parquet",
    "all/de/train.parquet",
    "all/en/train.parquet",
    "plain/000.parquet",
    "plain/001.parquet",
]


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        (":20231101.de", ["20231101.de/train-00000-of-00001.parquet"]),
        (":20231101.de:test", ["20231101.de/test-00000-of-00001.parquet"]),
        (":all", ["all/de/train.parquet", "all/en/train.parquet"]),
        (":all/en", ["all/en/train.parquet"]),
        (":plain", ["plain/000.parquet", "plain/001.parquet"]),  # files that name no split are train
        ("::test", ["20231101.de/test-00000-of-00001.parquet"]),
    ],
)
def test_a_config_is_a_folder_and_a_split_is_in_the_name(hub: Hub, spec: str, files: list[str]) -> None:
    hub.commit("some/texts", {name: parquet(name) for name in CONFIGS})
    assert found(f"hf:some/texts{spec}") == files
    assert texts(f"hf:some/texts{spec}") == files


def test_a_dataset_of_several_configs_wants_one_named(hub: Hub) -> None:
    hub.commit("some/texts", {name: parquet(name) for name in CONFIGS})
    assert refusal("hf:some/texts") == (
        "hf:some/texts has files in several folders: 20231101.de, 20231101.en, all/de, all/en; "
        "write one as :CONFIG after the dataset's name"
    )


def test_a_dataset_without_parquet_is_read_as_the_hub_converted_it(hub: Hub) -> None:
    hub.commit("some/texts", {"data.jsonl": b"{}"})
    names = ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"]
    sha = hub.commit("some/texts", {name: parquet(name) for name in names}, branch="refs/convert/parquet")
    assert texts("hf:some/texts") == names[:2]
    assert texts("hf:some/texts:default:test") == names[2:]
    assert f"@{sha}/" in resolve("hf:some/texts").files[0].uri


@pytest.mark.parametrize("folder", ["partial-train", "partial/train"])
def test_a_part_of_a_dataset_is_not_taken_for_the_whole(hub: Hub, folder: str) -> None:
    hub.commit("some/texts", {"data.jsonl": b"{}"})
    hub.commit("some/texts", {f"default/{folder}/0000.parquet": parquet("x")}, branch="refs/convert/parquet")
    assert refusal("hf:some/texts") == (
        "hf:some/texts: the Hub has converted only the first 5 GB of some/texts to parquet; name a parquet copy"
    )


# Presets, against the files that these datasets have on the Hub

ON_THE_HUB = {
    "Skylion007/openwebtext": [f"plain_text/train-{n:05}-of-00080.parquet" for n in range(80)],
    "Salesforce/wikitext": [
        f"{config}/{split}.parquet"
        for config in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")
        for split in (
            "test-00000-of-00001",
            "train-00000-of-00002",
            "train-00001-of-00002",
            "validation-00000-of-00001",
        )
    ],
    "roneneldan/TinyStories": [
        "data/train-00000-of-00004-2d5a1467fff1081b.parquet",
        "data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
        "data/train-00002-of-00004-a26307300439e943.parquet",
        "data/train-00003-of-00004-d243063613e5a057.parquet",
        "data/validation-00000-of-00001-869c898b519ad725.parquet",
    ],
    "HuggingFaceFW/fineweb-edu": [
        *(f"data/CC-MAIN-2013-20/train-{n:05}-of-00014.parquet" for n in range(14)),
        *(f"sample/10BT/{n:03}_00000.parquet" for n in range(14)),
        *(f"sample/100BT/{n:03}_00000.parquet" for n in range(14)),
    ],
}


@pytest.mark.parametrize(
    ("spec", "rule", "files"),
    [
        ("openwebtext", "file", ON_THE_HUB["Skylion007/openwebtext"]),
        (
            "wikitext-103",
            "wikitext",
            [f"wikitext-103-raw-v1/train-0000{n}-of-00002.parquet" for n in range(2)],
        ),
        ("wikitext-103:validation", "wikitext", ["wikitext-103-raw-v1/validation-00000-of-00001.parquet"]),
        ("tinystories", "file", ON_THE_HUB["roneneldan/TinyStories"][:4]),
        ("tinystories:validation", "file", ON_THE_HUB["roneneldan/TinyStories"][4:]),
        ("fineweb-edu", "file", [f"sample/10BT/{n:03}_00000.parquet" for n in range(14)]),
    ],
)
def test_presets_lead_to_their_files(hub: Hub, spec: str, rule: str, files: list[str]) -> None:
    commits = {name: hub.commit(name, dict.fromkeys(paths, b"x")) for name, paths in ON_THE_HUB.items()}
    assert set(commits) == {preset.dataset for preset in PRESETS.values()}
    dataset = PRESETS[spec.split(":")[0]].dataset
    for written in (spec, f"hf:{spec}", f"{spec}@{commits[dataset]}", f"{spec}@main"):
        source = resolve(written)
        assert source.rule == rule
        assert [f.uri for f in source.files] == [f"hf://datasets/{dataset}@{commits[dataset]}/{name}" for name in files]


def wikitext_rows(*articles: str) -> list[str]:
    """As Hugging Face has them: a row a line, an empty one where the line is blank."""
    return ["" if line == " \n" else line for article in articles for line in article.splitlines(keepends=True)]


ARTICLES = [f" \n = {title} = \n \n Text of {title} . \n \n = = Section = = \n \n More . \n" for title in "ABCD"]


def commit_wikitext(hub: Hub) -> None:
    rows = wikitext_rows(*ARTICLES)
    folder = "wikitext-103-raw-v1"
    files = {
        f"{folder}/train-00000-of-00002.parquet": parquet(*rows[:19]),  # the third article goes on in the second file
        f"{folder}/train-00001-of-00002.parquet": parquet(*rows[19:]),
        f"{folder}/validation-00000-of-00001.parquet": parquet(*wikitext_rows(ARTICLES[1])),
    }
    hub.commit("Salesforce/wikitext", files)


def test_wikitexts_articles_are_documents_across_its_files(hub: Hub) -> None:
    commit_wikitext(hub)
    documents = texts("wikitext-103")
    assert [text.splitlines()[0] for text in documents] == [" = A = ", " = B = ", " = C = ", " = D = "]
    # a blank line before a title belongs to the article above it
    assert documents[2] == " = C = \n\n Text of C . \n\n = = Section = = \n\n More . \n\n"
    assert texts("wikitext-103:validation") == [" = B = \n\n Text of B . \n\n = = Section = = \n\n More . \n"]


# What is wrong with a name


@pytest.mark.parametrize("spec", ["hf:texts", "hf:a/b/c", "hf:a/b:c:d:e", "hf:"])
def test_a_name_that_is_none_is_refused_with_its_form(spec: str) -> None:
    assert refusal(spec) == f"data.source {spec!r}: write hf:OWNER/NAME, then :CONFIG, :SPLIT and @REVISION as needed"


def test_a_preset_has_a_split_or_none() -> None:
    assert refusal("wikitext-103:a:b") == (
        "data.source 'wikitext-103:a:b': write wikitext-103, then :SPLIT and @REVISION as needed"
    )
    assert refusal("fineweb-edu:test") == ("data.source 'fineweb-edu:test': write fineweb-edu and @REVISION as needed")


@pytest.mark.parametrize("spec", ["hf:some/texts::test", "hf:some/texts:config", "tinystories:test"])
def test_a_config_or_split_that_is_not_there_is_refused(hub: Hub, spec: str) -> None:
    hub.commit("some/texts", {"data/train-0.parquet": parquet("x")})  # which the Hub has not converted
    hub.commit("roneneldan/TinyStories", {"data/train-0.parquet": parquet("x")})
    dataset = "roneneldan/TinyStories" if spec.startswith("tiny") else "some/texts"
    assert refusal(spec) == f"{spec}: {dataset} has no such parquet files; check config and split on its page"


@pytest.mark.parametrize("spec", ["hf:no/such", "hf:some/texts@v9"])
def test_a_dataset_or_revision_that_is_not_there_is_refused(hub: Hub, spec: str) -> None:
    hub.commit("some/texts", {"train.parquet": parquet("x")})
    dataset = spec.removeprefix("hf:").split("@")[0]
    message = refusal(spec)
    assert message.startswith(f"{spec}: the dataset {dataset} cannot be reached (404 Client Error.")
    assert message.endswith("); check its name and the network, or name local parquet files")


def test_a_hub_that_does_not_answer_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:9", monkeypatch)
    assert refusal("openwebtext") == (
        "openwebtext: the dataset Skylion007/openwebtext cannot be reached ([Errno 111] Connection refused); "
        "check its name and the network, or name local parquet files"
    )


def test_a_file_that_cannot_be_read_is_said_in_one_line(hub: Hub) -> None:
    hub.commit("some/texts", {"train-0.parquet": parquet("a"), "train-1.parquet": b"no parquet"})
    source = resolve("hf:some/texts")
    with pytest.raises(RaygptError) as caught:
        list(DocumentReader(source, source.files).pieces())
    assert str(caught.value).startswith(f"{source.files[1].uri} cannot be read (Parquet magic bytes not found")
    assert "\n" not in str(caught.value)


# From the Hub to a store, in a process of its own: HF_ENDPOINT is read when huggingface_hub is imported

END_TO_END = """
import json, sys
import numpy as np
from raygpt.cluster import connected
from raygpt.corpus.prepare import prepare
def ids(stream):
    return [int(token) for run in stream.runs() for token in run]
with connected():
    web = prepare("openwebtext", sys.argv[1] + "/web", "bytes", val=0.1, split="huggingface")
    wiki = prepare("wikitext-103", sys.argv[1] + "/wiki", "bytes", val="wikitext-103:validation")
print(json.dumps([ids(stream) for store in (web, wiki) for stream in (store.train, store.val)]))
"""


def test_from_the_hub_to_a_store(tmp_path: Path) -> None:
    rows = [f"page {number}" for number in range(40)]
    with served() as hub:
        names = [f"plain_text/train-{n:05}-of-00004.parquet" for n in range(4)]
        hub.commit(
            "Skylion007/openwebtext", {name: parquet(*rows[10 * n : 10 * n + 10]) for n, name in enumerate(names)}
        )
        commit_wikitext(hub)
        root = str(Path(sys.modules["raygpt"].__file__ or "").parents[1])
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, "-c", END_TO_END, str(tmp_path)], env=os.environ | environment, capture_output=True
        )
    assert done.returncode == 0, done.stderr.decode()
    web, web_val, wiki, wiki_val = json.loads(done.stdout)
    held_out = np.random.default_rng(2357).permutation(40)[:4].tolist()  # as `datasets` does; see test_prepare.py
    assert web_val == of_bytes([rows[row] for row in held_out])
    assert web == of_bytes([row for number, row in enumerate(rows) if number not in held_out])
    blank = [article.replace(" \n", "\n").replace(" .\n", " . \n").replace(" =\n", " = \n") for article in ARTICLES]
    joined = "".join(blank)[1:]  # the very first line is blank, and no document
    starts = [joined.index(f" = {title} = ") for title in "ABCD"]
    assert wiki == of_bytes([joined[a:b] for a, b in zip(starts, [*starts[1:], len(joined)], strict=True)])
    assert wiki_val == of_bytes([blank[1][1:]])


def of_bytes(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), 256]]


# Evaluation sets


def test_tasks_are_found_by_name(hub: Hub) -> None:
    from raygpt.evaluation.tasks import read_items

    item = {"activity_label": "A", "ctx_a": "b", "ctx_b": "c", "ctx": "b c", "endings": ["d", "e"], "label": "0"}
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([item] * 3), stream)
    hub.commit("Rowan/hellaswag", {"data/validation-00000-of-00001.parquet": stream.getvalue()})
    assert read_items("hellaswag", None, 2) == [item] * 2
    hub.commit("EleutherAI/lambada_openai", {"data/lambada_test.jsonl": b"{}"})
    converted = {"default/test/0000.parquet": parquet("one two"), "de/test/0000.parquet": parquet("eins zwei")}
    hub.commit("EleutherAI/lambada_openai", converted, "refs/convert/parquet")
    assert [found["text"] for found in read_items("lambada", None)] == ["one two"]
