"""The JAX model against Hugging Face's GPT-2: same weights, same logits, same gradients."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import also

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers")

import jax.numpy as jnp  # noqa: E402
from reference import hugging_face  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax.attention import xla  # noqa: E402
from raygpt.engines.jax.loss import cross_entropy  # noqa: E402
from raygpt.engines.jax.model import GPT, LayerCompilation  # noqa: E402
from raygpt.engines.jax.parameters import from_plain, to_plain  # noqa: E402
from raygpt.engines.padding import padded_vocab  # noqa: E402
from raygpt.interop.gpt2 import from_hugging_face, to_hugging_face  # noqa: E402
from raygpt.models import describe  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SHAPES = [  # layers, heads, width, context, vocab
    (1, 1, 16, 8, 128),  # a vocabulary that needs no padding
    (2, 4, 64, 32, 100),
    (3, 2, 48, 17, 257),
]


def ours(reference, layers, heads, width, context, vocab, tied):
    """The forward pass, its description, and the reference's weights as its parameters."""
    model = Model(layers=layers, heads=heads, width=width, context=context, tied_head=tied)
    description = describe(model, vocab)
    arrays = {name: value.detach().numpy() for name, value in reference.state_dict().items()}
    parameters = from_plain(from_hugging_face(arrays, description), description, np.float32)
    return GPT(model, jnp.float32, xla), description, jax.tree.map(jnp.asarray, parameters)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("shape", [SHAPES[0], *also(*[(shape,) for shape in SHAPES[1:]])])
def test_logits_equal_hugging_faces(shape, scan, tied):
    reference = hugging_face(*shape, tied)
    gpt, description, parameters = ours(reference, *shape, tied)
    *_, context, vocab = shape
    ids = np.random.default_rng(0).integers(0, vocab, (3, context))
    gpt = replace(gpt, compilation=LayerCompilation(scanned=scan))
    logits = gpt(parameters, jnp.asarray(ids)) @ parameters[description.output_table].T
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()
    assert logits.shape == (3, context, padded_vocab(vocab))
    np.testing.assert_allclose(logits[..., :vocab], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [2, *also(1, "all")])
@pytest.mark.parametrize("shape", [SHAPES[0], *also(*[(shape,) for shape in SHAPES[1:]])])
def test_loss_and_gradients_equal_hugging_faces(shape, chunks, tied):
    reference = hugging_face(*shape, tied)
    gpt, description, parameters = ours(reference, *shape, tied)
    *_, context, vocab = shape
    windows = np.random.default_rng(1).integers(0, vocab, (3, context + 1))
    x, y = windows[:, :-1], windows[:, 1:]
    cut = context if chunks == "all" or context % chunks else chunks

    def loss(parameters):
        weights, table = jnp.full(y.shape, 1 / y.size), parameters[description.output_table]
        return cross_entropy(gpt(parameters, jnp.asarray(x)), table, jnp.asarray(y), weights, vocab, cut)[0]

    value, gradients = jax.value_and_grad(loss)(parameters)
    logits = reference(torch.from_numpy(x)).logits
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), torch.from_numpy(y).reshape(-1))
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    named = to_hugging_face(to_plain(gradients, description), description)
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    assert named.keys() == theirs.keys()
    for name, gradient in theirs.items():
        np.testing.assert_allclose(named[name], gradient, atol=1e-4 * max(1, np.abs(gradient).max()), err_msg=name)
    padding = gradients["tokens"][vocab:]
    assert not np.any(padding), "ids that only pad the table are never predicted"


def test_names_lead_to_hugging_face_and_back():
    reference = hugging_face(2, 4, 64, 32, 100, tied=False)
    _, description, parameters = ours(reference, 2, 4, 64, 32, 100, tied=False)
    named = to_hugging_face(to_plain(parameters, description), description)
    for name, value in reference.state_dict().items():
        np.testing.assert_array_equal(named[name], value.numpy(), err_msg=name)
