"""A state as plain arrays under our names: gathered, loaded, and read from a checkpoint."""

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")

from raygpt.engines.base import PlainState  # noqa: E402
from raygpt.engines.jax.checkpoint import read_plain_state  # noqa: E402
from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

LAYERS, WIDTH, HEADS, ROWS, CONTEXT, VOCAB = 2, 16, 2, 8, 8, 50
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (4, ROWS, CONTEXT + 1)).astype(np.int32)
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """XLA's passes take most of these tests' time, and change no digit that they look at."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_engine(mesh=None, **model):
    settings = {
        "model": {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT, **model},
        "training": {"batch_tokens": ROWS * CONTEXT, "steps": 20},
        "cluster.mesh": mesh or {},
    }
    return JaxEngine(load_recipe("gpt2-tiny", settings), VOCAB, devices=None if mesh else jax.devices()[:1])


def train(engine, state, windows):
    losses = []
    for batch in windows:
        state, metrics = engine.step(state, engine.put(batch))
        losses.append(engine.read(metrics)["loss"])
    return state, losses


@pytest.fixture(scope="module")
def trained():
    """An engine on a mesh, its state after two steps, and the losses of the two that follow."""
    engine = make_engine(MESH)
    state, _ = train(engine, engine.start(), WINDOWS[:2])
    weights = engine.gather(state)
    copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    return engine, copy, weights, train(engine, state, WINDOWS[2:])[1]


def assert_equal(weights, expected):
    assert weights.step == expected.step
    assert weights.slots.keys() == expected.slots.keys() == {"means", "squares"}
    for kind in ("parameters", "means", "squares"):
        ours, theirs = ({"parameters": w.parameters, **w.slots}[kind] for w in (weights, expected))
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=f"{kind} {name}")


def test_a_gathered_state_has_every_array_whole_and_by_its_name(trained):
    _, state, weights, _ = trained
    assert weights.step == 2
    pairs = [(weights.parameters, state.parameters)]
    pairs += [(weights.slots[name], state.slots[name]) for name in ("means", "squares")]
    for arrays, tree in pairs:
        assert len(arrays) == 16 + 4  # two norms and six linear layers, each with a bias; two tables and a norm
        assert {type(array) for array in arrays.values()} == {np.ndarray}
        np.testing.assert_array_equal(arrays["tokens"], tree["tokens"][:VOCAB])
        assert arrays["blocks.query.kernel"].shape == (LAYERS, WIDTH, HEADS, WIDTH // HEADS)
        np.testing.assert_array_equal(arrays["blocks.query.kernel"], tree["blocks.query.kernel"])
        np.testing.assert_array_equal(arrays["norm.bias"], tree["norm.bias"])
    assert all(array.any() for array in weights.slots["means"].values())
    assert all((array >= 0).all() for array in weights.slots["squares"].values())


@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 8}, *also(None)], ids=["fsdp=8", "one device"])
def test_a_loaded_state_goes_on_as_the_gathered_one_would_have(trained, mesh):
    _, _, weights, expected = trained
    engine = make_engine(mesh)
    state = engine.load(weights)
    assert_equal(engine.gather(state), weights)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == engine._shardings
    np.testing.assert_allclose(train(engine, state, WINDOWS[2:])[1], expected, rtol=1e-5)


def test_averages_that_are_not_given_are_zero_as_before_step_0(trained):
    engine = make_engine()
    start = engine.start()
    state = engine.load(PlainState(engine.gather(start).parameters))
    jax.tree.map(np.testing.assert_array_equal, state, start._replace(parameters=state.parameters))
    np.testing.assert_array_equal(state.parameters["tokens"], start.parameters["tokens"])
    assert train(engine, state, WINDOWS[:2])[1] == train(engine, start, WINDOWS[:2])[1]


@pytest.mark.parametrize("mesh", [MESH, *also(None)], ids=["data=2,fsdp=2,tensor=2", "one device"])
def test_a_checkpoint_is_read_without_the_mesh_that_wrote_it(tmp_path, mesh):
    engine = make_engine(mesh, tied_head=False, bias=False)
    state, _ = train(engine, engine.start(), WINDOWS[:2])
    engine.save(state, str(tmp_path / "state"))
    engine.wait_for_save()
    weights = read_plain_state(str(tmp_path / "state"), engine.recipe.model, VOCAB)
    assert_equal(weights, engine.gather(state))
    assert weights.parameters["head"].shape == (VOCAB, WIDTH)
    assert {type(array) for array in weights.slots["means"].values()} == {np.ndarray}


def test_a_save_holds_the_state_that_it_was_begun_with_while_training_goes_on(trained, tmp_path):
    engine, state, expected, _ = trained
    state = jax.tree.map(lambda leaf: leaf.copy(), state)
    engine._saver.reserve(state)  # as on a GPU, whose pinned memory takes a while to make
    engine.save(state, str(tmp_path / "state"))
    train(engine, state, WINDOWS[2:])  # the state's memory is used again
    engine.wait_for_save()
    assert_equal(read_plain_state(str(tmp_path / "state"), engine.recipe.model, VOCAB), expected)


def test_of_what_several_devices_hold_each_saves_a_part(trained, tmp_path):
    engine, state, expected, _ = trained
    engine.save(state, str(tmp_path / "state"))
    held, copied = (
        sum(shard.data.nbytes for array in jax.tree.leaves(tree) for shard in array.addressable_shards)
        for tree in (state.parameters, engine._saver._copy.parameters)
    )
    engine.wait_for_save()
    assert_equal(read_plain_state(str(tmp_path / "state"), engine.recipe.model, VOCAB), expected)
    assert copied <= 1.05 * held / MESH["data"]  # once, but for what eight does not divide
