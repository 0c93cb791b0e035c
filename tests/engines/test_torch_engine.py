"""The PyTorch engine in one process: accumulation, weights, sampling, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import raygpt  # noqa: E402
from raygpt.engines.base import PlainState  # noqa: E402
from raygpt.engines.torch import engine as engine_module  # noqa: E402
from raygpt.engines.torch import processes, require_torch  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.engines.torch.reader import TorchReader  # noqa: E402
from raygpt.errors import RaygptError  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ROWS, CONTEXT, VOCAB = 20, 12, 16, 100
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, CONTEXT + 1)).astype(np.int32)


def recipe(rows=ROWS, steps=STEPS, engine="torch", optimizer=None, mesh=None, **settings):
    training = {key: settings.pop(key) for key in ("compile", "remat", "on_nan") if key in settings}
    sizes = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, "dropout": 0.1, **settings}
    return load_recipe(
        "gpt2-tiny",
        {
            "engine": engine,
            "model": sizes,
            "training": {"steps": steps, "batch_tokens": rows * CONTEXT, **training},
            "optimizer": optimizer or {},
            "schedule.warmup_steps": 5,
            "cluster.mesh": mesh or {},
        },
    )


MODERN = {  # everything at once
    "preset": "qwen3",
    "kv_heads": 2,
    "head_size": 16,
    "embedding_norm": True,
    "value_embeddings": 1,
    "x0_mixing": True,
    "head_gates": True,
    "softcap": 5.0,
    "init": "xavier",
}


def make_engine(accumulation=1, precision="fp32", **settings):
    return TorchEngine(recipe(**settings), VOCAB, accumulation=accumulation, precision=precision, device="cpu")


def train(engine, state, windows=WINDOWS):
    """Loss and gradient norm of each step, and the last state."""
    numbers = []
    for batch in windows:
        state, metrics = engine.step(state, engine.put(batch[engine.rows]))
        numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm")])
    return np.array(numbers), state


def gradients(engine, weights, windows):
    """Loss of a batch and its gradient, by what AdamW's first step from zero puts into its average."""
    state, metrics = engine.step(engine.load(PlainState(weights)), engine.put(windows[engine.rows]))
    (beta, _), means = engine.recipe.optimizer.betas, engine.gather(state).slots["means"]
    return engine.read(metrics), {name: mean / (1 - beta) for name, mean in means.items()}


def relative(ours, right):
    """The distance of two arrays, relative to the second's norm."""
    return np.linalg.norm(np.asarray(ours, np.float64) - right) / np.linalg.norm(right)


@pytest.fixture(scope="module")
def alone():
    """The run that others are compared with, in fp64: numbers, and everything after."""
    engine = make_engine(precision="fp64")
    numbers, state = train(engine, engine.start())
    return numbers, engine.gather(state), engine.window_losses(state, WINDOWS[0])


# Batches


@pytest.mark.parametrize("accumulation", [2, 3, 5])  # 5: a batch of 12 rows in 15 places
def test_accumulated_steps_are_those_of_one_large_batch(accumulation, alone):
    engine = make_engine(accumulation, precision="fp64")
    assert engine.rows == list(range(ROWS))
    numbers, state = train(engine, engine.start())
    np.testing.assert_allclose(numbers, alone[0], rtol=1e-9)
    np.testing.assert_allclose(engine.window_losses(state, WINDOWS[0]), alone[2], rtol=1e-9)


def test_the_run_that_others_are_compared_with_begins_at_chance_and_moves(alone):
    losses, norms = alone[0].T
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert len(set(losses)) == len(set(norms)) == STEPS


def test_in_fp32_they_agree_to_a_ten_thousandth(alone):
    engine = make_engine(3)
    np.testing.assert_allclose(train(engine, engine.start())[0], alone[0], rtol=1e-4)


def test_transformers_model_trains_to_the_same_numbers(alone):
    pytest.importorskip("transformers")
    engine = make_engine(2, precision="fp64", implementation="huggingface")
    numbers, state = train(engine, engine.start())
    np.testing.assert_allclose(numbers, alone[0], rtol=1e-9)
    gathered = engine.gather(state)
    for name, value in alone[1].parameters.items():
        np.testing.assert_allclose(gathered.parameters[name], value, atol=1e-9, err_msg=name)
    assert "without dropout inside attention" in engine.describe()["model"]


@pytest.mark.parametrize(("wrote", "reads"), [("raygpt", "huggingface"), ("huggingface", "raygpt")])
def test_a_fork_may_have_the_other_implementation(wrote, reads, tmp_path):
    pytest.importorskip("transformers")
    engine = make_engine(precision="fp64", implementation=wrote)
    state = train(engine, engine.start(), WINDOWS[:3])[1]
    engine.save(state, str(tmp_path))
    engine.wait_for_save()
    other = make_engine(precision="fp64", implementation=reads)
    expected = train(engine, state, WINDOWS[3:6])[0]
    np.testing.assert_allclose(train(other, other.restore(str(tmp_path)), WINDOWS[3:6])[0], expected, rtol=1e-9)


def test_a_batch_of_five_rows_in_eight_places_is_the_plain_mean_of_five():
    engine = make_engine(4, precision="fp64", rows=5, dropout=0.0, optimizer={"clip": None})
    batch = engine.put(WINDOWS[0, :5])
    assert batch.inputs.shape == (4, 2, CONTEXT)
    assert batch.weights.shape == (4, 2, CONTEXT)
    assert batch.weights.sum(-1).flatten().tolist() == [CONTEXT] * 5 + [0] * 3
    start = engine.start()
    plain = engine.start().objective
    loss, _ = plain(
        *(torch.from_numpy(part) for part in (WINDOWS[0, :5, :-1], WINDOWS[0, :5, 1:])), torch.ones(5, CONTEXT), None
    )
    (loss / (5 * CONTEXT)).backward()
    metrics, ours = gradients(engine, engine.gather(start).parameters, WINDOWS[0, :5])
    assert metrics["loss"] == pytest.approx(loss.item() / (5 * CONTEXT), rel=1e-12)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
    tokens = plain.gpt.tokens.weight.grad[:VOCAB].numpy()
    np.testing.assert_allclose(ours["tokens"], tokens, atol=1e-12)


@pytest.mark.parametrize("accumulation", [1, 5])
def test_with_weights_the_loss_is_that_of_the_tokens_that_count(accumulation):
    """A mask, against the plain mean over the tokens that it leaves; and weights beside their multiples."""
    settings = {"precision": "fp64", "dropout": 0.0, "optimizer": {"clip": None}}
    engine = make_engine(accumulation, **settings)
    mask = np.random.default_rng(2).integers(0, 2, (ROWS, CONTEXT)).astype(np.float32)
    mask[4] = 0
    start = engine.start()
    hidden = start.objective.gpt(torch.from_numpy(WINDOWS[0][:, :-1]))
    logits = (hidden @ start.objective.gpt.table[:VOCAB].T)[torch.from_numpy(mask) > 0]
    counted = torch.from_numpy(WINDOWS[0][:, 1:])[torch.from_numpy(mask) > 0].long()
    expected = torch.nn.functional.cross_entropy(logits, counted)
    gradient = torch.autograd.grad(expected, start.objective.gpt.tokens.weight)[0][:VOCAB].numpy()
    for factor in (1, 3):
        begun = engine.load(engine.gather(start))
        state, metrics = engine.step(begun, engine.put(WINDOWS[0], factor * mask))
        assert engine.read(metrics)["loss"] == pytest.approx(expected.item(), rel=1e-12)
        means = engine.gather(state).slots["means"]["tokens"]
        np.testing.assert_allclose(means / (1 - engine.recipe.optimizer.betas[0]), gradient, atol=1e-12)


def test_weights_of_one_are_no_weights_and_weights_of_zero_no_loss():
    engine = make_engine(5, precision="fp64")
    start = engine.gather(engine.start())
    plain, ones, none = (
        engine.read(engine.step(engine.load(start), engine.put(WINDOWS[0], weights))[1])
        for weights in (None, np.ones((ROWS, CONTEXT)), np.zeros((ROWS, CONTEXT)))
    )
    assert (ones["loss"], ones["grad_norm"]) == pytest.approx((plain["loss"], plain["grad_norm"]), rel=1e-12)
    assert (none["loss"], none["grad_norm"], none["skipped"]) == (0, 0, 0)


def test_masks_change_with_step_and_row():
    engine = make_engine(dropout=0.3)

    def loss(windows, step=0):
        begun = engine.start()
        begun.step = step
        return engine.read(engine.step(begun, engine.put(windows))[1])["loss"]

    first = loss(WINDOWS[0])
    assert loss(WINDOWS[0]) == first
    assert loss(WINDOWS[0], step=1) != pytest.approx(first, rel=1e-5)
    assert loss(WINDOWS[0][::-1].copy()) != pytest.approx(first, rel=1e-5), "a row's mask goes by its number"


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: numbers that Python asks for, and shapes that depend on them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += function in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_never_waits_for_its_own_numbers(precision):
    engine = make_engine(2, precision=precision, on_nan="skip")
    state = engine.start()
    with Waits() as waits:
        state, _ = engine.step(state, engine.put(WINDOWS[0]))
        assert waits.count == 0
        float(state.scale.factor)
        assert waits.count == 1, "this is how one would show"


# Sampling


@pytest.mark.parametrize("implementation", ["raygpt", "huggingface"])
def test_with_a_cache_the_logits_are_those_without(implementation):
    if implementation == "huggingface":
        pytest.importorskip("transformers")
    engine = make_engine(precision="fp64", implementation=implementation)
    state = train(engine, engine.start(), WINDOWS[:5])[1]
    ids = WINDOWS[0, :3, :CONTEXT]
    gpt = state.objective.gpt
    with torch.no_grad():
        expected = (gpt(torch.from_numpy(ids)) @ gpt.table[:VOCAB].T).numpy()  # [rows, time, vocabulary]
    logits, cache = engine.prefill(state, ids[:, :4])
    assert logits.shape == (3, VOCAB)
    np.testing.assert_allclose(logits, expected[:, 3], rtol=1e-9)
    for start, end in [(4, 5), (5, 6), (6, 9), (9, 16)]:  # one token at a time, or several
        logits, cache = engine.decode(state, ids[:, start:end], start, cache)
        np.testing.assert_allclose(logits, expected[:, end - 1], rtol=1e-9)


@pytest.mark.parametrize("time", [1, 3])
def test_rows_that_stand_at_positions_of_their_own_are_decoded_as_each_alone(time):
    engine = make_engine(precision="fp64")
    state = train(engine, engine.start(), WINDOWS[:5])[1]
    ids, starts = WINDOWS[0, :4, :CONTEXT], np.array([5, 1, 13, 8], dtype=np.int32)
    more = np.stack([row[start : start + time] for row, start in zip(ids, starts, strict=True)])
    _, cache = engine.prefill(state, ids[:, :13])  # what lies beyond a row's own position is never looked at
    logits, cache = engine.decode(state, more, starts, cache)
    after, _ = engine.decode(state, ids[:, :1], np.minimum(starts + time, CONTEXT - 1), cache)
    for row, start in enumerate(starts.tolist()):
        _, alone = engine.prefill(state, ids[row : row + 1, :start])
        expected, alone = engine.decode(state, more[row : row + 1], start, alone)
        np.testing.assert_allclose(logits[row], expected[0], rtol=1e-9)
        expected, _ = engine.decode(state, ids[row : row + 1, :1], min(start + time, CONTEXT - 1), alone)
        np.testing.assert_allclose(after[row], expected[0], rtol=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reader_has_the_engines_logits_in_every_precision(precision):
    engine = make_engine(precision=precision)
    state = train(engine, engine.start(), WINDOWS[:5])[1]
    reader = TorchReader(recipe(precision=precision).model, VOCAB, device="cpu")
    opened = reader.load(engine.gather(state).parameters)
    ids, near = WINDOWS[0, :3, :CONTEXT], {"fp32": 1e-5, "bf16": 2e-2}[precision]
    expected, cache = engine.prefill(state, ids[:, :5])
    found, read = reader.prefill(opened, ids[:, :5])
    np.testing.assert_allclose(found, expected, atol=near)
    expected, _ = engine.decode(state, ids[:, 5:6], 5, cache)
    found, _ = reader.decode(opened, ids[:, 5:6], 5, read)
    np.testing.assert_allclose(found, expected, atol=near)
    assert found.dtype == np.float32


def test_transformers_cache_has_no_positions_of_rows():
    pytest.importorskip("transformers")
    engine = make_engine(implementation="huggingface")
    state = engine.start()
    _, cache = engine.prefill(state, WINDOWS[0, :2, :4])
    assert refusal(lambda: engine.decode(state, WINDOWS[0, :2, :1], np.array([4, 2], dtype=np.int32), cache)) == (
        "model.implementation: transformers' cache has one position for all rows; write raygpt"
    )


# Weights, which cross to the other engine


def test_what_is_gathered_and_loaded_goes_on_bit_for_bit():
    engine = make_engine(2)
    state = train(engine, engine.start(), WINDOWS[:5])[1]
    weights = engine.gather(state)
    assert weights.parameters["tokens"].shape == (VOCAB, 32)
    assert weights.parameters["blocks.up.kernel"].shape == (2, 32, 128)
    assert weights.parameters["blocks.query.kernel"].shape == (2, 32, 4, 8)
    assert weights.slots.keys() == {"means", "squares"}
    assert all(arrays.keys() == weights.parameters.keys() for arrays in weights.slots.values())
    assert weights.step == 5
    went_on = train(engine, state, WINDOWS[5:10])[0]
    np.testing.assert_array_equal(train(engine, engine.load(weights), WINDOWS[5:10])[0], went_on)


def test_memory_that_was_reserved_before_takes_what_is_saved(tmp_path):
    engine = make_engine()
    state = engine.start()
    engine._saver.reserve(engine._shards(state))
    _, state = train(engine, state, WINDOWS[:1])
    engine.save(state, str(tmp_path))
    assert not engine._saver._making.is_alive()  # a save waits for its memory
    made = {name: tensor.data_ptr() for name, tensor in engine._saver._host.items()}
    engine.wait_for_save()
    engine.save(state, str(tmp_path))
    engine.wait_for_save()
    assert {name: tensor.data_ptr() for name, tensor in engine._saver._host.items()} == made
    saved, right = engine.gather(engine.restore(str(tmp_path))), engine.gather(state)
    for name, value in right.parameters.items():
        np.testing.assert_array_equal(saved.parameters[name], value, err_msg=name)
        np.testing.assert_array_equal(saved.slots["squares"][name], right.slots["squares"][name], err_msg=name)


def test_parameters_alone_begin_with_averages_of_zero():
    engine = make_engine()
    weights = engine.gather(engine.start())
    loaded = engine.load(PlainState(weights.parameters))
    np.testing.assert_array_equal(train(engine, loaded)[0], train(engine, engine.start())[0])


# What it says


def test_it_describes_engine_device_mesh_and_precision():
    about = make_engine().describe()
    assert about["engine"] == f"torch {torch.__version__}"
    assert (about["device"], about["devices"], about["mesh"]) == ("cpu", "1", "one device")
    assert (about["precision"], about["compiled"], about["model"]) == ("fp32", "no", "raygpt GPT")


def refusal(make):
    with pytest.raises(RaygptError) as caught:
        make()
    return str(caught.value).removeprefix("recipe 'gpt2-tiny': ")


def test_what_cannot_be_is_refused_in_one_line(monkeypatch):
    assert refusal(lambda: make_engine(mesh={"data": 2})) == (
        "cluster.mesh: data=2 does not multiply to the 1 devices there are; "
        "write -1 for the axis that takes what is left, or change cluster.workers"
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert refusal(lambda: make_engine(mesh={"tensor": -1}, heads=4, width=16)) == (
        "cluster.mesh.tensor: 6 devices are left for it, which do not divide model.heads 4; write 2"
    )
    assert refusal(lambda: recipe(engine="jax", implementation="huggingface")) == (
        "model.implementation: huggingface is not for engine jax; write engine: torch"
    )
    assert refusal(lambda: recipe(bias=False, implementation="huggingface")) == (
        "model.bias: transformers' GPT-2 always has biases; write model.implementation: raygpt"
    )


def test_without_pytorch_all_can_be_imported_but_the_engine():
    program = "import sys; sys.modules['torch'] = None; import raygpt.engines.torch, raygpt.recipes, raygpt.cli"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_nothing_outside_the_engines_imports_pytorchs():
    package = Path(raygpt.__file__).parent
    others = [path for path in package.rglob("*.py") if package / "engines" not in path.parents]
    assert [path for path in others if "raygpt.engines.torch" in path.read_text()] == []


def test_without_pytorch_the_extra_is_named(monkeypatch):
    require_torch()
    for missing in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, missing=missing: None if name == missing else 1)
        assert refusal(lambda: require_torch("huggingface")) == (
            f"engine: torch needs {missing}, which is not installed: pip install 'raygpt[{missing}]'"
        )


@pytest.mark.parametrize(("threads", "memory"), [(16, 64), (4, 16)])
def test_a_worker_on_a_cpu_has_the_share_of_memory_that_it_has_of_cores(threads, memory, monkeypatch):
    monkeypatch.setattr(engine_module, "cores", lambda: 16)
    monkeypatch.setattr(engine_module, "memory_for_work", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert engine_module.find_devices(load_recipe("gpt2-tiny", {"engine": "torch"})).memory_bytes == memory


@pytest.mark.parametrize(("resources", "memory"), [({}, 80), ({"GPU": 1}, 80), ({"GPU": 0.25}, 20)])
def test_a_worker_on_a_gpu_has_the_share_of_its_memory_that_it_asked_for(resources, memory, monkeypatch):
    monkeypatch.setattr(engine_module, "choose_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(engine_module, "choose_precision", lambda wanted, device: "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    recipe = load_recipe("gpt2-tiny", {"engine": "torch", "cluster.resources_per_worker": resources})
    assert engine_module.find_devices(recipe).memory_bytes == memory


def test_a_process_with_a_share_of_a_gpu_allocates_no_more_than_that(monkeypatch):
    shares = []
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    for share in (0.25, 1.0):
        processes.join("", 1, 0, gpus=["0"], threads=1, gpu_share=share)
    assert shares == [0.25]  # of a whole GPU the default is all
