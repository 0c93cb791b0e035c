"""The PyTorch engine in two and four processes: copies, shares, and both; and checkpoints from any to any."""

import json
import multiprocessing
import pickle
import socket
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

import torch.distributed as dist  # noqa: E402

from raygpt.engines.torch.checkpoint import read_plain_state  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.engines.torch.processes import join, leave  # noqa: E402
from raygpt.engines.torch.sharding import local  # noqa: E402
from raygpt.errors import RaygptError  # noqa: E402
from raygpt.inference.sampling import sample  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 10, 12, 16, 100
HALF = STEPS // 2
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, CONTEXT + 1)).astype(np.int32)
TARGET_WEIGHTS = np.random.default_rng(1).uniform(0, 1, (3, ROWS, CONTEXT)) * np.arange(ROWS)[:, None]
MODERN = {  # everything at once: two values for four queries, and gains of one number
    "preset": "qwen3",
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 14,
    "width": 28,
    "hidden": 36,
    "rope_share": 0.5,
    "embedding_norm": True,
    "value_embeddings": 1,
    "x0_mixing": True,
    "head_gates": True,
    "softcap": 5.0,
    "init": "xavier",
}
MUON = {**MODERN, "hidden": 37}  # of two shares of its rows one has 19, the other 18
COPIES, SHARES, BOTH = {"data": 2}, {"data": 1, "fsdp": 2}, {"data": 2, "fsdp": 2}


def make_engine(mesh=None, accumulation=1, precision="fp64", compile="off", remat="none", optimizer="adamw", **model):
    # 25 is odd: of two shares of a norm one has 13 rows, the other 12
    sizes = {"layers": 2, "heads": 5, "width": 25, "context": CONTEXT, "dropout": 0.1, **model}
    settings = {
        "engine": "torch",
        "model": sizes,
        "training": {
            "steps": STEPS,
            "batch_tokens": ROWS * sizes["context"],
            "on_nan": "skip",
            "compile": compile,
            "remat": remat,
        },
        "optimizer.kind": optimizer,
        "schedule.warmup_steps": 5,
        "cluster.mesh": mesh or {},
    }
    return TorchEngine(load_recipe("gpt2-tiny", settings), VOCAB, accumulation=accumulation, precision=precision)


def train(engine, state, steps=range(STEPS)):
    """Loss and gradient norm of each step, and the last state."""
    numbers = []
    for step in steps:
        state, metrics = engine.step(state, engine.put(WINDOWS[step][engine.rows]))
        numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm")])
    return np.array(numbers), state


def saved(engine, state, folder):
    engine.save(state, str(folder))
    state, _ = engine.step(state, engine.put(WINDOWS[HALF][engine.rows]))  # while it is written
    engine.wait_for_save()
    return state


def together(work, processes, folder):
    """What a function returns in each of so many processes that joined."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jobs = [_process(rank).submit(_joined, rank, address, processes, work, str(folder)) for rank in range(processes)]
    return [job.result() for job in jobs]


@cache
def _process(rank):
    """Started once for all tests: the imports of one take 4 s."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _joined(rank, address, processes, work, folder):
    join(address, processes, rank, gpus=[], threads=1)
    try:
        return work(folder)
    finally:
        leave()


# In one process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder):
    return in_one(make_engine, folder)


def in_one(make_engine, folder):
    """Numbers of each step, scores, text and weights after; its checkpoint of half way lies in `folder`."""
    torch.set_num_threads(1)
    engine = make_engine()
    before, state = train(engine, engine.start(), range(HALF))
    engine.save(state, str(folder / "alone"))
    engine.wait_for_save()
    after, state = train(engine, state, range(HALF, STEPS))
    return np.concatenate([before, after]), results(engine, state)


def results(engine, state):
    text = sample(engine, state, WINDOWS[0, :2, :3], 4, temperature=0.0)
    return (
        engine.window_losses(state, WINDOWS[0]),
        text,
        engine.gather(state),
        engine.token_logprobs(state, WINDOWS[0, :5, :9]),
    )


def assert_same_results(found, right):
    np.testing.assert_allclose(found[0], right[0], rtol=1e-9)
    np.testing.assert_array_equal(found[1], right[1])
    np.testing.assert_allclose(found[3][0], right[3][0], rtol=1e-9)
    np.testing.assert_array_equal(found[3][1], right[3][1])
    assert found[2].step == right[2].step
    assert_same_weights(found[2], right[2], 1e-9)


def assert_same_weights(found, right, atol, slots=("means", "squares")):
    assert found.slots.keys() == right.slots.keys() == {*slots}
    for kind, theirs in {"parameters": right.parameters, **right.slots}.items():
        ours = {"parameters": found.parameters, **found.slots}[kind]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=atol, err_msg=f"{kind} {name}")


# In two


def in_two(folder):
    """Everything that two processes are asked, in one start of them."""
    said = {}
    for name, mesh, accumulation in [("data=2", COPIES, 1), ("data=2 of 3", COPIES, 3), ("fsdp=2", SHARES, 2)]:
        engine = make_engine(mesh, accumulation)
        numbers, state = train(engine, engine.start())
        said[name] = engine.rows, numbers, results(engine, state)
    said["shares"] = {name: tuple(local(value).shape) for name, value in state.parameters.items()}
    for precision in ("fp32", "bf16"):
        engines = [make_engine(mesh, 2, precision=precision) for mesh in (COPIES, SHARES)]
        trained = [(engine, *train(engine, engine.start())) for engine in engines]
        said[precision] = [(numbers, engine.gather(state).parameters) for engine, numbers, state in trained]
    said["weighted"] = [weighted(mesh, accumulation) for mesh, accumulation in [(COPIES, 1), (COPIES, 3), (SHARES, 2)]]
    said["first"] = [engine.gather(engine.start()).parameters for engine in map(make_engine, (COPIES, SHARES))]
    said["exchanges"] = {accumulation: exchanges(accumulation) for accumulation in (1, 3)}
    said["transformers"] = in_transformers()
    for name, mesh in [("data=2", COPIES), ("fsdp=2", SHARES)]:
        engine = make_engine(mesh)
        said[f"alone to {name}"] = train(engine, engine.restore(f"{folder}/alone"), range(HALF, STEPS))[0]
        state = train(engine, engine.start(), range(HALF))[1]
        state = saved(engine, state, f"{folder}/{name}")
        went_on = train(engine, state, range(HALF + 1, STEPS))[0]
        said[f"{name} again"] = train(engine, engine.restore(f"{folder}/{name}"), range(HALF, STEPS))[0][1:], went_on
    said["data=2 to fsdp=2"] = train(engine, engine.restore(f"{folder}/data=2"), range(HALF, STEPS))[0]
    said["poisoned"] = poisoned()
    said["muon"] = [with_muon(folder, mesh, accumulation, **MUON) for mesh, accumulation in [(COPIES, 3), (SHARES, 1)]]
    engine = make_engine(SHARES, 2, remat="blocks")
    said["computed again"] = train(engine, engine.start(), range(3))[0]
    said["compiled"] = [compiled(mesh) for mesh in (COPIES, SHARES)]
    said["modern"] = [modern(mesh, accumulation) for mesh, accumulation in ((COPIES, 1), (SHARES, 2))]
    said["modern, compiled"] = compiled(SHARES, **MODERN)
    return said


def modern(mesh=None, accumulation=1, **settings):
    """The first steps of a modern model, and what it gives after."""
    engine = make_engine(mesh, accumulation, **MODERN, **settings)
    numbers, state = train(engine, engine.start(), range(6))
    return numbers, results(engine, state)


def weighted(mesh=None, accumulation=1, **settings):
    """The first steps with a weight for every target, of which one process's rows may have less than another's."""
    engine = make_engine(mesh, accumulation, **settings)
    state, numbers = engine.start(), []
    for step in range(3):
        batch = engine.put(WINDOWS[step][engine.rows], TARGET_WEIGHTS[step][engine.rows])
        state, metrics = engine.step(state, batch)
        numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm")])
    return np.array(numbers)


def exchanges(accumulation):
    """How often copies exchange gradients in each of three steps, and how many there are of them."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    engine, sizes = make_engine(COPIES, accumulation), []

    def counted(group, bucket):
        sizes[-1].append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    state = engine.start()
    state.module.register_comm_hook(None, counted)
    for step in range(3):
        sizes.append([])
        state, _ = engine.step(state, engine.put(WINDOWS[step][engine.rows]))
    return sizes, sum(parameter.numel() for parameter in state.parameters.values())


def in_transformers():
    engine = make_engine(SHARES, 2, implementation="huggingface")
    numbers, state = train(engine, engine.start())
    return numbers, results(engine, state)


def with_muon(folder, mesh=None, accumulation=1, **sizes):
    """Some steps with Muon; on a mesh they go on from one process's checkpoint, and their own is left beside it."""
    engine = make_engine(mesh, accumulation, optimizer="muon", **sizes)
    state = engine.restore(f"{folder}/muon") if mesh else train(engine, engine.start(), range(3))[1]
    if not mesh:
        engine.save(state, f"{folder}/muon")
        engine.wait_for_save()
    numbers, state = train(engine, state, range(3, 7))
    if mesh:
        engine.save(state, f"{folder}/muon {mesh}")
        engine.wait_for_save()
    return numbers, engine.gather(state)


def poisoned():
    """Whether a step is left out by both processes if only one of them has a number that is none."""
    engine = make_engine(SHARES)
    state = engine.start()
    if dist.get_rank() == 1:
        with torch.no_grad():
            local(state.parameters["norm.bias"])[0] = torch.nan
    state, metrics = engine.step(state, engine.put(WINDOWS[0][engine.rows]))
    return engine.read(metrics)["skipped"], float(state.numbers()["updates"])


def compiled(mesh, **sizes):
    """The first steps, the number of graphs and what cut them."""
    torch._dynamo.reset()  # of what this process has compiled before
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch._dynamo.reset()  # else the sizes of another model would make these ones variables
    engine = make_engine(mesh, compile="unrolled", **sizes)
    with torch.compiler.set_stance(force_backend="aot_eager"):  # traced like any other; C++ takes half a minute more
        numbers, _ = train(engine, engine.start(), range(3))
    return numbers, counters["stats"]["unique_graphs"], dict(counters["graph_break"]), engine.describe()["compiled"]


@pytest.fixture(scope="module")
def muon_alone(folder):
    return with_muon(folder, **MUON)


@pytest.fixture(scope="module")
def two(folder, alone, muon_alone):
    return together(in_two, 2, folder)


@pytest.mark.parametrize("mesh", ["data=2", "data=2 of 3", "fsdp=2"])  # the last two with micro-batches
def test_two_processes_share_the_rows_and_get_the_numbers_of_one(mesh, two, alone):
    for said, its_rows in zip(two, (range(6), range(6, 12)), strict=True):
        found, numbers, after = said[mesh]
        assert found == list(its_rows)
        np.testing.assert_allclose(numbers, alone[0], rtol=1e-9)
        assert_same_results(after, alone[1])


def test_initial_values_are_the_same_on_every_mesh(two):
    engine = make_engine()
    right = engine.gather(engine.start()).parameters
    for found in (first for said in two for first in said["first"]):
        assert found.keys() == right.keys()
        for name, value in right.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_loss_is_divided_by_the_weights_of_all_processes(two):
    right = weighted()
    for said in two:
        for numbers in said["weighted"]:
            np.testing.assert_allclose(numbers, right, rtol=1e-9)


@pytest.mark.parametrize("mesh", ["data=2", "data=2 of 3", "fsdp=2"])
def test_every_parameter_is_that_of_one_process_relative_to_its_norm(mesh, two, alone):
    for said in two:
        found, right = (weights.parameters for weights in (said[mesh][2][2], alone[1][2]))
        assert_near(without_keys_biases(found), without_keys_biases(right), 1e-9)


def assert_near(found, right, tolerance):
    assert found.keys() == right.keys()
    for name, value in right.items():
        distance = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert distance < tolerance, name


def without_keys_biases(parameters):
    """A key's bias moves all scores of a query alike: its gradient is rounding, which AdamW makes as large as any."""
    return {name: value for name, value in parameters.items() if name != "blocks.key.bias"}


def test_copies_exchange_gradients_once_a_step_however_it_is_accumulated(two):
    for said in two:
        for sizes, parameters in said["exchanges"].values():
            assert [sum(step) for step in sizes] == [parameters] * 3
        assert said["exchanges"][1] == said["exchanges"][3]


def test_the_run_that_others_are_compared_with_begins_at_chance_and_moves(alone):
    losses, norms = alone[0].T
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert len(set(losses)) == len(set(norms)) == STEPS


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_in_less_precision_they_agree_as_far_as_it_goes(precision, tolerance, two, alone):
    for numbers, parameters in two[0][precision]:
        np.testing.assert_allclose(numbers, alone[0], rtol=tolerance)
        if precision == "fp32":
            assert_near(without_keys_biases(parameters), without_keys_biases(alone[1][2].parameters), tolerance)


def test_transformers_model_in_shares_gets_the_same_numbers(two, alone):
    pytest.importorskip("transformers")
    numbers, after = two[1]["transformers"]
    np.testing.assert_allclose(numbers, alone[0], rtol=1e-9)
    assert_same_results(after, alone[1])


def test_of_a_model_in_shares_each_process_has_half(two):
    first, second = (said["shares"] for said in two)
    assert first["tokens.weight"] == second["tokens.weight"] == (64, 25)
    assert first["blocks.1.up.weight"] == second["blocks.1.up.weight"] == (50, 25)
    assert (first["norm.bias"], second["norm.bias"]) == ((13,), (12,))


def test_blocks_in_shares_can_be_computed_again(two, alone):
    np.testing.assert_allclose(two[0]["computed again"], alone[0][:3], rtol=1e-9)


def test_compiled_block_by_block_the_numbers_are_the_same(two, alone):
    for numbers, graphs, breaks, how in two[0]["compiled"]:
        np.testing.assert_allclose(numbers, alone[0][:3], rtol=1e-9)
        assert graphs <= 2, "one for all blocks; and one for the loss, the second time the same"
        assert not breaks
        assert how == "by blocks"


def test_a_modern_model_gets_the_same_numbers(two):
    numbers, after = modern()
    for said in two:
        for found in said["modern"]:
            np.testing.assert_allclose(found[0], numbers, rtol=1e-9)
            assert_same_results(found[1], after)
    found, graphs, breaks, _ = two[0]["modern, compiled"]
    np.testing.assert_allclose(found, numbers[:3], rtol=1e-9)
    assert graphs <= 4, "the first block, those with and without a value embedding, the loss"
    assert not breaks


def test_a_number_that_is_none_in_one_process_is_a_step_left_out_by_all(two):
    assert [said["poisoned"] for said in two] == [(1, 0), (1, 0)]


def test_muon_in_copies_and_shares_gets_the_numbers_of_one(two, muon_alone, folder):
    for said in two:
        assert_same_muon(said["muon"], muon_alone)
    model = make_engine(**MUON).recipe.model
    for mesh in (COPIES, SHARES):
        assert_same_muon([(muon_alone[0], read_plain_state(f"{folder}/muon {mesh}", model, VOCAB))], muon_alone)


def assert_same_muon(found, right):
    for numbers, weights in found:
        np.testing.assert_allclose(numbers, right[0], rtol=1e-9)
        assert_same_weights(weights, right[1], 1e-9, ("means", "squares", "momentum"))


# Checkpoints


@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2"])
def test_one_processs_checkpoint_goes_on_in_two(mesh, two, alone):
    for said in two:
        np.testing.assert_allclose(said[f"alone to {mesh}"], alone[0][HALF:], rtol=1e-9)


@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2"])
def test_two_processes_checkpoint_goes_on_in_one(mesh, two, alone, folder):
    engine = make_engine()
    numbers, state = train(engine, engine.restore(str(folder / mesh)), range(HALF, STEPS))
    np.testing.assert_allclose(numbers, alone[0][HALF:], rtol=1e-9)
    assert_same_results(results(engine, state), alone[1])


@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2"])
def test_on_the_mesh_that_saved_it_a_checkpoint_goes_on_bit_for_bit(mesh, two):
    for said in two:
        again, went_on = said[f"{mesh} again"]
        np.testing.assert_array_equal(again, went_on)


def test_a_checkpoint_of_copies_goes_on_in_shares(two, alone):
    np.testing.assert_allclose(two[0]["data=2 to fsdp=2"], alone[0][HALF:], rtol=1e-9)


@pytest.mark.parametrize(("mesh", "files"), [("alone", 1), ("data=2", 1), ("fsdp=2", 2)])
def test_a_checkpoint_is_a_file_per_share_and_an_index(mesh, files, two, folder):
    names = sorted(path.name for path in (folder / mesh).iterdir())
    assert names == [*(f"share-{n:05d}.safetensors" for n in range(files)), "state.json"]
    index = json.loads((folder / mesh / "state.json").read_text())
    assert index == {"format": 3, "shares": files, "step": HALF}


def test_nothing_in_a_checkpoint_is_pickled(two, folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    restored = make_engine().restore(str(folder / "fsdp=2"))
    assert restored.step == HALF
    assert {path.suffix for path in folder.glob("*/*")} == {".json", ".safetensors"}


def test_a_checkpoint_is_read_as_plain_arrays_without_an_engine(two, alone, folder):
    engine = make_engine()
    right = engine.gather(engine.restore(str(folder / "alone")))
    for mesh in ("alone", "fsdp=2"):
        weights = read_plain_state(str(folder / mesh), engine.recipe.model, VOCAB)
        assert weights.step == HALF
        assert weights.parameters["tokens"].shape == (VOCAB, 25)
        assert_same_weights(weights, right, 1e-12)


def test_a_checkpoint_is_of_its_step_though_training_goes_on_while_it_is_written(folder):
    engine = make_engine()
    state = train(engine, engine.start(), range(2))[1]
    before = engine.gather(state).parameters
    state = saved(engine, state, folder / "busy")
    after = engine.gather(engine.restore(str(folder / "busy"))).parameters
    later = engine.gather(state).parameters
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
        assert (later[name] != value).any()


def test_fp16s_loss_scale_is_part_of_a_checkpoint(folder):
    engine = make_engine(precision="fp16")
    state = engine.start()
    state.scale.factor.fill_(128)
    state.scale.good_steps.fill_(7)
    engine.save(state, str(folder / "scaled"))
    engine.wait_for_save()
    again = engine.restore(str(folder / "scaled"))
    assert (float(again.scale.factor), int(again.scale.good_steps)) == (128, 7)


def test_what_goes_wrong_in_the_background_is_raised_when_waited_for(folder):
    (folder / "a file").write_text("")
    engine = make_engine()
    engine.save(engine.start(), str(folder / "a file" / "checkpoint"))
    with pytest.raises(RaygptError, match="a file is where a folder should be"):
        engine.wait_for_save()
    with pytest.raises(RaygptError, match=r"is no checkpoint of engine torch: it has no state\.json"):
        engine.restore(str(folder / "nowhere"))
    (folder / "old").mkdir()
    (folder / "old" / "state.json").write_text('{"shares": 1, "step": 3}')
    with pytest.raises(RaygptError, match=r"is a checkpoint of another version of raygpt; begin a new run: run\.name="):
        engine.restore(str(folder / "old"))


# In four


def in_four(folder):
    engine = make_engine(BOTH, 2)
    before, state = train(engine, engine.restore(f"{folder}/fsdp=2"), range(HALF, HALF + 3))
    engine.save(state, f"{folder}/four")
    engine.wait_for_save()
    dist.barrier()
    after = train(engine, engine.restore(f"{folder}/four"), range(HALF + 3, HALF + 5))[0]
    return np.concatenate([before, after]), engine.rows, engine.describe()["mesh"], with_muon(folder, BOTH, 2, **MUON)


@pytest.mark.extended
def test_four_processes_hold_two_copies_in_shares(two, alone, muon_alone, folder):
    for rank, (numbers, rows, mesh, muon) in enumerate(together(in_four, 4, folder)):
        assert_same_muon([muon], muon_alone)
        np.testing.assert_allclose(numbers, alone[0][HALF : HALF + 5], rtol=1e-9)
        assert rows == list(range(3 * rank, 3 * rank + 3))
        assert mesh == "data 2 × fsdp 2"
    assert len(list((folder / "four").glob("share-*"))) == 2, "one copy writes"
