"""Training and what comes after, as people type it, from train to report, for a run of each engine."""

import gzip
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest

from raygpt import storage
from raygpt.engines import require
from raygpt.errors import RaygptError
from raygpt.formatting import short_time
from raygpt.inference.loaded import load
from raygpt.recipes import load_recipe
from raygpt.runs import open_run

TEXT = "the café sat on the mat; "
FILES = {"config.json", "generation_config.json", "loss.svg", "model.safetensors", "README.md", "tokenizer.json"}


@pytest.fixture(scope="module", params=["jax", "torch"])
def engine(request):
    return request.param


@pytest.fixture
def run(engine, trained_run):
    return trained_run(engine)


@pytest.fixture(scope="module")
def jax_run(trained_run):
    return trained_run("jax")


def fails(result):
    """The one line that a failed command leaves."""
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def test_training_left_a_sample_of_each_prompt_at_every_evaluation(run):
    samples = open_run(str(run)).samples
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, prompt) for step in (0, 10, 20) for prompt in ("the caf", "on ")
    ]
    assert all(sample["text"].startswith(sample["prompt"]) for sample in samples)
    assert all(first["text"] != last["text"] for first, last in zip(samples[:2], samples[-2:], strict=True))
    said = (run.parent / "said.txt").read_text()
    for prompt in ("the caf", "on "):
        assert f"\na sample of what it writes now from {prompt!r}\n{prompt}" in said


def plan_and_run(run):
    """The plan in a run's files, and what is said of both; on a GPU its peak follows."""
    plan = json.loads((run / "plan.json").read_text())
    planned = plan["step_s"]["total"]
    taken = 128 / np.median([line["tokens_per_s"] for line in open_run(str(run)).metrics if "tokens_per_s" in line])
    step = f"{short_time(planned)} a step planned, {short_time(taken)} taken ({taken / planned - 1:+.0%})"
    return plan, f"{step}; {plan['memory']['total'] / 2**20:.1f} MiB planned on a device"


def test_a_runs_plan_is_kept_and_compared_with_it_at_its_end_and_by_show(raygpt, run, engine):
    plan, compared = plan_and_run(run)
    assert (plan["engine"], plan["fits"]) == (engine, True)
    assert (plan["steps"], plan["tokens"], plan["accumulation"]) == (20, 20 * 128, 1)
    assert f"\nplan            {compared}" in (run.parent / "said.txt").read_text()
    assert f" plan {compared}" in " ".join(raygpt("show", run)[1].split())


def test_the_tutorials_smoke_recipe_trains_a_smaller_model_on_two_workers(trained_run):
    run, smoke = open_run(str(trained_run("torch"))), load_recipe("gpt2-124m-wikitext103-smoke")
    assert (run.recipe.schedule, run.recipe.cluster) == (smoke.schedule, smoke.cluster)
    assert (run.recipe.model.dropout, run.recipe.data.order) == (smoke.model.dropout, smoke.data.order)
    assert run.recipe.optimizer == smoke.optimizer.model_copy(update={"learning_rate": 0.01})
    assert (run.about["workers"], run.about["mesh"]) == ("2", "data 2")
    assert run.val_losses[0] == pytest.approx(np.log(257), rel=0.02)
    assert run.val_losses[20] < run.val_losses[10] < 0.8 * run.val_losses[0]


def test_tensorboard_is_told_what_is_logged(jax_run):
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    told = {}
    for file in (jax_run / "tensorboard").iterdir():
        for record in records_of(file.read_bytes()):
            event = events.Event.FromString(record)
            told |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    for name, steps in (("loss", [5, 10, 15, 20]), ("grad_norm", [5, 10, 15, 20]), ("val_loss", [0, 10, 20])):
        logged = {line["step"]: line[name] for line in open_run(str(jax_run)).metrics if name in line}
        assert list(logged) == steps
        assert [told[name, step] for step in steps] == pytest.approx(list(logged.values()), rel=1e-6)


def records_of(content):
    """Of a file of TensorBoard's: length, its checksum, that many bytes, their checksum."""
    while content:
        length = int.from_bytes(content[:8], "little")
        yield content[12 : 12 + length]
        content = content[16 + length :]


def test_a_profile_has_the_steps_that_were_asked_for(jax_run):
    trace = json.loads(gzip.decompress((jax_run / "profile" / "steps-12-14.json.gz").read_bytes()))
    assert any(event.get("ph") == "X" and event.get("dur") for event in trace["traceEvents"])


def test_a_run_goes_from_generate_to_eval_export_and_import(raygpt, run, tmp_path, engine):
    greedy = ("--prompt", "the caf", "--tokens", 24, "--temperature", 0)
    status, written, err = raygpt("generate", run, *greedy)
    known = open_run(str(run)).val_losses[20]
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
    assert "optimizer.learning_rate=3e-5 schedule.warmup_steps=20 training.steps=200" in out
    status, out, _ = raygpt("generate", "again", *greedy, "--json")
    again = json.loads(out)
    assert (again["step"], again["val_loss"]) == (0, None)
    assert again["samples"] == [{"text": text.removeprefix("the caf"), "tokens": 24, "ended": False}]
    assert fails(raygpt("eval", "again")).endswith("has no validation text of its own; name a --task instead")


def test_an_imported_model_is_trained_on(ray_cluster, raygpt, jax_run, tmp_path):
    raygpt("export", jax_run, tmp_path / "folder")
    raygpt("import", tmp_path / "folder", tmp_path / "runs" / "theirs")
    source = open_run(str(jax_run)).recipe.data.source
    lengths = ["training.batch_tokens=128", "training.steps=4", "training.eval_every=4", "schedule.warmup_steps=0"]
    names = ["run.name=further", "run.start_from=theirs", f"data.source={source}", "data.tokenizer=bytes"]
    status, _, err = raygpt("train", "runs/theirs/recipe.yaml", *names, *lengths)
    assert status == 0, err
    lines = [json.loads(line) for line in (tmp_path / "runs/further/metrics.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert losses[0] == pytest.approx(open_run(str(jax_run)).val_losses[20], abs=1e-5)  # where the exported one stopped
    assert losses[-1] < losses[0]


def compare_with_transformers(folder, engine, run):
    """transformers opens the folder; its logits are ours, and its tokenizer's ids. The text that it writes greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    assert err.count("the context is 32 tokens; whenever it is full, the last 16 are read again") == 1


def test_prompts_can_be_asked_for_one_after_another(raygpt, run, monkeypatch):
    _, alone, _ = raygpt("generate", run, "--prompt", "the caf", "--tokens", 19, "--temperature", 0)
    lines = iter(["the caf", "the caf", "", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    status, out, _ = raygpt("generate", run, "--interactive", "--tokens", 19, "--temperature", 0)
    assert (status, out) == (0, alone * 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-i --samples 2", "--samples: --interactive writes one text after each prompt; leave --samples out"),
        ("-i --json", "--json: --interactive prints no JSON; leave it out, and write --prompt TEXT"),
        ("--stop=", "--stop: an empty text is before every token; write some text, or leave --stop out"),
        ("--top-p 0", "--top-p: 0 leaves no token; write a number above 0, or --temperature 0 for the likeliest"),
    ],
)
def test_options_that_would_do_nothing_are_refused(raygpt, words, message):
    assert fails(raygpt("generate", "nowhere", *words.split())) == message


@pytest.mark.parametrize("verb", [("generate",), ("eval",), ("export", "out")])
def test_one_checkpoint_is_named_once(raygpt, verb):
    name, *more = verb
    message = "--latest: --step 0 names a checkpoint already; leave one of the two out"
    assert fails(raygpt(name, "nowhere", *more, "--step", 0, "--latest")) == message


@pytest.mark.parametrize("verb", [("generate",), ("eval",), ("export", "out")])
def test_what_is_no_run_is_refused_by_every_verb(raygpt, jax_run, tmp_path, verb):
    name, *more = verb
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        message = f"{folder} is no run, it has no recipe.yaml; "
        message += "name a folder that raygpt train made; `raygpt runs` lists those in runs/"
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
    assert "has no complete checkpoint (unfinished or damaged: 10, 20)" in fails(raygpt("generate", "broken"))
    (broken / "recipe.yaml").write_text("model: {layers: many}")
    assert "model.layers" in fails(raygpt("export", "broken", "out"))


def test_export_overwrites_nothing(raygpt, jax_run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    message = f"{tmp_path}/full is not empty; name a new folder, or delete it"
    assert fails(raygpt("export", jax_run, "full")) == message


def test_a_missing_extra_is_named(raygpt, trained_run, tmp_path, monkeypatch):
    run = trained_run("torch")  # before anything is missing
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = "engine: torch needs torch, which is not installed: pip install 'raygpt[torch]'"
    assert fails(raygpt("generate", run)) == message


def test_a_run_of_transformers_gpt2_is_read_without_transformers(trained_run, tmp_path, monkeypatch):
    shutil.copytree(trained_run("torch"), tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    ours, theirs = "implementation: raygpt", "implementation: huggingface"
    recipe.write_text(recipe.read_text().replace(ours, theirs))
    assert theirs in recipe.read_text()
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(RaygptError, match=r"pip install 'raygpt\[transformers\]'"):
        require("torch", "huggingface")  # as training it does
    assert load(open_run(str(tmp_path / "run"))).checkpoint.step == 20


def test_tasks_are_known_by_name(raygpt, jax_run):
    message = "--task arc: write validation, hellaswag, lambada, or e.g. lambada=FILE.jsonl"
    assert fails(raygpt("eval", jax_run, "--task", "arc")) == message
    twice = raygpt("eval", jax_run, "--task", "lambada", "--task", "lambada=mine.jsonl")
    assert fails(twice) == "--task lambada: is given twice; leave one out"
    assert "cannot be read (No such file" in fails(raygpt("eval", jax_run, "--task", "lambada=nowhere.jsonl"))


def test_a_run_is_listed_shown_and_reported(raygpt, run, tmp_path, engine):
    known = open_run(str(run))
    listed = json.loads(raygpt("runs", run.parent, "--json")[1])
    (found,) = [facts for facts in listed if facts["name"] == "small"]
    assert (found["engine"], found["state"], found["step"], found["steps"]) == (engine, "finished", 20, 20)
    assert found["val_loss"] == known.val_losses[20]
    shown = json.loads(raygpt("show", run, "--json")[1])
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [10, 20]
    status, _, _ = raygpt("report", run, "--out", "page.html")
    assert status == 0
    page = (tmp_path / "page.html").read_text()
    path = re.search('data-name="training"[^>]* d="M([^"]*)"', page)[1]
    wide, tall = map(float, re.search('class="curves" [^>]*data-units="([^"]*)"', page)[1].split())
    steps, losses = (np.array(axis, float) for axis in zip(*(p.split(",") for p in path.split("L")), strict=True))
    assert [*steps * wide] == [5, 10, 15, 20]
    assert losses * tall == pytest.approx([line["loss"] for line in known.metrics if "loss" in line], rel=1e-4)
    for prompt in ("the caf", "on "):
        assert f'<q class="prompt">{prompt}</q>' in page
    plan, compared = plan_and_run(run)
    assert f"<h2>Plan and run</h2>\n<p>{compared}" in page
    pictures = dict(re.findall(r'<div class="plan card"><h3>([^<]*)</h3>(<svg.*?</svg>)</div>', page))
    kinds = {kind.replace("_", "-"): seconds for kind, seconds in plan["step_s"].items()}
    assert bars_of(pictures["time of a step"]) == shares_of(kinds)
    assert bars_of(pictures["memory of each device"]) == shares_of(plan["memory"])


def bars_of(svg):
    """Name -> length of a bar, as a share of the longest."""
    found = re.findall(r'<text x="0" [^>]*>([^<]*)</text><rect [^>]*width="([0-9.]+)%"', svg)
    return {name: float(width) / 60 for name, width in found}


def shares_of(kinds):
    """Kind -> share of the largest, of those that a plan has; a picture has two digits after the point."""
    own = {kind: value for kind, value in kinds.items() if value and kind not in ("total", "limit")}
    return pytest.approx({kind: value / max(own.values()) for kind, value in own.items()}, abs=1e-3)


# Tasks


ITEMS = ["the café sat on the mat;", "café sat on the", "the dog sat down"]


def by_hand(loaded, text, word):
    """Log-probability of the last word, a token at a time, and whether each was the likeliest."""
    ids, total, greedy = np.array([list(text.encode())], dtype=np.int32), 0.0, True
    for place in range(ids.size - len(word.encode()), ids.size):
        logits = loaded.reader.prefill(loaded.state, ids[:, :place])[0][0].astype(np.float64)
        total += logits[ids[0, place]] - np.log(np.exp(logits).sum())
        greedy = greedy and logits.argmax() == ids[0, place]
    return total, greedy


def test_tasks_are_scored_by_the_command(raygpt, run, tmp_path):
    ask = {
        "activity_label": "Cats",
        "ctx": "the café sat on",
        "endings": ["the mat;", "a qqq", "xx", "zz zz"],
        "label": 0,
    }
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ITEMS))
    (tmp_path / "endings.jsonl").write_text(json.dumps(ask) + "\n")
    words = ("eval", run, "--task", "lambada=words.jsonl", "--task", "hellaswag=endings.jsonl", "--limit", 2)
    status, out, _ = raygpt(*words, "--json")
    assert status == 0
    found = json.loads(out)["tasks"]
    loaded = load(open_run(str(run)))
    right = [by_hand(loaded, text, f" {text.rpartition(' ')[2]}") for text in ITEMS[:2]]
    assert found["lambada"]["items"] == 2
    assert found["lambada"]["acc"] == np.mean([greedy for _, greedy in right])
    assert found["lambada"]["perplexity"] == pytest.approx(np.exp(-np.mean([log for log, _ in right])), rel=1e-3)
    query = f"Cats: {ask['ctx']}"
    logs = [by_hand(loaded, f"{query} {ending}", f" {ending}")[0] for ending in ask["endings"]]
    assert found["hellaswag"]["acc"] == float(np.argmax(logs) == 0)
    by_character = [log / len(ending) for log, ending in zip(logs, ask["endings"], strict=True)]
    assert found["hellaswag"]["acc_norm"] == float(np.argmax(by_character) == 0)
    _, shown, _ = raygpt(*words)
    assert "lambada" in shown
    assert f"{found['lambada']['perplexity']:.4f}"[:5] in shown


# Runs in an object store


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])  # which compiles each time
def test_a_run_on_s3_is_asked_shown_and_reported_like_one_on_a_disk(
    raygpt, trained_run, s3, tmp_path, engine, monkeypatch
):
    run = trained_run(engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where its checkpoint is fetched to
    there, tokens = f"{s3}/after-{engine}/small", f"{s3}/after-{engine}/tokens"
    for folder, copy in ((run, there), (run.parent / "tokens", tokens)):
        for name in storage.files(str(folder)):
            storage.write_bytes(f"{copy}/{name}", (folder / name).read_bytes())
    recipe = open_run(there).recipe.to_yaml().replace(str(run.parent / "tokens"), tokens)
    storage.write_bytes(f"{there}/recipe.yaml", recipe.encode())

    greedy = ("--prompt", "the caf", "--tokens", 8, "--temperature", 0)
    status, written, _ = raygpt("generate", run, *greedy)
    assert (status, written.startswith("the caf")) == (0, True)
    assert raygpt("generate", there, *greedy)[:2] == (0, written)
    status, out, _ = raygpt("eval", there, "--json")
    assert status == 0
    assert json.loads(out)["tasks"]["validation"]["loss"] == pytest.approx(open_run(str(run)).val_losses[20], abs=1e-5)
    shown = json.loads(raygpt("show", there, "--json")[1])
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [10, 20]
    assert shown["sample"] == open_run(str(run)).samples[-1]
    assert raygpt("report", there)[0] == 0
    assert b"From <q" in storage.read_bytes(f"{there}/report.html")

    assert raygpt("export", there, "folder")[0] == 0
    status, _, err = raygpt("import", "folder", f"{s3}/after-{engine}/again", "--engine", engine)
    assert status == 0, err
    assert raygpt("generate", f"{s3}/after-{engine}/again", *greedy)[:2] == (0, written)
    assert fails(raygpt("import", "folder", there)) == f"{there} is not empty; name a new folder for the run"
