"""The status of runs: `raygpt runs`, `show` and `logs`, from what lies in run directories."""

import io
import json
import os
import socket
import time

import pytest
from rich.console import Console

from raygpt import storage
from raygpt.corpus import tokenizers
from raygpt.formatting import ago, duration
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints, open_run
from raygpt.runs.records import Outcome, keep_sample, write_about, write_result
from raygpt.runs.status import details, status
from raygpt.show import results

NO_RUN = "name a folder that raygpt train made; `raygpt runs` lists those in runs/"


def make_run(home, name, *, steps=20, until=20, lines=(), **settings):
    """A run directory as training leaves it, with a checkpoint at `until`."""
    folder = home / name
    recipe = load_recipe(
        "gpt2-tiny", {"training.steps": steps, "data.tokenizer": "bytes", "run.name": name, **settings}
    )
    tokenizers.save(tokenizers.Bytes(), str(folder))
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    logged = [{"step": 0, "val_loss": 5.5, "time": 1000.0}]
    for step in range(10, until + 1, 10):
        logged += [
            {"step": step, "loss": 5 - step / 10, "tokens": step * 4096, "tokens_per_s": 100.0, "time": 1000.0 + step}
        ]
        logged += [{"step": step, "val_loss": 5.5 - step / 10, "time": 1001.0 + step}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*logged, *lines]))
    part, saved = checkpoints.parts_folder(str(folder)) / "0", checkpoints.folder_of(str(folder), until)
    part.mkdir(parents=True)
    (part / "weights.bin").write_bytes(b"w" * 100)
    facts = {"engine": "jax", "recipe": {"training": {"steps": steps or 60}}}
    checkpoints.commit(saved, until, facts, checkpoints.publish(part, saved))
    checkpoints.write_val_loss(str(folder), until, 5.5 - until / 10)
    return folder


def lock(folder, process, host=None, renewed=None):
    renewed = time.time() if renewed is None else renewed
    owner = {"user": "ann", "host": host or socket.gethostname(), "process": process, "since": 0.0}
    (folder / "hold.json").write_text(json.dumps({**owner, "renewed": renewed, "token": "t"}))


def state(folder):
    facts = status(open_run(str(folder)))
    return facts["state"], facts["why"]


def test_a_run_that_reached_its_last_step_and_was_scored_is_finished(tmp_path):
    facts = status(open_run(str(make_run(tmp_path, "done"))))
    assert (facts["state"], facts["step"], facts["steps"]) == ("finished", 20, 20)
    assert (facts["loss"], facts["val_loss"], facts["tokens_per_s"], facts["mfu"]) == (3.0, 3.5, 100.0, None)
    assert (facts["engine"], facts["model"], facts["last_seen"]) == ("jax", "4×128", 1021.0)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, "4×128"), ({"model.preset": "gpt2"}, "gpt2"), ({"model": {"preset": "llama", "depth": 6}}, "llama 6×384")],
)
def test_a_model_has_its_size_and_its_familys_name(settings, name, tmp_path):
    assert status(open_run(str(make_run(tmp_path, "mine", **settings))))["model"] == name


def test_a_run_is_running_while_its_driver_lives_whatever_an_earlier_one_left(tmp_path):
    folder = make_run(tmp_path, "mine", until=10)
    assert state(folder) == ("stopped", "")
    write_result(str(folder), Outcome("failed", "no space left"))
    assert state(folder) == ("failed", "no space left")
    lock(folder, os.getpid())
    assert state(folder) == ("running", "")
    lock(folder, 1, host="elsewhere", renewed=time.time())
    assert state(folder) == ("running", "")


def test_a_run_whose_driver_was_killed_has_failed_and_says_whose_it_was(tmp_path):
    folder = make_run(tmp_path, "mine", until=10)
    lock(folder, 2**22 + 1)  # above Linux's highest process number
    kind, why = state(folder)
    assert kind == "failed"
    assert why.startswith(
        f"its driver is gone without recording a result: ann on {socket.gethostname()}, process 4194305"
    )


def test_logs_are_followed_until_the_run_ends_also_one_that_starts_again(tmp_path, raygpt, monkeypatch):
    folder = make_run(tmp_path, "mine", steps=30)
    known = (folder / "metrics.jsonl").read_text()
    lock(folder, os.getpid())
    polls = []

    def meanwhile(seconds):
        """It starts again after step 10, then ends."""
        polls.append(seconds)
        again = [{"step": 10, "restart": True, "time": 1030.0}, {"step": 15, "loss": 2.5, "time": 1031.0}]
        if len(polls) == 1:
            kept = "".join(line + "\n" for line in known.splitlines() if json.loads(line)["step"] <= 10)
            (folder / "metrics.jsonl").write_text(kept + "".join(json.dumps(line) + "\n" for line in again))
        else:
            (folder / "hold.json").unlink()

    monkeypatch.setattr("raygpt.show.progress.time.sleep", meanwhile)
    done, out, _ = raygpt("logs", folder)
    assert (done, len(polls)) == (0, 2)
    assert out.splitlines() == [
        "step  0/30  val loss 5.5000",
        "step 10/30  loss 4.0000  100 tokens/s  13:39 left",
        "step 10/30  val loss 4.5000",
        "step 20/30  loss 3.0000  100 tokens/s  6:49 left",
        "step 20/30  val loss 3.5000",
        "continuing after step 10",
        "step 15/30  loss 2.5000",
        "stopped",
    ]
    write_result(str(folder), Outcome("failed", "no space left"))
    done, out, _ = raygpt("logs", folder)
    assert (done, out.splitlines()[-1]) == (1, "failed: no space left")


def test_the_steps_of_a_run_in_epochs_are_its_checkpoints(tmp_path):
    folder = make_run(tmp_path, "epochs", steps=None, until=10, **{"training.epochs": 2})
    facts = status(open_run(str(folder)))
    assert (facts["step"], facts["steps"], facts["state"]) == (10, 60, "stopped")


def test_details_add_checkpoints_restarts_sample_and_disk_use(tmp_path):
    folder = make_run(tmp_path, "mine", lines=[{"step": 20, "restart": True, "time": 1030.0}])
    keep_sample(str(folder), 0, "noise")
    keep_sample(str(folder), 20, "words")
    write_about(str(folder), {"device": "cpu"})
    facts = details(open_run(str(folder)))
    marker = folder / "checkpoints" / "step-00000020" / "checkpoint.json"
    assert facts["checkpoints"] == [{"step": 20, "val_loss": 3.5, "bytes": 100 + marker.stat().st_size}]
    assert facts["restarts"] == [{"step": 20, "time": 1030.0}]
    assert facts["sample"] == {"step": 20, "text": "words"}
    assert (facts["best"], facts["tokens"], facts["about"]["device"]) == (20, 20 * 4096, "cpu")
    assert facts["parameters"] == facts_of_hand(257)
    assert facts["disk_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert facts["recipe"]["training"]["steps"] == 20


def facts_of_hand(vocab):
    """tiny's parameters, counted layer by layer."""
    block = (128 * 384 + 384) + (128 * 128 + 128) + (128 * 512 + 512) + (512 * 128 + 128) + 4 * 128
    return vocab * 128 + 128 * 128 + 4 * block + 2 * 128


def test_runs_are_listed_the_last_seen_first_and_a_broken_one_is_a_line_too(raygpt, tmp_path):
    home = tmp_path / "runs"
    make_run(home, "older", until=10)
    make_run(home, "newer", lines=[{"step": 20, "loss": 1.25, "time": 5000.0}])
    make_run(home, "broken")
    (home / "broken" / "recipe.yaml").write_text("model: {widht: 3}")
    (home / "stores" / "abc").mkdir(parents=True)
    status, out, _ = raygpt("runs")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["name", "engine", "model", "step", "loss", "val", "loss", "tokens/s", "state", "last", "seen"]
    assert lines[1][:8] == ["newer", "jax", "4×128", "20/20", "1.2500", "3.5000", "100", "finished"]
    assert lines[2][:8] == ["older", "jax", "4×128", "10/20", "4.0000", "4.5000", "100", "stopped"]
    assert lines[3][0] == "broken"
    assert "unreadable" in lines[3]
    assert out.splitlines()[4].startswith("broken: recipe ")
    assert "widht" in out.splitlines()[4]
    status, out, _ = raygpt("runs", home, "--json")
    assert [run["name"] for run in json.loads(out)] == ["newer", "older", "broken"]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("result.json", "[1]", "Input should be an object"),
        ("result.json", '{"state": "lost", "why": ""}', "state: Input should be 'finished', 'stopped' or 'failed'"),
        ("plan.json", "{}", "steps: Field required"),
        ("about.json", '{"device": "cpu"}', "versions: Field required"),
        ("checkpoints/scores.json", "[1]", "Input should be an object"),
        ("checkpoints/scores.json", '{"20": "low"}', "20: Input should be a valid number"),
    ],
)
def test_a_file_of_another_form_is_named_in_one_line_and_the_other_runs_are_listed(
    raygpt, tmp_path, file, content, reason
):
    make_run(tmp_path / "runs", "sound")
    folder = make_run(tmp_path / "runs", "edited", until=10)
    (folder / file).write_text(content)
    line = f"{folder}/{file} is damaged ({reason}); delete it and run the same command again"
    for verb in ("show", "report"):
        assert raygpt(verb, folder)[::2] == (1, f"error: {line}\n")
    status, out, _ = raygpt("runs")
    assert status == 0
    assert "sound" in out
    assert (f"edited: {line}" in out) == (file not in ("plan.json", "about.json"))  # which `runs` does not read


def test_a_result_may_lack_its_reason(tmp_path):
    folder = make_run(tmp_path, "mine")
    (folder / "result.json").write_text('{"state": "failed"}')
    assert state(folder) == ("failed", "")


@pytest.mark.parametrize("renewed", ["null", '"now"'])
def test_a_lock_of_another_form_is_none(raygpt, tmp_path, renewed):
    folder = make_run(tmp_path / "runs", "mine")
    owner = '{"user": "ann", "host": "here", "process": 1, "since": 0.0, "token": "t", "renewed": %s}'
    (folder / "hold.json").write_text(owner % renewed)
    assert state(folder) == ("finished", "")


def test_samples_without_a_text_are_left_out(raygpt, tmp_path):
    folder = make_run(tmp_path / "runs", "mine")
    (folder / "samples.jsonl").write_text('{"step": 10, "text": "words"}\n{"step": 20}\n{"step": 20, "text": 5}\n')
    for verb in ("show", "report"):
        assert raygpt(verb, folder)[0] == 0
    assert details(open_run(str(folder)))["sample"] == {"step": 10, "text": "words"}


def test_json_of_a_run_that_diverged_is_json(raygpt, tmp_path):
    """JSON has no NaN, which Python writes and most other programs refuse."""
    diverged = [{"step": 20, "loss": float("nan"), "val_loss": float("inf"), "time": 1030.0}]
    folder = make_run(tmp_path / "runs", "mine", lines=diverged)
    for words in (("runs", "--json"), ("show", folder, "--json")):
        _, out, _ = raygpt(*words)
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        run = found[0] if words[0] == "runs" else found
        assert (run["step"], run["loss"], run["val_loss"], run["tokens_per_s"]) == (20, None, None, 100.0)


def test_logs_show_lines_without_a_time_lines_of_one_moment_and_of_step_0(raygpt, tmp_path):
    folder = make_run(tmp_path, "mine", until=10)
    lines = [
        {"step": 0, "loss": 5.0, "tokens": 0, "tokens_per_s": 100.0},
        {"step": 1, "loss": 4.5, "tokens": 4096, "tokens_per_s": 0.0, "time": 7.0},
        {"step": 1, "val_loss": 4.25, "time": 7.0},
        {"step": 2, "loss": 4.0, "tokens_per_s": 100.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = raygpt("logs", folder)
    assert (status, out.splitlines()) == (
        0,
        [
            "step  0/20  loss 5.0000  100 tokens/s",
            "step  1/20  loss 4.5000  0 tokens/s",
            "step  1/20  val loss 4.2500",
            "step  2/20  loss 4.0000  100 tokens/s",
            "stopped",
        ],
    )


def test_a_folder_that_may_not_be_read_is_a_line_beside_the_runs(raygpt, tmp_path, monkeypatch):
    make_run(tmp_path / "runs", "mine")
    (tmp_path / "runs" / "private").mkdir()
    real = storage.exists

    def exists(uri):
        if "private" in uri:
            raise PermissionError(13, "Permission denied", uri)
        return real(uri)

    monkeypatch.setattr(storage, "exists", exists)
    status, out, _ = raygpt("runs", tmp_path / "runs")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["name", "mine", "private", "private:"]
    assert out.splitlines()[3] == "private: Permission denied"


@pytest.mark.parametrize(("width", "left_out"), [(120, []), (86, ["engine"]), (60, ["engine", "tokens/s", "model"])])
def test_on_a_narrow_terminal_runs_have_fewer_columns(tmp_path, monkeypatch, width, left_out):
    make_run(tmp_path, "one")
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, highlight=False)
    monkeypatch.setattr(results, "out", terminal)
    results.show_runs([{**status(open_run(str(tmp_path / "one"))), "model": "nanochat 12×768"}])
    shown = terminal.file.getvalue()
    assert [name for name in ("engine", "tokens/s", "model") if name not in shown] == left_out
    assert all(name in shown for name in ("one", "step", "val loss", "finished"))


def test_a_long_name_is_never_cut(raygpt, tmp_path):
    make_run(tmp_path / "runs", "n" * 100)
    assert "n" * 100 in raygpt("runs")[1]


def test_a_run_is_shown(raygpt, tmp_path):
    folder = make_run(tmp_path, "mine", lines=[{"step": 20, "restart": True, "time": 1030.0}])
    keep_sample(str(folder), 20, "some [bold]words\x1b[31m")
    status, out, _ = raygpt("show", folder)
    assert status == 0
    assert "step 20/20, 81,920 tokens" in out
    assert "loss 3.0000, validation loss 3.5000" in out
    assert "1, after step 20" in out
    assert "step 20     3.5000" in out
    assert "some [bold]words�[31m" in out
    recipe = [line.split() for line in out.split("recipe.yaml has all of it")[1].splitlines() if line]
    assert recipe[:2] == [["data.tokenizer", "bytes"], ["schedule.warmup_steps", "20"]]  # the defaults are left out
    assert ["training.steps", "20"] in recipe
    status, out, _ = raygpt("show", folder, "--json")
    assert json.loads(out) == details(open_run(str(folder)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("runs",), "there are no runs in {home}/runs; name the folder that raygpt train put them in"),
        (("runs", "mine"), "there are no runs in {home}/mine; it is a run itself: raygpt show"),
        (("show", "nowhere"), "nowhere is no run, it has no recipe.yaml; " + NO_RUN),
    ],
)
def test_what_is_no_run_ends_in_one_line(raygpt, tmp_path, words, message):
    make_run(tmp_path, "mine")
    status, out, err = raygpt(*words)
    assert (status, out) == (1, "")
    assert err == f"error: {message.format(home=tmp_path)}\n"


def test_runs_on_s3_are_listed_and_shown(raygpt, tmp_path, s3):
    from raygpt import storage

    folder = make_run(tmp_path, "mine")
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write_bytes(f"{s3}/status/mine/{path.relative_to(folder).as_posix()}", path.read_bytes())
    _, out, _ = raygpt("runs", f"{s3}/status", "--json")
    (run,) = json.loads(out)
    assert (run["name"], run["state"], run["loss"]) == ("mine", "finished", 3.0)
    there = json.loads(raygpt("show", f"{s3}/status/mine", "--json")[1])
    here = details(open_run(str(folder)))
    assert {**there, "folder": ""} == {**here, "folder": ""}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7199, "120 min ago"),
        (7200, "2 h ago"),
        (4 * 86400, "4 days ago"),
    ],
)
def test_how_long_ago_is_said_in_words(seconds, text):
    assert ago(1000.0, 1000.0 + seconds) == text
    assert ago(None) == "never"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5.9, "0:05"), (725, "12:05"), (3605, "1:00:05"), (90005, "1 day 1:00:05"), (176405, "2 days 1:00:05")],
)
def test_a_duration_is_read_as_a_clock(seconds, shown):
    assert duration(seconds) == shown
