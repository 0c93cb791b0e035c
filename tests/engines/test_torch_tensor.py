"""The PyTorch engine with each matrix in two processes, beside copies and shares of it: one process's numbers."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

import torch.distributed as dist  # noqa: E402
from conftest import also  # noqa: E402
from test_torch_processes import (  # noqa: E402
    CONTEXT,
    HALF,
    MODERN,
    STEPS,
    VOCAB,
    WINDOWS,
    assert_same_muon,
    assert_same_results,
    assert_same_weights,
    compiled,
    in_one,
    modern,
    results,
    saved,
    together,
    train,
    weighted,
    with_muon,
)
from test_torch_processes import make_engine as make_any_engine  # noqa: E402

from raygpt.engines.torch.checkpoint import read_plain_state  # noqa: E402
from raygpt.engines.torch.sharding import local  # noqa: E402

pytestmark = pytest.mark.extended  # test_torch_processes.py shows the same for copies and shares

TENSOR = {"data": 1, "tensor": 2}
WITH_COPIES, WITH_SHARES = {"data": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}
# Of 18 rows of queries each process has 9, of which two shards are 5 and 4; so of keys and values.
SIZES = {"heads": 2, "width": 18}
MUON = {**MODERN, "hidden": 38}  # 19 rows for each process, of which two shards are 10 and 9
OTHER = {"bias": False, "tied_head": False, "context": CONTEXT - 1}  # 15 tokens: 8 for one process, 7 for the other
make_engine = functools.partial(make_any_engine, **SIZES)


def first_steps(mesh=None, **settings):
    engine = make_engine(mesh, **settings)
    windows = WINDOWS[:3, :, : engine.context + 1]
    state, losses = engine.start(), []
    for batch in windows:
        state, metrics = engine.step(state, engine.put(batch[engine.rows]))
        losses.append(engine.read(metrics)["loss"])
    return np.array(losses)


def decode_rows(engine, state):
    """Logits of rows at positions of their own."""
    _, cache = engine.prefill(state, WINDOWS[0, :3, :9])
    return engine.decode(state, WINDOWS[0, :3, 9:10], np.array([9, 3, 6], dtype=np.int32), cache)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder):
    return in_one(make_engine, folder)


# In two


def in_two(folder):
    said = {}
    engine = make_engine(TENSOR, 2)
    numbers, state = train(engine, engine.start())
    said["all"] = numbers, results(engine, state)
    said["rows"], said["mesh"] = engine.rows, engine.describe()["mesh"]
    said["parts"] = {name: tuple(local(value).shape) for name, value in state.parameters.items()}
    for precision in ("fp32", "bf16"):
        engine = make_engine(TENSOR, precision=precision)
        said[precision] = train(engine, engine.start())[0]
    engine = make_engine(TENSOR)
    said["from alone"] = train(engine, engine.restore(f"{folder}/alone"), range(HALF, STEPS))[0]
    state = saved(engine, train(engine, engine.start(), range(HALF))[1], f"{folder}/tensor=2")
    said["went on"] = train(engine, state, range(HALF + 1, STEPS))[0]
    said["again"] = train(engine, engine.restore(f"{folder}/tensor=2"), range(HALF, STEPS))[0][1:]
    said["other"] = first_steps(TENSOR, **OTHER)
    said["normed"] = first_steps(TENSOR, qk_norm=True)  # LayerNorms, with gains and biases
    said["weighted"] = weighted(TENSOR, 2, **SIZES)
    engine = make_engine(TENSOR)
    said["first"] = engine.gather(engine.start()).parameters
    said["decoded"] = decode_rows(engine, engine.restore(f"{folder}/alone"))
    said["computed again"] = [first_steps(TENSOR, remat=what) for what in ("products", "blocks")]
    said["compiled"] = compiled(TENSOR, **SIZES)
    said["modern"] = modern(TENSOR, 2)
    said["modern, computed again"] = modern(TENSOR, remat="products")[0]
    said["modern, compiled"] = compiled(TENSOR, **MODERN)
    said["muon"] = with_muon(folder, TENSOR, 2, **MUON)
    return said


@pytest.fixture(scope="module")
def muon_alone(folder):
    return with_muon(folder, **MUON)


@pytest.fixture(scope="module")
def two(folder, alone, muon_alone):
    return together(in_two, 2, folder)


def test_two_processes_that_share_each_matrix_get_the_numbers_of_one(two, alone):
    for said in two:
        assert (said["mesh"], said["rows"]) == ("tensor 2", list(range(12)))
        np.testing.assert_allclose(said["all"][0], alone[0], rtol=1e-9)
        assert_same_results(said["all"][1], alone[1])


def test_each_has_whole_heads_and_half_of_what_is_large(two):
    for said in two:
        assert (
            said["parts"]
            | {
                "tokens.weight": (64, 18),
                "positions.weight": (CONTEXT, 18),
                "blocks.1.query.weight": (9, 18),
                "blocks.1.key.bias": (9,),
                "blocks.1.value.weight": (9, 18),
                "blocks.1.out.weight": (18, 9),
                "blocks.1.out.bias": (18,),
                "blocks.1.up.weight": (36, 18),
                "blocks.1.down.weight": (18, 36),
            }
            == said["parts"]
        )


def test_initial_values_weights_and_positions_of_rows_are_those_of_one_process(two, folder):
    engine = make_engine()
    first, decoded = (
        engine.gather(engine.start()).parameters,
        decode_rows(engine, engine.restore(str(folder / "alone"))),
    )
    for said in two:
        np.testing.assert_allclose(said["weighted"], weighted(**SIZES), rtol=1e-9)
        np.testing.assert_allclose(said["decoded"], decoded, rtol=1e-9)
        for name, value in first.items():
            np.testing.assert_array_equal(said["first"][name], value, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_in_less_precision_they_agree_as_far_as_it_goes(precision, tolerance, two, alone):
    np.testing.assert_allclose(two[0][precision], alone[0], rtol=tolerance)


def test_without_biases_with_a_head_of_its_own_and_of_odd_length_too(two):
    np.testing.assert_allclose(two[1]["other"], first_steps(**OTHER), rtol=1e-9)


def test_norms_of_heads_with_biases_too(two):
    np.testing.assert_allclose(two[1]["normed"], first_steps(qk_norm=True), rtol=1e-9)


def test_blocks_can_be_computed_again_and_compiled(two, alone):
    numbers, _, breaks, how = two[0]["compiled"]
    np.testing.assert_allclose(numbers, alone[0][:3], rtol=1e-9)
    assert (breaks, how) == ({}, "by blocks")
    for losses in two[0]["computed again"]:
        np.testing.assert_allclose(losses, alone[0][:3, 0], rtol=1e-9)


def test_a_modern_model_gets_the_same_numbers(two):
    numbers, after = modern()
    for said in two:
        np.testing.assert_allclose(said["modern"][0], numbers, rtol=1e-9)
        assert_same_results(said["modern"][1], after)
        np.testing.assert_allclose(said["modern, computed again"], numbers, rtol=1e-9)
        found, graphs, breaks, _ = said["modern, compiled"]
        np.testing.assert_allclose(found, numbers[:3], rtol=1e-9)
        assert graphs <= 4
        assert not breaks


def test_muon_makes_the_same_matrices_orthogonal(two, muon_alone):
    for said in two:
        assert_same_muon([said["muon"]], muon_alone)


def test_checkpoints_cross_from_one_process_to_two_and_back(two, alone, folder):
    np.testing.assert_allclose(two[0]["from alone"], alone[0][HALF:], rtol=1e-9)
    np.testing.assert_array_equal(two[0]["again"], two[0]["went on"])
    engine = make_engine()
    numbers, state = train(engine, engine.restore(str(folder / "tensor=2")), range(HALF, STEPS))
    np.testing.assert_allclose(numbers, alone[0][HALF:], rtol=1e-9)
    assert_same_results(results(engine, state), alone[1])


# In four


def in_four(folder):
    engine = make_engine(WITH_SHARES, 2)
    before, state = train(engine, engine.start(), range(HALF))
    engine.save(state, f"{folder}/four")
    engine.wait_for_save()
    dist.barrier()
    after, state = train(engine, state, range(HALF, STEPS))
    said = {"shares": (np.concatenate([before, after]), results(engine, state)), "rows": engine.rows}
    engine = make_engine(WITH_COPIES, 2)
    numbers, state = train(engine, engine.restore(f"{folder}/four"), range(HALF, STEPS))
    said["copies"] = numbers, results(engine, state)
    said["modern"] = modern(WITH_SHARES, 2)
    said["muon"] = [with_muon(folder, mesh, **MUON) for mesh in (WITH_SHARES, WITH_COPIES)]
    return said


@pytest.fixture(scope="module")
def four(folder, two):
    return together(in_four, 4, folder)


@pytest.mark.extended
def test_with_shares_and_with_copies_the_numbers_are_the_same(four, alone, muon_alone):
    for rank, said in enumerate(four):
        assert_same_muon(said["muon"], muon_alone)
        assert said["rows"] == list(range(6 * (rank // 2), 6 * (rank // 2) + 6))
        np.testing.assert_allclose(said["shares"][0], alone[0], rtol=1e-9)
        np.testing.assert_allclose(said["copies"][0], alone[0][HALF:], rtol=1e-9)
        assert_same_results(said["shares"][1], alone[1])
        assert_same_results(said["copies"][1], alone[1])
    numbers, after = modern()
    np.testing.assert_allclose(four[3]["modern"][0], numbers, rtol=1e-9)
    assert_same_results(four[3]["modern"][1], after)


@pytest.mark.parametrize(("mesh", "saved_by", "files"), [("tensor=2", "two", 2), *also(("four", "four", 4))])
def test_a_checkpoint_in_parts_is_read_as_plain_arrays(mesh, saved_by, files, request, folder):
    request.getfixturevalue(saved_by)
    assert len(list((folder / mesh).glob("share-*"))) == files
    engine = make_engine()
    right = engine.gather(engine.restore(str(folder / "alone")))
    weights = read_plain_state(str(folder / mesh), engine.recipe.model, VOCAB)
    assert weights.step == HALF
    assert_same_weights(weights, right, 1e-12)
