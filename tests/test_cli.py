"""The verbs as people type them: what they print, and how bad input ends."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import typer

from raygpt import __version__, cli
from raygpt.recipes import load_recipe, shipped_recipes
from raygpt.runs.lock import locked
from raygpt.show import generation
from raygpt.show.console import printable
from raygpt.show.training import show_message, show_result
from raygpt.training.events import StepLogged, Warned
from raygpt.training.ray.launch import Result
from raygpt.training.stopping import STOP_FILE


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Document {n} says something of its own.\n<|endoftext|>\n" for n in range(100)))
    return path


def fails(result):
    """The one line that a failed command leaves on standard error, after those of progress."""
    status, out, err = result
    assert (status, out) == (1, "")
    *progress, last = err.splitlines()
    assert all(line.startswith("preparing ") for line in progress), err
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


# Output that cannot be written


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "raygpt", "recipes"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.startswith("error: standard output cannot be written, its disk is full; ")
    assert "Traceback" not in done.stderr


def test_a_terminal_that_does_not_know_a_character_gets_another():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "raygpt", "recipes"], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"steps of 32 ? 1,024 tokens" in b" ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("text", "shown"), [("a\r\nb\r\n", "a\nb\n"), ("a\r", "a"), ("a\rb", "a�b"), ("\x1b[2J", "�[2J")]
)
def test_line_ends_of_windows_are_line_ends_and_control_characters_are_not_printed(text, shown):
    assert printable(text) == shown


def test_what_to_type_next_has_names_with_spaces_in_quotes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    show_result(Result(str(tmp_path / "my runs" / "tiny")), [])
    commands = [shlex.split(line)[-2:] for line in capsys.readouterr().out.partition("Try next:\n")[2].splitlines()]
    assert commands == [["generate", "my runs/tiny"], ["eval", "my runs/tiny"], ["report", "my runs/tiny"]]
    (tmp_path / "README.md").touch()
    show_result(Result(str(tmp_path / "tiny")), [])
    assert "data.source=README.md" in capsys.readouterr().out  # where there is one


def test_standard_input_that_is_closed_has_no_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert generation._ask() == ""


# What --help costs


def test_help_imports_neither_ray_nor_jax_nor_torch_nor_numpy():
    code = (
        "import sys; sys.argv = ['raygpt', '--help']\n"
        "from raygpt.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'ray', 'jax', 'torch', 'numpy', 'pyarrow', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("train", "prepare", "data", "recipes", "doctor"))


def test_every_verb_and_every_option_has_a_line_of_help():
    def silent(command, words):
        found = [words] if not command.help else []
        found += [f"{words} {parameter.name}" for parameter in command.params if not parameter.help]
        for name, inner in getattr(command, "commands", {}).items():
            found += silent(inner, f"{words} {name}")
        return found

    assert silent(typer.main.get_command(cli.app), "raygpt") == []


def test_python_m_raygpt_is_raygpt():
    done = subprocess.run([sys.executable, "-m", "raygpt", "--version"], capture_output=True, text=True)
    assert done.stdout == f"raygpt {__version__}\n"


# Recipes and doctor


def test_recipes_are_listed_with_a_line_each(raygpt):
    status, out, _ = raygpt("recipes")
    assert status == 0
    assert "shakespeare-char" in out
    _, out, _ = raygpt("recipes", "--json")
    assert set(json.loads(out)) == set(shipped_recipes())


def test_a_recipe_is_shown_with_its_comments_or_resolved_as_json(raygpt):
    _, out, _ = raygpt("recipes", "show", "tiny")
    assert "# int, default 4." in out
    _, out, _ = raygpt("recipes", "show", "tiny", "--json")
    assert json.loads(out)["model"]["layers"] == 4


def test_every_key_is_listed_with_what_it_is_for(raygpt):
    status, out, _ = raygpt("recipes", "keys")
    assert status == 0
    assert "training.remat" in out
    _, out, _ = raygpt("recipes", "keys", "--json")
    listed = {key["name"]: key for key in json.loads(out)}
    assert listed["model.layers"] == {
        "name": "model.layers",
        "type": "int",
        "default": "4",
        "description": "Transformer blocks.",
    }


def test_doctor_names_what_is_there_and_what_to_do_about_the_rest(raygpt):
    status, out, _ = raygpt("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert status == 0
    assert {"Python", "CPU", "JAX", "PyTorch", "Ray", "disk", "GPT-2 BPE"} <= set(findings)
    assert findings["Ray"]["detail"].startswith("2.60")
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")
    assert raygpt("doctor")[1].count("✓") >= 4


def test_doctor_says_of_an_engine_that_cannot_be_imported_what_to_do(raygpt, monkeypatch):
    monkeypatch.setattr("raygpt.doctor.devices_of", Mock(side_effect=ImportError("libcudnn.so.9: cannot open\nmore")))
    status, out, _ = raygpt("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert status == 0
    for name, package in (("JAX", "jax"), ("PyTorch", "torch")):
        assert findings[name]["state"] == "problem"
        assert findings[name]["detail"].endswith(": libcudnn.so.9: cannot open")
        assert findings[name]["remedy"] == f"pip install --force-reinstall {package}"


# prepare, data show, train


def test_prepare_closes_with_totals_and_its_json_agrees_with_the_store(ray_cluster, raygpt, text, tmp_path):
    status, out, _ = raygpt("prepare", text, "--out", "my store", "--tokenizer", "bytes", "--val", "0.2")
    assert status == 0
    assert out.startswith("100 documents, 0.0 MB of text → ")
    assert "bytes per token" in out
    words = shlex.split(out.splitlines()[-1].partition(" train ")[2])
    data = load_recipe(words[0], words[1:]).data  # what it says to do next can be done
    assert (data.source, data.tokenizer) == ("./my store", "./my store")
    _, out, _ = raygpt("prepare", text, "--out", "my store", "--tokenizer", "bytes", "--val", "0.2", "--json")
    summary = json.loads(out)
    shards = [*(tmp_path / "my store").glob("train-*.tokens"), tmp_path / "my store" / "val.tokens"]
    size = sum(shard.stat().st_size - 64 for shard in shards)
    assert summary["train_tokens"] + summary["val_tokens"] == size // 2
    assert summary["documents"] == 100
    assert summary["vocab"] == 257


def test_prepare_writes_nanogpts_files_when_asked(ray_cluster, raygpt, text, tmp_path):
    raygpt("prepare", text, "--out", "store", "--tokenizer", "bytes", "--nanogpt")
    both = np.concatenate([np.fromfile(tmp_path / "store" / f"{part}.bin", dtype="<u2") for part in ("train", "val")])
    documents = np.split(both, np.flatnonzero(both == 256) + 1)[:-1]
    expected = text.read_text().split("<|endoftext|>\n")[:-1]
    assert sorted(bytes(d[:-1].astype(np.uint8)).decode() for d in documents) == sorted(expected)


def test_data_show_prints_a_store_and_a_source(ray_cluster, raygpt, text):
    raygpt("prepare", text, "--out", "store", "--tokenizer", "bytes")
    _, out, _ = raygpt("data", "show", "store", "--rows", "1")
    assert "train_tokens" in out
    assert "says something of its own" in out
    _, out, _ = raygpt("data", "show", text, "--json")
    assert json.loads(out)["rows"][0] == "Document 0 says something of its own.\n"


SMALL = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "schedule.warmup_steps=0"]
SHORT = [*SMALL, "training.steps=4", "training.batch_tokens=80", "training.log_every=2", "data.tokenizer=bytes"]


def test_train_prints_every_derived_number_then_losses_a_sample_and_three_commands(trained_run):
    out = (trained_run("jax").parent / "said.txt").read_text()
    for label in ("parameters", "corpus", "training", "compute", "run", "batch", "computing"):
        assert f"\n{label} " in f"\n{out}"
    assert "20 steps × 4 rows × 32 tokens = 2,560 tokens" in " ".join(out.split())
    assert re.search(
        r"batch 4 rows = \d+ × 1 accumulated.*, \d+ devices?; about \S+ MiB per device", " ".join(out.split())
    )
    assert re.search(r"step +5/20  loss \d+\.\d{4}  [\d,]+ tokens/s", out)
    start, end = re.search(r"validation loss (\S+) at the start, (\S+) at the end", out).groups()
    assert float(end) < float(start)
    assert re.search(r"\nplan +\S+ \S?s a step planned, \S+ \S?s taken \(\S+%\); \S+ MiB planned on a device", out)
    *_, after = out.split("Try next:\n")
    assert len(after.splitlines()) == 3


def test_train_as_json_gives_metrics_and_plan_and_saves_the_recipe(ray_cluster, raygpt, text, tmp_path):
    _, out, _ = raygpt("train", "tiny", f"data.source={text}", *SHORT, "run.name=json", "--json")
    result = json.loads(out)
    assert result["path"] == str(tmp_path / "runs" / "json")
    assert result["metrics"]["step"] == 4
    assert result["plan"]["batch_tokens"] == 80
    assert result["stopped"] is None
    assert "steps: 4" in (tmp_path / "runs" / "json" / "recipe.yaml").read_text()
    assert (tmp_path / "runs" / "json" / "tokenizer.json").exists()


def test_where_output_is_for_a_program_trouble_is_told_beside_it(capsys):
    for event in (Warned("a save failed"), StepLogged(1, {"loss": 2.0})):
        show_message(event)
    assert capsys.readouterr() == ("", "warning: a save failed\n")


def test_stop_asks_the_driver_of_a_run_and_refuses_where_there_is_none(raygpt, tmp_path):
    with locked(str(tmp_path)):
        status, out, _ = raygpt("stop", tmp_path)
        assert status == 0
        assert re.fullmatch(rf"asked .+, process {os.getpid()}, since .+ to stop; it saves after one of .+\n", out)
        assert (tmp_path / STOP_FILE).exists()
    assert fails(raygpt("stop", tmp_path)) == f"{tmp_path} is not being trained; there is nothing to stop"


def test_stop_finds_a_sweep_by_its_name(raygpt, tmp_path):
    """Its folder has a lock and no recipe."""
    with locked(str(tmp_path / "runs" / "tiny-sweep")):
        assert raygpt("stop", "tiny-sweep")[0] == 0
        assert (tmp_path / "runs" / "tiny-sweep" / STOP_FILE).exists()


# Bad input: one line, status 1, nothing that looks whole


def test_an_unknown_key_is_answered_with_the_nearest_right_one(raygpt):
    message = fails(raygpt("train", "tiny", "training.step=5"))
    assert message == "recipe 'tiny': unknown key 'training.step'; did you mean 'training.steps'?"


def test_an_option_as_in_other_programs_is_answered_in_one_line(raygpt):
    for verb in (("train", "tiny"), ("train",), ("submit", "tiny", "--cluster", "http://head:8265")):
        assert fails(raygpt(*verb, "--max_iters=5")).endswith("a key is written without dashes, e.g. training.steps=5")


def test_an_unknown_recipe_is_answered_with_the_nearest_right_one(raygpt):
    assert "did you mean 'tiny'?" in fails(raygpt("train", "tyni"))


@pytest.mark.parametrize(
    ("content", "name", "complaint"),
    [
        (b"fine\n\xff\xfe broken", "bad.txt", "invalid UTF-8 at byte 5"),
        (gzip.compress(b"text " * 1000)[:-20], "cut.txt.gz", "is not a complete .gz file"),
        (b"", "empty.txt", "is empty"),
        (b" \n\n", "blank.txt", "has no text in it"),
        (b"{not json}\n", "bad.jsonl", "line 1: not JSON"),
        (b'{"body": "x"}\n', "other.jsonl", "no column 'text', there is body; set data.column"),
        (b"PAR1 not really", "bad.parquet", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_and_no_store_is_left(ray_cluster, raygpt, tmp_path, content, name, complaint):
    (tmp_path / name).write_bytes(content)
    message = fails(raygpt("prepare", tmp_path / name, "--out", "store", "--tokenizer", "bytes"))
    assert complaint in message
    assert name in message
    assert not (tmp_path / "store" / "index.json").exists()
    assert re.search("not complete|no text", fails(raygpt("data", "show", "store")))


@pytest.mark.parametrize("verb", ["prepare {} --out store", "train tiny data.source={}", "train tiny data.val={}"])
def test_a_bad_file_is_found_before_ray_starts(raygpt, tmp_path, monkeypatch, verb):
    def start(cpus=None):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("raygpt.corpus.prepare.connected", start)
    monkeypatch.setattr("raygpt.training.ray.launch.connected", start)
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "windows.txt").write_text("good, too", "utf-16")
    message = fails(raygpt(*verb.format("*.txt").split()))
    assert message == (
        f"{tmp_path}/windows.txt: is UTF-16, by its byte-order mark; convert it, e.g. iconv -f UTF-16 -t utf-8"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.txt", "windows.txt"]


def test_a_missing_source_says_what_to_write(raygpt):
    message = fails(raygpt("prepare", "nowhere.txt", "--out", "store"))
    assert message.startswith("no text at 'nowhere.txt': no such file, folder or match; write a path, stdlib")


def test_a_bad_option_of_prepare_is_explained_like_a_recipes_key(raygpt, text):
    assert "data.tokenizer: 'bpe:3'" in fails(raygpt("prepare", text, "--out", "store", "--tokenizer", "bpe:3"))
    assert fails(raygpt("prepare", "", "--out", "store")).startswith("data.source: '' is empty; write ")
    assert fails(raygpt("prepare", text, "--out", "")).startswith("--out: is empty; write a new folder ")
    assert "data.split: 'tial' is none of" in fails(raygpt("prepare", text, "--out", "store", "--split", "tial"))


def test_a_corpus_shorter_than_a_window_says_so(ray_cluster, raygpt, tmp_path):
    (tmp_path / "short.txt").write_text("too short\n")
    for length in ("training.steps=300", "training.epochs=2"):
        message = fails(raygpt("train", "tiny", "data.source=short.txt", "data.tokenizer=bytes", length))
        assert "fewer than a window of 129; set model.context lower, or use more text" in message


def test_a_bin_file_shorter_than_a_window_says_so(raygpt, tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype="<u2").tofile(tmp_path / name)
    message = fails(raygpt("train", "tiny", f"data.source={tmp_path}", "data.tokenizer=bytes"))
    assert "has 100 tokens, fewer than a window of 129" in message


def test_a_tokenizer_that_does_not_match_the_store_is_refused(ray_cluster, raygpt, text):
    raygpt("prepare", text, "--out", "store", "--tokenizer", "bytes")
    message = fails(raygpt("train", "tiny", "data.source=store", "data.tokenizer=char"))
    assert re.match(r"data\.tokenizer: char does not match \S+/store, whose tokens", message)


def test_a_folder_that_cannot_be_written_is_named(raygpt, text):
    message = fails(raygpt("prepare", text, "--out", "/proc/nowhere", "--tokenizer", "bytes"))
    assert "/proc/nowhere" in message


def test_a_store_of_another_corpus_is_not_written_over(ray_cluster, raygpt, text, tmp_path):
    raygpt("prepare", text, "--out", "store", "--tokenizer", "bytes")
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    message = fails(raygpt("prepare", text, "--out", "store", "--tokenizer", "char"))
    assert "holds tokens of another source, tokenizer or setting" in message
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before


def test_a_prompt_that_the_tokenizer_cannot_read_is_refused_before_the_run_starts(ray_cluster, raygpt, text, tmp_path):
    words = ("train", "tiny", f"data.source={text}", *SHORT, "data.tokenizer=char", "training.prompts=[Doc, D€]")
    message = fails(raygpt(*words))
    assert message.startswith("training.prompts: 'D€' cannot be read: the character '€' (U+20AC) is not among")
    assert message.endswith("; leave it out")
    assert not (tmp_path / "runs" / "tiny").exists()


def test_items_that_the_tokenizer_cannot_encode_are_refused_before_the_run_starts(ray_cluster, raygpt, text, tmp_path):
    (tmp_path / "items.jsonl").write_text('{"text": "Doc"}\n{"text": "Doc €"}\n')
    words = ("train", "tiny", f"data.source={text}", *SHORT, "data.tokenizer=char")
    message = fails(raygpt(*words, "training.eval_tasks=lambada=items.jsonl"))
    assert message.startswith(
        "training.eval_tasks: lambada cannot be evaluated: the character '€' (U+20AC) is not among"
    )
    assert message.endswith("; leave it out")
    assert not (tmp_path / "runs" / "tiny").exists()
