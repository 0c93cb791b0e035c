"""Whole runs through Ray Train on two CPU workers: what they leave behind, and how they go on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import raygpt
from raygpt import storage
from raygpt.errors import RaygptError
from raygpt.recipes import load_recipe
from raygpt.runs import checkpoints
from raygpt.runs.lock import locked
from raygpt.testing.chaos import losses

SMALL = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
    "data": {"tokenizer": "bytes", "val": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "training": {"batch_tokens": 5 * 16, "log_every": 1, "eval_every": 10, "checkpoint_every": 5},
    "cluster": {"workers": 2},
}


@pytest.fixture(scope="module")
def train(ray_cluster, tmp_path_factory):
    """Run the small recipe under a name: train(name, steps, **overrides)."""
    home = tmp_path_factory.mktemp("train")
    text = home / "text.txt"
    text.write_text("".join(f"the cat sat on mat {n % 7}\n<|endoftext|>\n" for n in range(400)))

    def run(name, steps, **overrides):
        changes = {"data.source": str(text), "run.storage": str(home), "run.name": name, "training.steps": steps}
        return raygpt.train("tiny", **{**SMALL, **changes, **overrides})

    return run


SECRET = "hf_3141592653589793"


@pytest.fixture(scope="module")
def straight(train):
    """20 steps without a stop."""
    return train("straight", 20, **{"cluster.runtime_env": {"env_vars": {"HF_TOKEN": SECRET}}})


@pytest.fixture
def stopped(straight):
    """Make a run under a name: what there would be of the other if it had been killed after 10 steps."""

    def make(name):
        run = shutil.copytree(straight.path, Path(straight.path).with_name(name))
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 10))
        (run / "result.json").unlink()
        for step in (15, 20):
            shutil.rmtree(checkpoints.folder_of(str(run), step))

    return make


def metrics(result):
    return [json.loads(line) for line in Path(result.path, "metrics.jsonl").read_text().splitlines()]


def arrays(result):
    """Parameters and optimizer state of the last checkpoint, restored onto a single device."""
    import jax

    from raygpt.engines.jax.engine import JaxEngine

    engine = JaxEngine(load_recipe(f"{result.path}/recipe.yaml"), vocab=257, devices=jax.devices()[:1])
    return [np.asarray(leaf) for leaf in jax.tree.leaves(engine.restore(result.checkpoint))]


def test_a_run_leaves_recipe_tokenizer_metrics_and_checkpoints(straight):
    assert straight.error is None
    assert {"recipe.yaml", "tokenizer.json", "metrics.jsonl", "checkpoints"} <= {
        path.name for path in Path(straight.path).iterdir()
    }
    lines = metrics(straight)
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == list(range(1, 21))
    assert set(logged[-1]) >= {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "data_wait_s"}
    assert [line["tokens"] for line in logged] == [80 * step for step in range(1, 21)]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10, 20]
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_the_result_has_the_last_metrics_and_the_last_checkpoint(straight):
    assert straight.metrics["step"] == 20
    assert straight.metrics["val_loss"] == metrics(straight)[-1]["val_loss"]
    assert straight.checkpoint == checkpoints.folder_of(straight.path, 20)


def test_the_newest_checkpoints_are_kept(straight):
    kept = sorted(path.name for path in Path(straight.path, "checkpoints").glob("step-*"))
    assert kept == ["step-00000010", "step-00000015", "step-00000020"]


def test_a_stopped_run_goes_on_bit_for_bit_as_if_it_had_not_stopped(train, straight, stopped):
    stopped("stopped")
    longer = train("stopped", 20)
    assert longer.error is None
    losses = {line["step"]: line["loss"] for line in metrics(longer) if "loss" in line}
    assert losses == {line["step"]: line["loss"] for line in metrics(straight) if "loss" in line}
    for ours, theirs in zip(arrays(longer), arrays(straight), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_another_number_of_workers_gives_the_same_losses_and_continues_the_run(train, straight, stopped):
    stopped("resized")
    alone = train("resized", 20, **{"cluster.workers": 1})
    ours = [line["loss"] for line in metrics(alone) if "loss" in line]
    theirs = [line["loss"] for line in metrics(straight) if "loss" in line]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(train, straight, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(straight.path, copy)
    largest = max((copy / "checkpoints" / "step-00000020").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    found, warnings = checkpoints.newest_intact(str(copy))
    assert found.step == 15
    assert len(warnings) == 1
    assert warnings[0].startswith("checkpoint of step 20 is damaged")
    (copy / "checkpoints" / "step-00000015" / "checkpoint.json").unlink()  # never committed
    assert checkpoints.newest_intact(str(copy))[0].step == 10


def test_a_finished_run_has_nothing_left_to_do(train, straight):
    again = train("straight", 20)
    assert again == straight


def test_another_recipe_is_refused_with_the_difference(train, straight):
    with pytest.raises(RaygptError, match=r"another recipe \(training.seed: 1337 → 7\); write run.name=straight-\d "):
        train("straight", 30, **{"training.seed": 7})
    with pytest.raises(RaygptError, match=r"training\.steps: 20 → 10"):
        train("straight", 10)


def test_a_run_that_is_driven_already_is_refused_with_the_drivers_name(train, straight):
    with locked(straight.path), pytest.raises(RaygptError, match=r"is being trained by .* run\.name=straight-\d to"):
        train("straight", 30)
    assert checkpoints.newest_intact(straight.path)[0].step == 20


def test_more_workers_than_the_cluster_holds_are_refused(train, straight):  # Ray would wait for ever
    fits = r"5 × 1 CPU, .* memory do not fit: .* room for 4 \(1 node, 4 CPU, .* memory\); write .*workers: 4"
    with pytest.raises(RaygptError, match=fits):
        train("crowded", 5, **{"cluster.workers": 5})
    with pytest.raises(RaygptError, match=r"2 × 1 CPU, 1 GPU do not fit: .* room for 0"):
        train("crowded", 5, **{"cluster.accelerator": "gpu"})


def test_a_fork_goes_on_from_another_runs_step_with_its_own_recipe(train, straight):
    fork = train("fork", 15, **{"run.start_from": "straight@10", "optimizer.learning_rate": 0.002})
    assert fork.error is None
    lines = metrics(fork)
    before = {line["step"]: line["loss"] for line in metrics(straight) if "loss" in line}
    after = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(after) == [11, 12, 13, 14, 15]
    assert after[11] == before[11]  # the state and the batch of step 11 are the same
    assert after[12] != before[12]  # the rate is not
    with pytest.raises(RaygptError, match=r"run.start_from: straight has another model \(model.width: 16 → 32\)"):
        train("wider", 15, **{"run.start_from": "straight", "model.width": 32})
    with pytest.raises(RaygptError, match="there is no run 'nothing'"):
        train("orphan", 15, **{"run.start_from": "nothing"})


# The other engine


@pytest.mark.extended
def test_pytorchs_runs_go_on_bit_for_bit_too_and_give_the_same_batches(train):
    pytest.importorskip("torch", reason="needs the extra torch")
    whole = train("torch", 20, engine="torch")
    assert whole.error is None
    train("torch-stopped", 10, engine="torch")
    longer = train("torch-stopped", 20, engine="torch")
    losses = {line["step"]: line["loss"] for line in metrics(longer) if "loss" in line}
    assert losses == {line["step"]: line["loss"] for line in metrics(whole) if "loss" in line}
    assert longer.metrics["val_loss"] == whole.metrics["val_loss"]
    assert not [path for path in Path(whole.path).rglob("*") if b"torch._utils" in read(path)]  # nothing is pickled


def read(path):
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.slow
def test_a_run_of_one_engine_goes_on_in_the_other(train, straight):
    pytest.importorskip("torch", reason="needs the extra torch")
    dropout = {"model.dropout": 0.0}  # whose masks the engines draw in their own ways
    whole = train("without-dropout", 20, **dropout)
    fork = train("in-torch", 15, engine="torch", **{"run.start_from": "without-dropout@10", **dropout})
    back = train("in-jax", 20, **{"run.start_from": "in-torch", **dropout})
    assert fork.error is None
    assert back.error is None
    expected = {line["step"]: line["loss"] for line in metrics(whole) if "loss" in line}
    got = {line["step"]: line["loss"] for run in (fork, back) for line in metrics(run) if "loss" in line}
    assert list(got) == list(range(11, 21))
    np.testing.assert_allclose([got[step] for step in got], [expected[step] for step in got], rtol=1e-4)


@pytest.mark.extended
def test_a_run_on_s3_goes_on_and_gives_the_same_numbers(train, straight, s3):
    there = {"run.storage": f"{s3}/runs", "training.checkpoint_every": 10}
    train("there", 10, **there)
    result = train("there", 20, **there)
    assert result.error is None
    assert losses(result.path) == losses(straight.path)
    assert result.checkpoint == f"{s3}/runs/there/checkpoints/step-00000020"
    assert "checkpoint.json" in storage.files(result.checkpoint)


@pytest.mark.slow
def test_epochs_are_steps_once_the_corpus_is_known_and_stay_epochs_in_the_run(train):
    length = {"training.epochs": 0.1, "training.eval_every": "epoch"}
    result = train("epochs", None, **length)
    written = load_recipe(f"{result.path}/recipe.yaml").training
    assert (written.steps, written.epochs, written.eval_every) == (None, 0.1, "epoch")
    windows = json.loads(next(Path(result.path).parent.glob("stores/*/index.json")).read_text())["train"]
    epoch = -(-((sum(extent["tokens"] for extent in windows) - 1) // 16) // 5)
    steps = -(-epoch // 10)
    assert result.metrics["step"] == steps
    assert [line["step"] for line in metrics(result) if "val_loss" in line] == [0, steps]
    assert train("epochs", None, **length) == result  # finished
    with pytest.raises(RaygptError, match=r"training\.epochs: 0\.1 → 0\.05"):
        train("epochs", None, **{**length, "training.epochs": 0.05})
    with pytest.raises(RaygptError, match=r"training\.steps: None → 90, training\.epochs: 0\.1 → None"):
        train("epochs", 90)


def test_what_libraries_say_is_in_the_runs_logs(straight):
    logs = Path(straight.path, "logs")
    assert {path.name for path in logs.iterdir()} >= {"worker-0.log", "worker-1.log"}
    assert "orbax" in (logs / "worker-0.log").read_text().lower()


def test_secrets_are_not_written_into_a_run(straight):
    assert straight.error is None
    for path in Path(straight.path).rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_an_error_in_a_worker_is_in_the_result(train):
    # GPT-2's: norms everywhere, as tiny has them, bear such weights
    gpt2 = {"model.preset": None, "optimizer.kind": "adamw", "optimizer.learning_rate": 1e30}
    result = train("broken", 5, **{"cluster.workers": 1, **gpt2})
    assert isinstance(result.error, RaygptError)
    assert "is not a number" in str(result.error)


def test_a_mesh_that_this_machine_has_no_devices_for_is_refused_before_workers_start(train):
    with pytest.raises(RaygptError, match=r"cluster\.mesh: data=3 × fsdp=5 does not multiply to the"):
        train("meshed", 5, **{"cluster.workers": 1, "cluster.mesh": {"data": 3, "fsdp": 5}})
