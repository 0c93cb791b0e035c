"""`raygpt sweep` and `raygpt scaling` as commands: what they refuse, and a whole sweep through Ray."""

import json

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "sweep tiny training.steps=20",
            "sweep: there is nothing to try; write e.g. optimizer.learning_rate=1e-3,2e-3",
        ),
        (
            "sweep tiny training.on_spike=skip,stop",
            "training.on_spike: is not swept, as it says where or how a run works",
        ),
        ("sweep tiny optimizer.betas=[0.9,0.95]", "sweep: there is nothing to try"),  # a comma, but one value
        ("sweep tiny optimizer.rate=1,2", "unknown key 'optimizer.rate'; did you mean"),
        ("sweep tiny optimizer.learning_rate=0.01,-1", "optimizer.learning_rate: '-1' should be greater than 0"),
        ("sweep tiny optimizer.learning_rate=log:0..1", "log: needs two numbers above 0, the lower first"),
        ("sweep nowhere.yaml model.dropout=0,0.1", "there is no such file"),
        (
            "sweep tiny optimizer.learning_rate=0.01,0.02 run.start_from=before",
            "run.start_from: the rounds of a sweep begin at step 0; add --whole to train every trial to its end",
        ),
        ("scaling tiny training.steps=2000 run.start_from=before", "run.start_from: the models of a ladder have other"),
        ("scaling tiny", "training.steps: 180 are too few for a ladder"),
        ("scaling tiny training.steps=2000 optimizer.rate=1", "unknown key 'optimizer.rate'"),
        *(
            (
                f"scaling tiny --share={share}",
                f"--share {share}: is no share of the run's compute; write more than 0 and at most 1",
            )
            for share in ("nan", "inf", "-1", "0", "1.5")
        ),
    ],
)
def test_bad_input_is_one_line(raygpt, words, line):
    status, out, err = raygpt(*words.split())
    assert (status, out) == (1, "")
    assert line in " ".join(err.split())
    assert err.startswith("error: ")


def test_a_sweep_through_ray_answers_and_leaves_ordinary_runs(ray_cluster, raygpt, trained_run, tmp_path):
    tokens = trained_run("jax").parent / "tokens"
    small = "model.layers=1 model.heads=2 model.width=16 model.context=32 training.batch_tokens=128 training.steps=100"
    words = f"sweep gpt2-tiny optimizer.learning_rate=1e30,0.02,0.04 {small} data.tokenizer=bytes data.source={tokens}"
    status, out, err = raygpt(*words.split(), "schedule.warmup_steps=0", "run.name=tiny-sweep", "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["best"]["optimizer.learning_rate"] in (0.02, 0.04)
    assert answer["diverged"] == ["learning_rate-1e30"]
    assert answer["tokens"] / answer["grid_tokens"] == pytest.approx(0.45)
    assert (tmp_path / "runs/tiny-sweep/sweep.html").exists()
    status, out, _ = raygpt(
        "show", f"runs/tiny-sweep/learning_rate-{answer['best']['optimizer.learning_rate']}", "--json"
    )
    facts = json.loads(out)
    assert (facts["state"], facts["step"], facts["val_loss"]) == ("finished", 100, answer["loss"])
    assert raygpt("train", "runs/tiny-sweep/best.yaml", "training.steps=1")[0] == 0
