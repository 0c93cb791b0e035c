"""A trained model that is only read: both engines' readers beside Hugging Face's GPT-2."""

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from reference import hugging_face

from raygpt.config import Model
from raygpt.engines import engine_of, read_parameters
from raygpt.engines.padding import bucket, pad_windows
from raygpt.engines.torch.reader import Linear, product
from raygpt.interop.gpt2 import from_hugging_face
from raygpt.models import describe
from raygpt.recipes import load_recipe

pytestmark = pytest.mark.usefixtures("compiled_quickly")

VOCAB, CONTEXT = 100, 24
MODEL = Model(layers=2, heads=4, width=32, context=CONTEXT, precision="fp32")


@pytest.fixture(scope="module", params=["jax", "torch"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def reference():
    return hugging_face(2, 4, 32, CONTEXT, VOCAB, tied=True).eval()


@pytest.fixture(scope="module")
def opened(engine, reference):
    reader = import_module(f"raygpt.engines.{engine}.reader").Reader(MODEL, VOCAB)
    arrays = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    return reader, reader.load(from_hugging_face(arrays, describe(MODEL, VOCAB)))


def tokens(rows, time):
    return np.random.default_rng(1).integers(0, VOCAB, (rows, time)).astype(np.int32)


@torch.no_grad()
def logits(reference, ids):
    return reference(torch.tensor(ids).long()).logits.numpy()


@pytest.mark.parametrize("time", [1, 5, CONTEXT])
def test_what_follows_a_prompt_of_any_length_is_hugging_faces(opened, reference, time):
    reader, state = opened
    ids = tokens(3, time)
    found, _ = reader.prefill(state, ids)
    assert found.shape == (3, VOCAB)
    np.testing.assert_allclose(found, logits(reference, ids)[:, -1], atol=2e-4)


def test_each_token_is_read_after_those_before_it(opened, reference):
    reader, state = opened
    ids = tokens(2, 12)
    expected = logits(reference, ids)
    _, cache = reader.prefill(state, ids[:, :5])
    for place in range(5, 12):
        found, cache = reader.decode(state, ids[:, place : place + 1], place, cache)
        np.testing.assert_allclose(found, expected[:, place], atol=2e-4)


def test_each_row_may_be_at_a_position_of_its_own(opened, reference):
    reader, state = opened
    ids, starts = tokens(3, 12), np.array([5, 2, 9], dtype=np.int32)
    expected = logits(reference, ids)
    _, cache = reader.prefill(state, ids[:, :9])  # what lies behind a row's start is overwritten or not looked at
    for ahead in range(3):
        at = starts + ahead
        found, cache = reader.decode(state, ids[np.arange(3), at][:, None], at, cache)
        np.testing.assert_allclose(found, expected[np.arange(3), at], atol=2e-4)


@pytest.mark.parametrize(("rows", "time"), [(3, 7), (2, CONTEXT)])
def test_every_token_gets_its_log_probability_and_whether_it_is_the_likeliest(opened, reference, rows, time):
    reader, state = opened
    windows = tokens(rows, time + 1)
    expected = logits(reference, windows[:, :-1])
    windows[0, 3] = expected[0, 2].argmax()  # one that hits; those after it are compared no further
    logs, hits = reader.token_logprobs(state, windows)
    assert logs.shape == hits.shape == (rows, time)
    assert hits[0, 2]
    normal = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    picked = np.take_along_axis(normal, windows[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(logs[1:], picked[1:], atol=2e-4)
    np.testing.assert_allclose(logs[0, :3], picked[0, :3], atol=2e-4)
    np.testing.assert_array_equal(hits[1:], expected.argmax(-1)[1:] == windows[1:, 1:])


def test_all_lengths_share_a_few_programs():
    assert sorted({bucket(n, 1024) for n in range(1, 1025)}) == [128, 256, 512, 1024]
    assert {bucket(n, 24) for n in range(1, 25)} == {24}
    assert {bucket(n, 1000) for n in range(513, 1001)} == {1000}


def test_shards_of_a_padded_text_are_as_the_contexts_are():
    def padded(time, longest, shards):
        return pad_windows(np.zeros((1, time + 1), np.int32), longest, 1, shards).shape[1] - 1

    assert [padded(time, 1024, 2) for time in (5, 128, 129, 600)] == [256, 256, 256, 1024]  # 128 a shard at least
    assert padded(5, 1024, 1) == 128
    assert [padded(time, 24, 3) for time in (5, 24)] == [24, 24]
    assert padded(5, 1000, 8) == 128  # whose shards of 125 are no multiple of 128 either


def test_prompts_of_one_bucket_are_compiled_once(opened, engine):
    if engine == "torch":
        pytest.skip("nothing is compiled")
    reader, state = opened
    before = reader._extend._cache_size()
    for time in (2, 6, 17):
        _, cache = reader.prefill(state, tokens(7, time))
        for place in range(time, time + 3):
            _, cache = reader.decode(state, tokens(7, 1), place, cache)
    assert reader._extend._cache_size() - before == 2  # the bucket, and a single token


def recipe(engine):
    sizes = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT}
    return load_recipe("gpt2-tiny", {"engine": engine, "model": sizes, "training.batch_tokens": 8 * CONTEXT})


def test_parameters_are_read_without_the_optimizer(engine, tmp_path):
    writer = engine_of(engine).Engine(recipe(engine), VOCAB)
    state = writer.start()
    expected = writer.gather(state).parameters
    writer.save(state, str(tmp_path / "state"))
    writer.wait_for_save()
    found = read_parameters(engine, str(tmp_path / "state"), recipe(engine).model, VOCAB)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_reader_computes_fp64_where_the_run_did(engine):
    code = f"""
import numpy as np
from raygpt.config import Model
from raygpt.engines import engine_of, make_reader
from raygpt.recipes import load_recipe
sizes = {{"layers": 1, "heads": 1, "width": 8, "context": 8}}
recipe = load_recipe("gpt2-tiny", {{"engine": "{engine}", "model": sizes}})
trained = engine_of("{engine}").Engine(recipe, 10, precision="fp32")
parameters = trained.gather(trained.start()).parameters
reader = make_reader("{engine}", recipe.model.model_copy(update={{"precision": "fp64"}}), 10)
logs, _ = reader.token_logprobs(reader.load(parameters), np.arange(6, dtype=np.int32)[None])
print(logs.dtype, reader.describe()["precision"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float64", "fp64"]


def test_an_engine_in_training_scores_tokens_as_its_reader_does(engine):
    trained = engine_of(engine).Engine(recipe(engine), VOCAB)
    state, windows = trained.start(), tokens(3, 8)
    reader = import_module(f"raygpt.engines.{engine}.reader").Reader(recipe(engine).model, VOCAB)
    expected = reader.token_logprobs(reader.load(trained.gather(state).parameters), windows)
    logs, hits = trained.token_logprobs(state, windows)
    np.testing.assert_allclose(logs, expected[0], atol=1e-5)
    np.testing.assert_array_equal(hits, expected[1])


def test_an_engine_in_training_decodes_rows_at_positions_of_their_own(engine):
    trained = engine_of(engine).Engine(recipe(engine), VOCAB)
    state, ids, starts = trained.start(), tokens(3, 12), np.array([5, 2, 9], dtype=np.int32)
    _, cache = trained.prefill(state, ids[:, :9])
    found, _ = trained.decode(state, ids[np.arange(3), starts][:, None], starts, cache)
    for row, start in enumerate(starts):
        _, cache = trained.prefill(state, ids[row : row + 1, :start])
        expected, _ = trained.decode(state, ids[row : row + 1, start : start + 1], int(start), cache)
        np.testing.assert_allclose(found[row], expected[0], atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
@pytest.mark.parametrize("out", [6, 7])  # and one that two cores cannot share
def test_a_product_of_few_rows_is_the_product(rows, out, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    random = np.random.default_rng(rows)
    x, kernel, bias = (random.normal(size=shape) for shape in ((rows, 5), (out, 5), (out,)))
    layer = Linear(5, out, dtype=torch.float64)
    layer.weight.data, layer.bias.data = torch.tensor(kernel), torch.tensor(bias)
    np.testing.assert_allclose(product(torch.tensor(x), layer.weight.detach()), x @ kernel.T, rtol=1e-12)
    got = layer(torch.tensor(x).reshape(rows, 1, 5)).detach()
    np.testing.assert_allclose(got, (x @ kernel.T + bias).reshape(rows, 1, out), rtol=1e-12)


def test_fp32_is_not_rounded_further_though_training_allows_it(opened, engine):
    """TF32 on a GPU, and bf16 on some CPUs, change log-probabilities in their third digit."""
    reader, state = opened
    if engine == "jax":
        windows = tokens(2, 9)
        lowered = reader._token_logprobs.lower(state, windows[:, :-1], windows[:, 1:]).as_text()
        products = [line for line in lowered.splitlines() if "dot_general" in line]
        assert products
        assert [line for line in products if "HIGHEST" not in line] == []
        return
    before = torch.get_float32_matmul_precision()
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        multiply = torch.bmm
        patched.setattr(torch, "bmm", lambda *a: seen.append(torch.get_float32_matmul_precision()) or multiply(*a))
        torch.set_float32_matmul_precision("medium")
        try:
            reader.prefill(state, tokens(1, 1))
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
