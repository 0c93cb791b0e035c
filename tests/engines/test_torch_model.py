"""The PyTorch model against Hugging Face's GPT-2: same weights, same logits, same gradients; and how it begins."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers")

from reference import hugging_face  # noqa: E402

from raygpt.config import Model, Recipe, Training  # noqa: E402
from raygpt.engines.torch.huggingface import HuggingFaceGPT  # noqa: E402
from raygpt.engines.torch.initial import initial  # noqa: E402
from raygpt.engines.torch.loss import Objective  # noqa: E402
from raygpt.engines.torch.model import GPT, padded_vocab  # noqa: E402
from raygpt.engines.torch.names import from_hugging_face, hugging_face_name, to_hugging_face  # noqa: E402

SHAPES = [  # layers, heads, width, context, vocab
    (1, 1, 16, 8, 128),  # a vocabulary that needs no padding
    (3, 2, 48, 17, 257),
]
IMPLEMENTATIONS = [GPT, HuggingFaceGPT]


def ours(implementation, reference, layers, heads, width, context, vocab, tied):
    model = Model(layers=layers, heads=heads, width=width, context=context, tied_head=tied)
    gpt = implementation(model, vocab, torch.float32)
    weights = reference.state_dict()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(from_hugging_face(name, weights[hugging_face_name(name)], vocab, heads))
    return gpt


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_equal_hugging_faces(shape, tied, implementation):
    reference = hugging_face(*shape, tied)
    gpt = ours(implementation, reference, *shape, tied)
    _, heads, _, context, vocab = shape
    windows = torch.from_numpy(np.random.default_rng(1).integers(0, vocab, (3, context + 1)))
    x, y = windows[:, :-1], windows[:, 1:]
    logits = reference(x).logits
    torch.testing.assert_close((gpt(x) @ gpt.table.T)[..., :vocab], logits, atol=1e-4, rtol=1e-4)
    assert gpt.table.shape[0] == padded_vocab(vocab)

    value, losses = Objective(gpt, vocab)(x, y, torch.full((3,), 1 / (3 * context)), None)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    torch.testing.assert_close(losses, expected.sum(1))
    value.backward()
    expected.mean().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert {hugging_face_name(name) for name, _ in gpt.named_parameters()} == theirs.keys()
    for name, parameter in gpt.named_parameters():
        right = theirs[hugging_face_name(name)]
        mine = to_hugging_face(name, parameter.grad, vocab, heads)
        torch.testing.assert_close(mine, right, atol=1e-4 * max(1, float(right.abs().max())), rtol=1e-4, msg=name)


def test_names_lead_to_hugging_face_and_back():
    reference = hugging_face(2, 4, 64, 32, 100, tied=False)
    gpt = ours(GPT, reference, 2, 4, 64, 32, 100, tied=False)
    parameters = dict(gpt.named_parameters())
    named = {hugging_face_name(name): to_hugging_face(name, value, 100, 4) for name, value in parameters.items()}
    assert named.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(named[name], value, rtol=0, atol=0)


def test_without_biases_there_are_none_and_the_parameters_are_as_many_as_the_recipe_says():
    for bias, tied in [(True, True), (False, False)]:
        model = Model(layers=2, heads=2, width=16, context=8, bias=bias, tied_head=tied)
        gpt = GPT(model, 128, torch.float32)
        assert sum(parameter.numel() for parameter in gpt.parameters()) == model.parameters(128)
        assert any("bias" in name for name, _ in gpt.named_parameters()) == bias


# How it begins

RECIPES = {
    init: Recipe(
        engine="torch",
        model=Model(layers=8, heads=4, width=64, context=32, tied_head=False, init=init),
        training={"batch_tokens": 32},
    )
    for init in ("gpt2", "xavier")
}


def draw(init, name):
    return initial(name, RECIPES[init], 500).numpy()


def test_gpt2s_initialisation_is_normal_with_smaller_residual_projections():
    for name, deviation in [
        ("transformer.wte.weight", 0.02),
        ("transformer.wpe.weight", 0.02),
        ("lm_head.weight", 0.02),
        ("transformer.h.0.attn.c_attn.weight", 0.02),
        ("transformer.h.7.mlp.c_fc.weight", 0.02),
        ("transformer.h.7.mlp.c_proj.weight", 0.02 / 4),  # sqrt(2 · 8)
        ("transformer.h.3.attn.c_proj.weight", 0.02 / 4),
    ]:
        values = draw("gpt2", name)
        assert values.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * values.size))
        assert abs(values.mean()) < 6 * deviation / np.sqrt(values.size)
        assert np.abs(values).max() > 3 * deviation  # a normal has tails


def test_xaviers_limits_are_those_of_the_matrices_that_the_tutorial_has():
    for name, fans in [
        ("transformer.h.0.attn.c_attn.weight", 64 + 64),  # Q, K and V are each a matrix from width to width
        ("transformer.h.0.attn.c_proj.weight", 64 + 64),
        ("transformer.h.0.mlp.c_fc.weight", 64 + 256),
        ("transformer.h.0.mlp.c_proj.weight", 64 + 256),
        ("lm_head.weight", 512 + 64),  # with the padding, as the JAX engine has it
    ]:
        values, limit = draw("xavier", name), np.sqrt(6 / fans)
        assert 0.99 * limit < np.abs(values).max() <= limit
        assert values.std() == pytest.approx(limit / np.sqrt(3), rel=0.03)  # uniform


def test_beside_xaviers_kernels_embeddings_are_as_flax_makes_them():
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        values = draw("xavier", name)
        assert values.std() == pytest.approx(64**-0.5, rel=4 / np.sqrt(2 * values.size))
        assert np.abs(values).max() > 3 * 64**-0.5  # normal: a uniform one ends at 1.7


def test_each_layer_and_each_seed_has_its_own_and_vectors_begin_at_one_or_zero():
    name = "transformer.h.{}.mlp.c_fc.weight"
    first, second = draw("gpt2", name.format(0)), draw("gpt2", name.format(1))
    other = initial(name.format(0), RECIPES["gpt2"].model_copy(update={"training": Training(seed=1)}), 500)
    assert min(np.abs(first - second).max(), np.abs(first - other.numpy()).max()) > 0.01
    assert (draw("gpt2", "transformer.h.0.ln_1.weight") == 1).all()
    for name in ("transformer.ln_f.bias", "transformer.h.0.attn.c_attn.bias", "transformer.h.0.mlp.c_proj.bias"):
        assert not draw("xavier", name).any()
