"""The JAX engine: on every mesh and with any accumulation, the numbers of one device that computes a batch at once."""

import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from raygpt.config import Training  # noqa: E402
from raygpt.engines import choices, chunks  # noqa: E402
from raygpt.engines.jax.attention import xla  # noqa: E402
from raygpt.engines.jax.devices import precision_on  # noqa: E402
from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.engines.jax.model import GPT  # noqa: E402
from raygpt.engines.jax.optimizer import Optimizer  # noqa: E402
from raygpt.engines.jax.step import State, make_step  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 20, 12, 16, 100  # 12 rows in 8 or 24 places: some are padding
MESHES = {
    "data=8": {"data": 8},
    "fsdp=8": {"data": 1, "fsdp": 8},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data=2,tensor=4": {"data": 2, "tensor": 4},
    "data=4,context=2": {"data": 4, "context": 2},
    "fsdp=2,tensor=2,context=2": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2},
    "data=2,fsdp=4": {"data": 2, "fsdp": 4},
}
ACCUMULATIONS = [(1, 2), (3,), (2, 3), (1,), (3,), (2,), (1,)]  # of each; all three on every mesh take a minute more
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, CONTEXT + 1)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def recipe(mesh=None, rows=ROWS, **model):
    sizes = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, "dropout": 0.1, **model}
    return load_recipe(
        "gpt2-tiny",
        {
            "model": sizes,
            "training": {"steps": STEPS, "batch_tokens": rows * CONTEXT},
            "schedule.warmup_steps": 5,
            "cluster.mesh": mesh or {},
        },
    )


def make_engine(mesh=None, accumulation=1, precision="fp32", **changes):
    """On a mesh of all devices, or without one on a single device."""
    devices = None if mesh else jax.devices()[:1]
    return JaxEngine(recipe(mesh, **changes), VOCAB, accumulation=accumulation, precision=precision, devices=devices)


def train(engine, state, steps=STEPS, windows=WINDOWS):
    """Loss and gradient norm of each step, and the last state."""
    numbers = []
    for step in range(steps):
        state, metrics = engine.step(state, engine.put(windows[step][engine.rows]))
        numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm")])
    return np.array(numbers), state


def assert_same(tree, expected, **tolerance):
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, right), leaf in zip(paths, jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(leaf, right, **tolerance, err_msg=str(path))


# Meshes and accumulation


@pytest.fixture(scope="module")
def one_device():
    """Parameters before, numbers of each step, and parameters, scores of rows and of tokens after."""
    with jax.enable_x64(True):
        engine = make_engine(precision="fp64")
        state = engine.start()
        initial = jax.device_get(state.parameters)
        numbers, state = train(engine, state)
        scores = engine.window_losses(state, WINDOWS[0]), engine.token_logprobs(state, WINDOWS[0, :5, :9])
        return initial, numbers, jax.device_get(state.parameters), *scores


ALWAYS = ("data=2,fsdp=2,tensor=2", "data=4,context=2")  # the other meshes are `make test-all`'s


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=case[0], marks=[] if case[0] in ALWAYS else pytest.mark.extended)
        for case in zip(MESHES, ACCUMULATIONS, strict=True)
    ],
)
def on_mesh(request):
    """The same run on a mesh: parameters before, {accumulation: numbers and parameters}, and scores after."""
    name, accumulations = request.param
    with jax.enable_x64(True):
        state = make_engine(MESHES[name], precision="fp64").start()
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        initial = jax.device_get(state)  # a step uses its state up
        trained = {}
        for accumulation in accumulations:
            engine = make_engine(MESHES[name], accumulation, precision="fp64")
            numbers, state = train(engine, jax.device_put(initial, places))
            trained[accumulation] = numbers, jax.device_get(state.parameters)
            assert jax.tree.map(lambda leaf: leaf.sharding, state) == places, "what is in shares stays in shares"
        return (
            initial.parameters,
            trained,
            engine.window_losses(state, WINDOWS[0]),
            engine.token_logprobs(state, WINDOWS[0, :5, :9]),
        )


def test_parameters_begin_the_same_on_every_mesh_bit_for_bit(on_mesh, one_device):
    assert_same(on_mesh[0], one_device[0], rtol=0, atol=0)


def test_losses_and_gradient_norms_of_20_steps_are_those_of_one_device(on_mesh, one_device):
    for accumulation, (numbers, parameters) in on_mesh[1].items():
        assert numbers.shape == (STEPS, 2)
        np.testing.assert_allclose(numbers, one_device[1], rtol=1e-9, err_msg=f"accumulation {accumulation}")
        assert_same(parameters, one_device[2], rtol=1e-6, atol=1e-9)


def test_scores_are_those_of_one_device(on_mesh, one_device):
    assert on_mesh[2].shape == (ROWS,)
    np.testing.assert_allclose(on_mesh[2], one_device[3], rtol=1e-9)


def test_single_tokens_are_graded_as_on_one_device(on_mesh, one_device):
    logs, hits = on_mesh[3]
    assert logs.shape == hits.shape == (5, 8)
    np.testing.assert_allclose(logs, one_device[4][0], rtol=1e-9)
    np.testing.assert_array_equal(hits, one_device[4][1])


def test_the_run_that_others_are_compared_with_begins_at_chance_and_moves(one_device):
    losses, norms = one_device[1].T
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert len(set(losses)) == len(set(norms)) == STEPS


@pytest.mark.extended
def test_in_fp32_they_agree_to_a_ten_thousandth():
    alone, meshed = make_engine(), make_engine(MESHES["data=2,fsdp=2,tensor=2"], accumulation=3)
    state, other = alone.start(), meshed.start()
    assert_same(jax.device_get(other.parameters), jax.device_get(state.parameters), rtol=0, atol=0)
    np.testing.assert_allclose(train(meshed, other)[0], train(alone, state)[0], rtol=1e-4)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_process_with_all_devices_needs_every_row_once(mesh, accumulation):
    assert make_engine(MESHES[mesh], accumulation).rows == list(range(ROWS))


TWO_PROCESSES = """
import json, sys
import jax
import numpy as np
rank, port, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from raygpt.config import Recipe
from raygpt.engines.jax.engine import JaxEngine
from raygpt.inference.sampling import sample
engine = JaxEngine(Recipe.model_validate(settings["recipe"]), settings["vocab"], accumulation=2, precision="fp64")
windows = np.array(settings["windows"], dtype=np.int32)
state = engine.start()
numbers = []
for step in range(len(windows)):
    state, metrics = engine.step(state, engine.put(windows[step][engine.rows]))
    numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm")])
text = sample(engine, state, windows[0, :2, :3], 4, temperature=0.0).tolist()
scores = engine.window_losses(state, windows[0]).tolist()
weights = engine.gather(state)
loaded = engine.gather(engine.load(weights))
table, again = (w.parameters["tokens"][:4].tolist() for w in (weights, loaded))
told = dict(rows=engine.rows, numbers=numbers, scores=scores, text=text, step=weights.step, table=table, again=again)
print(json.dumps(told))
"""


EVERY_ROW = list(range(ROWS))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ({"data": 1, "fsdp": 2}, [EVERY_ROW[:6], EVERY_ROW[6:]]),  # half of each micro-batch
        ({"data": 1, "tensor": 2}, [EVERY_ROW, EVERY_ROW]),
    ],
    ids=["fsdp=2", "tensor=2"],
)
def test_two_processes_share_the_rows_and_get_the_numbers_of_one_device(mesh, rows, one_device):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {"recipe": recipe(mesh).to_dict(), "vocab": VOCAB, "windows": WINDOWS.tolist()}
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", TWO_PROCESSES]
    processes = [
        subprocess.Popen([*command, str(rank), port, json.dumps(settings)], env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        first, second = (json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [first["rows"], second["rows"]] == rows
    for said in (first, second):
        np.testing.assert_allclose(said["numbers"], one_device[1], rtol=1e-9)
        np.testing.assert_allclose(said["scores"], one_device[3], rtol=1e-9)
        assert said["step"] == STEPS
        np.testing.assert_allclose(said["table"], one_device[2]["tokens"][:4], rtol=1e-6, atol=1e-9)
        assert said["again"] == said["table"]
    assert np.shape(first["text"]) == (2, 4)
    assert first["text"] == second["text"]


# Against a plain computation


def plain_loss(model, parameters, windows):
    """The loss of each row by Optax on full logits, with dropout off, as precise as the parameters."""
    return plain_losses(model, parameters, windows).mean(1)


def plain_losses(model, parameters, windows):
    """Of each token."""
    hidden = GPT(model, parameters["tokens"].dtype, xla)(parameters, jnp.asarray(windows[:, :-1]))
    logits = hidden @ parameters["tokens"][:VOCAB].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(windows[:, 1:]))


@pytest.mark.extended
def test_an_accumulated_batchs_loss_and_gradient_are_those_of_the_plain_mean():
    with jax.enable_x64(True):
        assert_plain_mean(make_engine(accumulation=3, precision="fp64", dropout=0.0), WINDOWS[0])


@pytest.mark.extended
def test_five_rows_on_eight_devices_are_those_five_rows():
    with jax.enable_x64(True):
        engine = make_engine(MESHES["data=8"], accumulation=2, rows=5, precision="fp64", dropout=0.0)
        batch = engine.put(WINDOWS[0, :5])
        assert batch.inputs.shape == (2, 8, CONTEXT)
        places = [np.asarray(part).reshape(16, CONTEXT) for part in (batch.inputs, batch.weights)]
        rows = [row.tolist() for row, weights in zip(*places, strict=True) if weights.all()]
        assert sorted(rows) == sorted(WINDOWS[0, :5, :-1].tolist())
        assert places[1].sum() == 5 * CONTEXT  # the other places only pad
        assert_plain_mean(engine, WINDOWS[0, :5])


def assert_plain_mean(engine, windows):
    parameters = jax.device_get(engine.start().parameters)
    loss, gradients = sgd_step(engine, parameters, windows)
    mean = lambda parameters: plain_loss(engine.recipe.model, parameters, windows).mean()  # noqa: E731
    expected, right = jax.jit(jax.value_and_grad(mean))(parameters)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert_same(gradients, right, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", *also(None, "data=4,context=2")])
def test_tokens_count_by_their_weights(mesh):
    weights = np.random.default_rng(2).integers(0, 3, (ROWS, CONTEXT)).astype(float)  # a third counts for nothing
    with jax.enable_x64(True):
        engine = make_engine(MESHES.get(mesh), accumulation=2, precision="fp64", dropout=0.0)
        parameters = jax.device_get(engine.start().parameters)
        loss, gradients = sgd_step(engine, parameters, WINDOWS[0], weights)
        mean = lambda p: (plain_losses(engine.recipe.model, p, WINDOWS[0]) * weights).sum() / weights.sum()  # noqa: E731
        expected, right = jax.jit(jax.value_and_grad(mean))(parameters)
        assert loss == pytest.approx(float(expected), rel=1e-12)
        assert_same(gradients, right, rtol=1e-6, atol=1e-12)


def test_a_batch_in_which_no_token_counts_changes_nothing_but_what_decays():
    engine = make_engine(dropout=0.0)
    state, metrics = engine.step(engine.start(), engine.put(WINDOWS[0], np.zeros((ROWS, CONTEXT))))
    assert (engine.read(metrics)["loss"], engine.read(metrics)["grad_norm"]) == (0.0, 0.0)
    np.testing.assert_array_equal(state.parameters["norm.gain"], np.ones(32))


def sgd_step(engine, parameters, windows, weights=None):
    """Loss, and the gradient as what a step with rate 1 takes off."""
    plain = Optimizer(lambda parameters: {}, lambda gradients, parameters, slots, updates: (gradients, slots))
    step = make_step(engine.recipe, engine._losses, plain, optax.constant_schedule(1.0))
    state = State(parameters, {}, *engine._counters(0))
    after, metrics = jax.jit(step)(state, engine.put(windows, weights))
    gradients = jax.tree.map(jnp.subtract, parameters, after.parameters)
    assert float(metrics.grad_norm) == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-3)
    return float(metrics.loss), gradients


def test_scores_are_the_plain_mean_over_each_rows_tokens():
    engine = make_engine(dropout=0.5)  # which a score has none of
    state = engine.start()
    np.testing.assert_allclose(
        engine.window_losses(state, WINDOWS[0]),
        plain_loss(engine.recipe.model, state.parameters, WINDOWS[0]),
        rtol=1e-5,
    )


@pytest.mark.extended
def test_fp16_gradients_of_many_tokens_do_not_vanish():
    """A mean over half a million tokens gives each a gradient below fp16's smallest number; here it is 8192."""
    rows = 512
    windows = np.random.default_rng(1).integers(0, VOCAB, (rows, CONTEXT + 1)).astype(np.int32)
    exact, half = (make_engine(rows=rows, precision=precision, dropout=0.0) for precision in ("fp32", "fp16"))
    parameters = exact.start().parameters
    expected, right = sgd_step(exact, parameters, windows)
    loss, gradients = sgd_step(half, parameters, windows)
    assert loss == pytest.approx(expected, rel=1e-3)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, gradients, right)) / optax.tree.norm(right)
    assert float(error) < 5e-3


def test_bf16_computes_but_parameters_optimizer_and_losses_are_fp32():
    engine = make_engine(precision="bf16")
    state = engine.start()
    np.testing.assert_allclose(
        engine.window_losses(state, WINDOWS[0]),
        plain_loss(engine.recipe.model, state.parameters, WINDOWS[0]),
        rtol=2e-3,
    )
    floats = {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves((state.parameters, state.slots)) if leaf.ndim} == floats
    for step in range(3):
        assert int(state.step) == step
        state, metrics = engine.step(state, engine.put(WINDOWS[step]))
        assert {metric.dtype for metric in metrics} == floats
        assert engine.read(metrics)["lr"] == pytest.approx(0.001 * (step + 1) / 6, rel=1e-6)  # 5 steps of warm-up
    assert {leaf.dtype for leaf in jax.tree.leaves((state.parameters, state.slots)) if leaf.ndim} == floats
    scores = engine.window_losses(state, WINDOWS[0])
    assert scores.dtype == np.float32
    assert len(set(scores.tolist())) == ROWS  # bf16 would tell numbers around 4.6 apart in steps of 0.03


# Where arrays lie


def test_parameters_and_optimizer_of_an_fsdp_run_are_born_in_shares():
    engine = make_engine(MESHES["fsdp=8"])
    state = engine.start()
    matrices = [leaf for leaf in jax.tree.leaves((state.parameters, state.slots)) if leaf.size >= 512]
    assert len(matrices) == 3 * 8  # two tables and six kernels, and AdamW's two averages of each
    for leaf in matrices:
        assert [shard.data.size for shard in leaf.addressable_shards] == [leaf.size // 8] * 8
    compiled = jax.jit(engine._initial, out_shardings=engine._shardings).lower(engine._initial_keys).compile().as_text()
    for leaf in matrices:
        assert f"f32[{','.join(map(str, leaf.shape))}]" not in compiled, "no device ever holds the whole"


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", *also("fsdp=2,tensor=2,context=2", "data=2,fsdp=4")])
def test_no_device_holds_more_activations_than_those_of_its_rows(mesh):
    engine = JaxEngine(recipe(MESHES[mesh]), vocab=1000)  # with a smaller one, rows are cheaper to move than the table
    compiled = engine._step.lower(engine.start(), engine.put(WINDOWS[0])).compile().as_text()
    sizes = {"context": 1, **MESHES[mesh]}
    rows, time = -(-ROWS // (sizes["data"] * sizes.get("fsdp", 1))), CONTEXT // sizes["context"]
    streams = {tuple(map(int, found)) for found in re.findall(r"f32\[(\d+),(\d+),(?:8|16|32)\]", compiled)}
    assert (rows, time) in streams
    larger = {(rows * n, time * m) for n in (1, 2, 4, 8) for m in (1, 2)} - {(rows, time)}
    assert not streams & larger


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2,context=2", *also("data=8", "data=2,fsdp=2,tensor=2")])
def test_the_tables_gradient_is_exchanged_after_the_last_chunk_of_logits(mesh, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**12)
    engine = JaxEngine(recipe(MESHES[mesh]), vocab=1000)
    compiled = engine._step.lower(engine.start(), engine.put(WINDOWS[0])).compile().as_text()
    assert re.search(r"jvp\(\)/while/body/closed_call/rctv,rctd->rcvd", compiled), "in chunks"
    exchanged = [line for line in compiled.splitlines() if re.search(r" (all-reduce|reduce-scatter)\(", line)]
    assert exchanged
    assert not [line for line in exchanged if "rctv,rctd->rcvd" in line]


def test_another_seed_is_another_model(one_device):
    with jax.enable_x64(True):
        seeded = recipe().model_copy(update={"training": Training(seed=1, batch_tokens=ROWS * CONTEXT)})
        other = JaxEngine(seeded, VOCAB, precision="fp64", devices=jax.devices()[:1]).start()
    for name in ("tokens", "positions"):
        assert np.abs(one_device[0][name] - np.asarray(other.parameters[name])).max() > 0.02


# What it says of itself


class Device:
    def __init__(self, platform, capability="8.0"):
        self.platform, self.compute_capability = platform, capability


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [
        ("auto", Device("cpu"), "fp32"),
        ("auto", Device("tpu"), "bf16"),
        ("auto", Device("gpu", "9.0"), "bf16"),
        ("auto", Device("gpu", "12.0"), "bf16"),
        ("auto", Device("gpu", "7.5"), "fp16"),  # a T4
        ("bf16", Device("cpu"), "bf16"),
        ("fp32", Device("gpu", "9.0"), "fp32"),
    ],
)
def test_precision_is_the_recipes_or_the_devices_best(wanted, device, chosen):
    assert precision_on(device, wanted) == chosen


@pytest.mark.parametrize(
    ("wanted", "platform", "layers", "scanned"),
    [
        ("auto", "cpu", 6, False),
        ("auto", "cpu", 7, True),
        ("auto", "tpu", 1, True),
        ("auto", "gpu", 48, False),
        ("scanned", "gpu", 1, True),
        ("scanned", "cpu", 1, True),
        ("unrolled", "cpu", 48, False),
    ],
)
def test_layers_are_one_loop_where_the_recipe_or_the_device_wants_it(wanted, platform, layers, scanned):
    assert choices.scans(wanted, platform, layers) == scanned


def test_it_describes_engine_device_mesh_and_precision():
    about = make_engine(MESHES["data=4,context=2"]).describe()
    assert about["engine"] == f"jax {jax.__version__}"
    assert (about["device"], about["devices"], about["mesh"]) == ("cpu", "8", "data 4 × context 2")
    assert (about["precision"], about["attention"]) == ("fp32", "XLA")
    assert make_engine().describe()["mesh"] == "one device"
