"""What comes after training, as people type it: generate, eval, export, import, for a run of each engine."""

import json
import shutil

import numpy as np
import pytest

from raygpt.runs import open_run

TEXT = "the café sat on the mat; "
FILES = {"config.json", "generation_config.json", "loss.svg", "model.safetensors", "README.md", "tokenizer.json"}


@pytest.fixture(scope="module", params=["jax", "torch"])
def engine(request):
    return request.param


@pytest.fixture
def run(engine, trained_run):
    return trained_run(engine)


def fails(result):
    """The one line that a failed command leaves."""
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def test_a_run_goes_from_generate_to_eval_export_and_import(raygpt, run, tmp_path, engine):
    greedy = ("--prompt", "the caf", "--tokens", 24, "--temperature", 0)
    status, written, err = raygpt("generate", run, *greedy)
    known = open_run(str(run)).scores[20]
    assert status == 0
    assert f"checkpoint of step 20, validation loss {known:.4f}" in err

    status, out, _ = raygpt("eval", run, "--json")
    scores = json.loads(out)["tasks"]["validation"]
    assert scores["loss"] == pytest.approx(known, abs=1e-5)  # as training measured it
    assert scores["perplexity"] == pytest.approx(np.exp(known), rel=1e-5)
    assert (scores["tokens"], scores["bytes"]) == (320, 320)  # each byte is a token
    assert scores["bits_per_byte"] == pytest.approx(known / np.log(2), rel=1e-5)

    status, out, _ = raygpt("export", run, tmp_path / "folder")
    assert status == 0
    assert {path.name for path in (tmp_path / "folder").iterdir()} == FILES | {"tokenizer_config.json"}
    text = compare_with_transformers(tmp_path / "folder", engine, run)
    assert f"{text}\n" == written

    status, out, _ = raygpt("import", tmp_path / "folder", tmp_path / "again", "--engine", engine)
    assert status == 0
    assert "run.start_from=" in out
    status, out, _ = raygpt("generate", "again", *greedy, "--json")
    again = json.loads(out)
    assert (again["step"], again["val_loss"]) == (0, None)
    assert again["samples"] == [{"text": text.removeprefix("the caf"), "tokens": 24, "ended": False}]
    assert fails(raygpt("eval", "again")).endswith("has no validation text of its own; name a --task instead")


def test_an_imported_model_is_trained_on(ray_cluster, raygpt, jax_run, tmp_path):
    raygpt("export", jax_run, tmp_path / "folder")
    raygpt("import", tmp_path / "folder", tmp_path / "runs" / "theirs")
    sizes = open_run(str(jax_run)).recipe
    data, model = sizes.data, sizes.model
    shape = [f"model.{key}={getattr(model, key)}" for key in ("layers", "heads", "width", "context")]
    lengths = ["training.batch_tokens=128", "training.steps=4", "training.eval_every=4", "schedule.warmup_steps=0"]
    names = ["run.name=further", "run.start_from=theirs", f"data.source={data.source}", "data.tokenizer=bytes"]
    status, _, err = raygpt("train", "tiny", *names, *shape, *lengths)
    assert status == 0, err
    lines = [json.loads(line) for line in (tmp_path / "runs/further/metrics.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert losses[0] == pytest.approx(open_run(str(jax_run)).scores[20], abs=1e-5)  # where the exported one stopped
    assert losses[-1] < losses[0]


def compare_with_transformers(folder, engine, run):
    """transformers opens the folder; its logits are ours, and its tokenizer's ids. The text that it writes greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from raygpt.inference.loaded import load

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == model.config.eos_token_id == 256
    loaded = load(open_run(str(run)))
    assert loaded.engine == engine
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, -1].numpy()
    ours, _ = loaded.reader.prefill(loaded.state, np.array([ids], dtype=np.int32))
    np.testing.assert_allclose(ours[0], theirs, atol=1e-4)
    card = (folder / "README.md").read_text()
    assert f"validation loss at step 20 | {loaded.val_loss:.4f} |" in card
    assert "layers: 2" in card
    assert "(loss.svg)" in card
    prompt = tokenizer("the caf", return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0])


def test_several_samples_are_written_in_one_batch_and_a_seed_repeats_them(raygpt, run):
    words = ("generate", run, "--prompt", "the", "--samples", 3, "--tokens", 12, "--temperature", 3, "--json")
    first, same, other = (json.loads(raygpt(*words, "--seed", seed)[1])["samples"] for seed in (1, 1, 2))
    assert first == same != other
    assert len({sample["text"] for sample in first}) == 3
    status, out, _ = raygpt(*words[:-1], "--seed", 1)
    assert status == 0
    assert out.count("sample ") == 3
    assert out.startswith("sample 1\nthe")


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(raygpt, run):
    words = ("generate", run, "--prompt", "the", "--temperature", 0, "--tokens", 25)
    _, whole, _ = raygpt(*words)
    stop = whole[10:13]
    _, out, _ = raygpt(*words, "--stop", stop, "--stop", "dog")
    assert out == f"the{whole[3:].partition(stop)[0]}\n"


def test_past_the_context_the_text_goes_on_and_that_is_said_once(raygpt, run):
    status, _, err = raygpt("generate", run, "--prompt", "the", "--tokens", 90, "--seed", 0)
    assert status == 0
    assert err.count("the model sees 32 tokens at once; whenever they are full, its last 16 are read in again") == 1


def test_prompts_can_be_asked_for_one_after_another(raygpt, run, monkeypatch):
    _, alone, _ = raygpt("generate", run, "--prompt", "the caf", "--tokens", 19, "--temperature", 0)
    lines = iter(["the caf", "the caf", "", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    status, out, _ = raygpt("generate", run, "--interactive", "--tokens", 19, "--temperature", 0)
    assert (status, out) == (0, alone * 2)


@pytest.fixture(scope="module")
def jax_run(trained_run):
    return trained_run("jax")


@pytest.mark.parametrize("verb", [("generate",), ("eval",), ("export", "out")])
def test_what_is_no_run_is_refused_by_every_verb(raygpt, jax_run, tmp_path, verb):
    name, *more = verb
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        message = f"{folder} is no run, it has no recipe.yaml; name a folder that raygpt train made"
        assert fails(raygpt(name, folder, *more)) == message
    assert (
        fails(raygpt(name, jax_run, *more, "--step", 7)) == f"{jax_run} has no checkpoint of step 7; there are: 10, 20"
    )


def test_broken_runs_and_prompts_end_in_one_line(raygpt, jax_run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(jax_run, broken)
    (broken / "checkpoints" / "step-00000010" / "checkpoint.json").unlink()
    assert fails(raygpt("generate", "broken", "--step", 10)).endswith("step 10 is unfinished; there are: 20")
    assert fails(raygpt("generate", "broken", "--prompt", "")).startswith("the prompt is empty; write some text")
    (broken / "tokenizer.json").write_text('{"kind": "char", "characters": "abc"}')
    assert "its tokenizer is not the one it was trained with" in fails(raygpt("generate", "broken", "--prompt", "a"))
    (broken / "checkpoints" / "step-00000020" / "checkpoint.json").write_text("{")
    assert "has no whole checkpoint (unfinished or damaged: 10, 20)" in fails(raygpt("generate", "broken"))
    (broken / "recipe.yaml").write_text("model: {layers: many}")
    assert "model.layers" in fails(raygpt("export", "broken", "out"))


def test_export_overwrites_nothing(raygpt, jax_run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    message = f"{tmp_path}/full is not empty; name a new folder, or delete it"
    assert fails(raygpt("export", jax_run, "full")) == message


def test_a_missing_extra_is_named(raygpt, trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = "engine: torch needs torch, which is not installed: pip install 'raygpt[torch]'"
    assert fails(raygpt("generate", trained_run("torch"))) == message


def test_tasks_are_known_by_name(raygpt, jax_run):
    message = "--task arc: write validation, hellaswag, lambada, or e.g. lambada=FILE.jsonl"
    assert fails(raygpt("eval", jax_run, "--task", "arc")) == message
    assert "cannot be read (No such file" in fails(raygpt("eval", jax_run, "--task", "lambada=nowhere.jsonl"))


def test_a_run_is_listed_shown_and_reported(raygpt, run, tmp_path, engine):
    known = open_run(str(run))
    listed = json.loads(raygpt("runs", run.parent, "--json")[1])
    (found,) = [facts for facts in listed if facts["name"] == "small"]
    assert (found["engine"], found["state"], found["step"], found["steps"]) == (engine, "finished", 20, 20)
    assert found["val_loss"] == known.scores[20]
    shown = json.loads(raygpt("show", run, "--json")[1])
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [10, 20]
    status, _, _ = raygpt("report", run, "--out", "page.html")
    assert status == 0
    page = (tmp_path / "page.html").read_text()
    drawn = json.loads(page.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert drawn["train"]["step"] == [5, 10, 15, 20]
    logged = [line["loss"] for line in known.metrics if "loss" in line]
    assert drawn["train"]["loss"] == pytest.approx(logged, rel=1e-4)
