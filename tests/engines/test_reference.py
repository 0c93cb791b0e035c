"""The plain NumPy forward pass computes what transformers' own classes do, all of it in float64."""

import numpy as np
import pytest
import torch
import transformers
from reference import hugging_face, logits
from torch.overrides import TorchFunctionMode

from raygpt.config import Model
from raygpt.interop import gpt2
from raygpt.models import describe

VOCAB, CONTEXT = 61, 32
IDS = np.random.default_rng(1).integers(0, VOCAB, (2, CONTEXT))
OURS = {"layers": 3, "heads": 4, "kv_heads": 2, "width": 48, "context": CONTEXT, "hidden": 80, "bias": False}
THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}
NAMES = {  # theirs, in a layer -> ours
    "self_attn.q_proj": "query.kernel",
    "self_attn.k_proj": "key.kernel",
    "self_attn.v_proj": "value.kernel",
    "self_attn.o_proj": "out.kernel",
    "self_attn.q_norm": "query_norm.gain",
    "self_attn.k_norm": "key_norm.gain",
    "input_layernorm": "norm1.gain",
    "post_attention_layernorm": "norm2.gain",
    "mlp.gate_proj": "gate.kernel",
    "mlp.up_proj": "up.kernel",
    "mlp.down_proj": "down.kernel",
    "mlp.fc1": "up.kernel",
    "mlp.fc2": "down.kernel",
}
TOP = {"model.embed_tokens": "tokens", "model.norm": "norm.gain", "lm_head": "head"}


HALF = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}


class InFloat64(TorchFunctionMode):
    """transformers computes norms, softmax and RoPE's angles in float32 in a model of any dtype; here it does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        double = {torch.float32: torch.float64}
        args = [double.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args]
        kwargs = {key: double.get(arg, arg) if key == "dtype" else arg for key, arg in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def computed(model):
    """Its logits, with large random weights, gains too."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        return model.double().eval()(torch.tensor(IDS)).logits.numpy()


def by_our_names(state, model):
    """The arrays of a state_dict of Llama, Qwen3 or NanoChat; their kernels are [out, in]."""
    layers, found = {}, {}
    for name, tensor in state.items():
        array, plain = tensor.double().numpy(), name.removesuffix(".weight")
        if plain in TOP:
            found[TOP[plain]] = array
        else:
            _, _, layer, part = plain.split(".", 3)
            layers.setdefault(f"blocks.{NAMES[part]}", {})[int(layer)] = array.T
    shapes = describe(model, VOCAB).shapes
    found |= {name: np.stack([of[n] for n in range(model.layers)]).reshape(shapes[name]) for name, of in layers.items()}
    return {name: found[name] for name in shapes}


@pytest.mark.parametrize(
    ("name", "keys", "settings"),
    [
        (
            "Llama",
            {"preset": "llama", "norm_epsilon": 1e-6, "rope_base": 500.0},
            {"rope_parameters": {"rope_theta": 500.0}},
        ),
        ("Llama", {"preset": "llama", "norm_epsilon": 1e-6, "tied_head": True}, {"tie_word_embeddings": True}),
        ("Qwen3", {"preset": "qwen3", "rope_base": 1e4, "head_size": 20}, {"head_dim": 20}),
        (
            "Qwen3",
            {"preset": "qwen3", "rope_share": 0.5},
            {"head_dim": 12, "rope_parameters": HALF},
        ),
        ("NanoChat", {"preset": "nanochat", "softcap": 2.0}, {"final_logit_softcapping": 2.0}),
    ],
)
def test_it_computes_what_transformers_classes_do(name, keys, settings):
    model = Model.model_validate({**OURS, **keys})
    with InFloat64():
        config = getattr(transformers, f"{name}Config")(**{**THEIRS, **settings})
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        expected = computed(made)
    parameters = by_our_names(made.state_dict(), model)
    if name == "NanoChat":  # its RoPE turns the other way: as ours does with the second half of each head negated
        for kernel in (parameters["blocks.query.kernel"], parameters["blocks.key.kernel"]):
            kernel[..., model.size_of_head // 2 :] *= -1
    np.testing.assert_allclose(logits(parameters, model, IDS), expected, rtol=0, atol=1e-9)
    assert np.abs(expected).max() > 1.5


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_transformers_gpt2_does(tied):
    model = Model(layers=3, heads=4, width=48, context=CONTEXT, tied_head=tied)
    made = hugging_face(3, 4, 48, CONTEXT, VOCAB, tied)
    with InFloat64():
        expected = computed(made)
    named = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    parameters = gpt2.from_hugging_face(named, describe(model, VOCAB))
    np.testing.assert_allclose(logits(parameters, model, IDS), expected, rtol=0, atol=1e-9)
