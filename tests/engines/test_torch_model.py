"""The PyTorch model against Hugging Face's GPT-2 and a plain NumPy one: same weights, logits, gradients; its start."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers")

from reference import hugging_face  # noqa: E402
from reference import logits as plain_logits  # noqa: E402

from raygpt.config import Model, Recipe  # noqa: E402
from raygpt.engines.base import PlainState  # noqa: E402
from raygpt.engines.padding import padded_vocab  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.engines.torch.huggingface import HuggingFaceGPT  # noqa: E402
from raygpt.engines.torch.huggingface_parameters import HuggingFaceLayout  # noqa: E402
from raygpt.engines.torch.loss import Objective  # noqa: E402
from raygpt.engines.torch.model import GPT  # noqa: E402
from raygpt.engines.torch.parameters import OwnLayout  # noqa: E402
from raygpt.engines.torch.reader import TorchReader  # noqa: E402
from raygpt.interop.gpt2 import from_hugging_face, to_hugging_face  # noqa: E402
from raygpt.models import describe, random_numbers  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [  # layers, heads, width, context, vocab
    (1, 1, 16, 8, 128),  # a vocabulary that needs no padding
    (3, 2, 48, 17, 257),
]
VOCAB = 500
IMPLEMENTATIONS = {GPT: OwnLayout, HuggingFaceGPT: HuggingFaceLayout}


def ours(implementation, reference, layers, heads, width, context, vocab, tied):
    """A model with the reference's weights, and its layout."""
    model = Model(layers=layers, heads=heads, width=width, context=context, tied_head=tied)
    description = describe(model, vocab)
    weights = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    gpt, layout = implementation(model, vocab, torch.float32), IMPLEMENTATIONS[implementation](description)
    values = layout.values(from_hugging_face(weights, description))
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(values(name, tuple(slice(size) for size in parameter.shape)))
    return gpt, layout, description


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_equal_hugging_faces(shape, tied, implementation):
    reference = hugging_face(*shape, tied)
    gpt, layout, description = ours(implementation, reference, *shape, tied)
    _, _, _, context, vocab = shape
    windows = torch.from_numpy(np.random.default_rng(1).integers(0, vocab, (3, context + 1)))
    x, y = windows[:, :-1], windows[:, 1:]
    logits = reference(x).logits
    torch.testing.assert_close((gpt(x) @ gpt.table.T)[..., :vocab], logits, atol=1e-4, rtol=1e-4)
    assert gpt.table.shape[0] == padded_vocab(vocab)

    value, losses = Objective(gpt, vocab)(x, y, torch.full((3, context), 1 / (3 * context)), None)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    torch.testing.assert_close(losses, expected.sum(1))
    value.backward()
    expected.mean().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    arrays = layout.arrays({name: parameter.grad for name, parameter in gpt.named_parameters()})
    mine = to_hugging_face(arrays, description)
    assert mine.keys() == theirs.keys()
    for name, right in theirs.items():
        atol = 1e-4 * max(1, float(right.abs().max()))
        torch.testing.assert_close(torch.from_numpy(mine[name]), right, atol=atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tensors_lead_to_the_descriptions_arrays_and_back(implementation):
    reference = hugging_face(2, 4, 64, 32, 100, tied=False)
    gpt, layout, description = ours(implementation, reference, 2, 4, 64, 32, 100, tied=False)
    parameters = {name: parameter.detach() for name, parameter in gpt.named_parameters()}
    arrays = layout.arrays(parameters)
    assert {name: array.shape for name, array in arrays.items()} == description.shapes
    named = to_hugging_face(arrays, description)
    assert named.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        np.testing.assert_array_equal(named[name], value.numpy(), err_msg=name)
    values = layout.values(arrays)
    for name, tensor in parameters.items():
        half = tuple(slice(size // 2, size) for size in tensor.shape)
        torch.testing.assert_close(values(name, half), tensor[half], rtol=0, atol=0)


def test_modules_have_the_descriptions_names():
    layout = OwnLayout(describe(Model(layers=4, heads=2, width=16, context=8, tied_head=False), 128))
    for name, ours, layer in [
        ("blocks.3.query.weight", "blocks.query.kernel", 3),
        ("blocks.0.query.bias", "blocks.query.bias", 0),
        ("blocks.1.norm2.weight", "blocks.norm2.gain", 1),
        ("norm.weight", "norm.gain", 0),
        ("norm.bias", "norm.bias", 0),
        ("tokens.weight", "tokens", 0),
        ("head.weight", "head", 0),
    ]:
        place = layout.find(name)
        assert (place.parameter.name, place.layer) == (ours, layer)


def test_without_biases_there_are_none_and_the_parameters_are_as_many_as_the_recipe_says():
    for bias, tied in [(True, True), (False, False)]:
        model = Model(layers=2, heads=2, width=16, context=8, bias=bias, tied_head=tied)
        gpt = GPT(model, 128, torch.float32)
        assert sum(parameter.numel() for parameter in gpt.parameters()) == describe(model, 128).count
        assert any("bias" in name for name, _ in gpt.named_parameters()) == bias


# Modern models

SMALL = {"layers": 4, "heads": 4, "width": 48, "context": 12, "precision": "fp64"}
MODERN = {
    "llama": {"preset": "llama", "kv_heads": 2, "hidden": 80},
    "qwen3": {"preset": "qwen3", "kv_heads": 1, "head_size": 20, "rope_share": 0.5, "rope_base": 50.0},
    "nanochat": {"preset": "nanochat", "softcap": 2.0},
    "everything": {
        "preset": "qwen3",
        "softcap": 3.0,
        "embedding_norm": True,
        "value_embeddings": 1,
        "x0_mixing": True,
        "head_gates": True,
        "mlp": "relu2",
    },
    "GPT-2 with modern parts": {
        "qk_norm": True,
        "embedding_norm": True,
        "kv_heads": 2,
        "mlp": "swiglu",
        "value_embeddings": 0,
        "x0_mixing": True,
        "softcap": 2.0,
    },
    "LayerNorm without gain": {"norm_gain": False, "bias": False, "qk_norm": True, "position": "rope"},
}


@functools.cache
def modern(name):
    """A model and arrays of large random numbers for it, gains too: a wrong place shows."""
    model, random = Model.model_validate({**SMALL, **MODERN[name]}), np.random.default_rng(3)
    return model, {name: random.normal(0, 0.4, shape) for name, shape in describe(model, VOCAB).shapes.items()}


IDS = np.random.default_rng(1).integers(0, 500, (3, 12)).astype(np.int32)


@pytest.mark.parametrize("name", MODERN)
def test_a_modern_models_logits_are_the_plain_references_with_a_cache_and_without(name):
    model, arrays = modern(name)
    expected = plain_logits(arrays, model, IDS)
    reader = TorchReader(model, VOCAB, device="cpu")
    state = reader.load(arrays)
    found, cache = reader.prefill(state, IDS[:, :5])
    np.testing.assert_allclose(found, expected[:, 4], atol=1e-9)
    for place, end in [(5, 6), (6, 9), (9, 12)]:
        found, cache = reader.decode(state, IDS[:, place:end], place, cache)
        np.testing.assert_allclose(found, expected[:, end - 1], atol=1e-9)
    starts = np.array([7, 2, 10], dtype=np.int32)  # each row at a position of its own
    found, _ = reader.decode(state, IDS[np.arange(3), starts][:, None], starts, cache)
    np.testing.assert_allclose(found, expected[np.arange(3), starts], atol=1e-9)
    logs, hits = reader.token_logprobs(state, IDS)
    normal = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    np.testing.assert_allclose(logs, np.take_along_axis(normal[:, :-1], IDS[:, 1:, None], 2)[..., 0], atol=1e-9)
    np.testing.assert_array_equal(hits, expected[:, :-1].argmax(-1) == IDS[:, 1:])


@pytest.mark.parametrize("name", MODERN)
def test_a_modern_models_loss_has_gradients_for_every_parameter(name):
    """Each as steep in its own direction as the plain reference's loss."""
    model, arrays = modern(name)
    gpt, layout = GPT(model, VOCAB, torch.float64).double(), OwnLayout(describe(model, VOCAB))
    values = layout.values(arrays)
    with torch.no_grad():
        for key, parameter in gpt.named_parameters():
            parameter.copy_(values(key, tuple(slice(size) for size in parameter.shape)))
    ids = torch.from_numpy(IDS)
    weights = torch.full((3, 11), 1 / 33, dtype=torch.float64)
    loss, _ = Objective(gpt, VOCAB)(ids[:, :-1], ids[:, 1:], weights, None)
    loss.backward()
    gradients = layout.arrays({key: parameter.grad for key, parameter in gpt.named_parameters()})
    assert gradients.keys() == arrays.keys()

    def plain_loss(arrays):
        logits = plain_logits(arrays, model, IDS[:, :-1])
        picked = np.take_along_axis(logits, IDS[:, 1:, None], 2)[..., 0]
        return (np.log(np.exp(logits).sum(-1)) - picked).mean()

    assert plain_loss(arrays) == pytest.approx(loss.item(), rel=1e-12)
    for key, gradient in gradients.items():
        direction = gradient / np.linalg.norm(gradient)
        ahead, behind = (plain_loss({**arrays, key: arrays[key] + step * direction}) for step in (1e-5, -1e-5))
        assert (ahead - behind) / 2e-5 == pytest.approx(np.linalg.norm(gradient), rel=1e-5), key


@pytest.mark.parametrize("name", MODERN)
def test_a_modern_models_tensors_lead_to_the_descriptions_arrays_and_back(name):
    model, arrays = modern(name)
    engine = TorchEngine(Recipe(engine="torch", model=model, training={"batch_tokens": 12}), VOCAB, device="cpu")
    found = engine.gather(engine.load(PlainState(arrays))).parameters
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


# How it begins


def recipe(init="gpt2", seed=1337, **model):
    sizes = {"layers": 8, "heads": 4, "width": 64, "context": 32, "tied_head": False, "init": init, **model}
    return Recipe(engine="torch", model=sizes, training={"batch_tokens": 32, "seed": seed})


@functools.cache
def begun(init="gpt2", seed=1337, precision="fp32", implementation="raygpt"):
    """The parameters before the first step."""
    settings = recipe(init, seed, implementation=implementation)
    engine = TorchEngine(settings, VOCAB, precision=precision, device="cpu")
    return engine.gather(engine.start()).parameters


def by_numpy(name, layer, init, seed=1337):
    """One layer's array, by the same function in NumPy."""
    description = describe(recipe(init).model, VOCAB)
    parameter = description.by_name[name]
    index = np.arange(np.prod(description.own_shape(parameter)), dtype=np.int32)
    key = random_numbers.keys(parameter, seed, 8)[layer]
    return random_numbers.draw(parameter.initial, index, key, np).reshape(description.own_shape(parameter))


NAMES = [(f"blocks.{part}.kernel", layer) for part in ("query", "key", "out", "up", "down") for layer in (0, 7)]


@pytest.mark.parametrize(("name", "layer"), [*NAMES, ("head", 0)])
def test_uniform_initial_values_are_numpys_bit_for_bit(name, layer):
    found = begun("xavier")[name]
    np.testing.assert_array_equal(found if name == "head" else found[layer], by_numpy(name, layer, "xavier"))


@pytest.mark.parametrize(("name", "layer"), [*NAMES, ("tokens", 0), ("positions", 0), ("head", 0)])
def test_normal_initial_values_are_numpys_to_a_millionth(name, layer):
    found = begun()[name]
    right = by_numpy(name, layer, "gpt2")
    np.testing.assert_allclose(found[layer] if found.ndim > right.ndim else found, right, atol=2e-8, rtol=1e-6)


@pytest.mark.parametrize("other", [{"precision": "fp64"}, {"precision": "bf16"}, {"implementation": "huggingface"}])
def test_initial_values_are_the_same_in_every_precision_and_implementation(other):
    for init in ("gpt2", "xavier"):
        for name, value in begun(init).items():
            np.testing.assert_array_equal(begun(init, **other)[name], value, err_msg=name)


def test_arrays_that_do_not_fit_are_refused():
    engine = TorchEngine(recipe(), VOCAB, device="cpu")
    short = {**begun(), "blocks.key.bias": begun()["blocks.key.bias"][:, :3]}
    with pytest.raises(ValueError, match=r"blocks\.key\.bias is \[8, 3, 16\], and should be \[8, 4, 16\]"):
        engine.load(PlainState(short))
    with pytest.raises(KeyError, match="head"):
        engine.load(PlainState({name: array for name, array in begun().items() if name != "head"}))


def test_what_pads_the_vocabulary_begins_at_zero():
    state = TorchEngine(recipe(), VOCAB, device="cpu").start()
    for name in ("tokens.weight", "head.weight"):
        table = state.parameters[name]
        assert table.shape == (512, 64)
        assert not table[VOCAB:].any()
        assert table[:VOCAB].any(1).all()


def test_a_table_of_more_elements_than_int32_counts_begins_with_draws():
    vocab, width = 300_000, 8192
    description = describe(Model(layers=1, heads=8, width=width, context=8, tied_head=True), vocab)
    rows = slice(vocab - 8, vocab + 8)
    values = OwnLayout(description).initial_values(1, torch.device("cpu"))("tokens.weight", (rows, slice(0, width)))
    assert values[:8].std() == pytest.approx(0.02, rel=0.02)
    assert not values[8:].any()


def test_gpt2s_initialisation_is_normal_with_smaller_residual_projections():
    for name, deviation in [
        ("tokens", 0.02),
        ("positions", 0.02),
        ("head", 0.02),
        ("blocks.query.kernel", 0.02),
        ("blocks.key.kernel", 0.02),
        ("blocks.value.kernel", 0.02),
        ("blocks.up.kernel", 0.02),
        ("blocks.down.kernel", 0.02 / 4),  # sqrt(2 · 8)
        ("blocks.out.kernel", 0.02 / 4),
    ]:
        values = begun()[name]
        assert values.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * values.size))
        assert abs(values.mean()) < 6 * deviation / np.sqrt(values.size)
        assert np.abs(values).max() > 3 * deviation  # a normal has tails


def test_xaviers_limits_are_those_of_the_matrices_that_the_tutorial_has():
    for name, fans in [
        ("blocks.query.kernel", 64 + 64),
        ("blocks.value.kernel", 64 + 64),
        ("blocks.out.kernel", 64 + 64),
        ("blocks.up.kernel", 64 + 256),
        ("blocks.down.kernel", 64 + 256),
        ("head", VOCAB + 64),
    ]:
        values, limit = begun("xavier")[name], np.sqrt(6 / fans)
        assert 0.99 * limit < np.abs(values).max() <= limit
        assert values.std() == pytest.approx(limit / np.sqrt(3), rel=0.03)  # uniform


def test_beside_xaviers_kernels_embeddings_are_as_flax_makes_them():
    for name in ("tokens", "positions"):
        values = begun("xavier")[name]
        assert values.std() == pytest.approx(64**-0.5, rel=4 / np.sqrt(2 * values.size))
        assert np.abs(values).max() > 3 * 64**-0.5  # normal: a uniform one ends at 1.7


def test_each_layer_name_and_seed_has_its_own_and_vectors_begin_at_one_or_zero():
    ups, other = begun()["blocks.up.kernel"], begun(seed=1)["blocks.up.kernel"]
    drawn = [*ups, *other, begun()["blocks.down.kernel"][0].T * 4]
    correlations = np.corrcoef([array.ravel() for array in drawn])
    assert np.abs(correlations - np.eye(len(drawn))).max() < 5 / np.sqrt(ups[0].size)
    assert (begun()["blocks.norm1.gain"] == 1).all()
    for name in ("norm.bias", "blocks.query.bias", "blocks.down.bias"):
        assert not begun("xavier")[name].any()
