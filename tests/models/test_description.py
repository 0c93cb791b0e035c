"""A model described once: counts, FLOPs, roles, and how a mesh cuts it."""

import pytest

from raygpt.config import Model
from raygpt.models import describe

GPT2 = Model(preset="gpt2")


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_published_sizes_have_their_published_number_of_parameters(preset, count):
    assert describe(Model(preset=preset), 50257).count == count


def test_every_matrix_and_vector_of_a_small_model_is_counted():
    # vocab 5, context 3, width 2, 1 layer: tokens 10, positions 6, norms 3 × (2 + 2), qkv 12 + 6,
    # projection 4 + 2, mlp 16 + 8 and 16 + 2
    tiny = {"layers": 1, "heads": 1, "width": 2, "context": 3}
    assert describe(Model(**tiny), 5).count == 10 + 6 + 12 + 18 + 6 + 24 + 18
    assert describe(Model(**tiny, bias=False), 5).count == 10 + 6 + 6 + 12 + 4 + 16 + 16
    assert describe(Model(**tiny, tied_head=False), 5).count == 94 + 10


def test_hugging_face_counts_the_same_with_and_without_a_tied_head():
    transformers = pytest.importorskip("transformers")
    for tied in (True, False):
        model = Model(layers=2, heads=4, width=32, context=16, tied_head=tied)
        config = transformers.GPT2Config(
            vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied
        )
        assert describe(model, 100).count == transformers.GPT2LMHeadModel(config).num_parameters()


def test_flops_are_six_per_parameter_that_multiplies_and_attentions():
    tied, untied = (describe(GPT2.model_copy(update={"tied_head": tied}), 50257) for tied in (True, False))
    assert tied.flops_per_token == 6 * 124_439_808 + 12 * 12 * 768 * 1024
    assert untied.flops_per_token == tied.flops_per_token  # a table is only looked up


def test_every_parameter_has_axes_of_known_size_a_role_and_a_fan_in_if_it_multiplies():
    description = describe(Model(tied_head=False), 100)
    for parameter in description.parameters:
        assert len(description.shapes[parameter.name]) == len(parameter.axes)
        assert bool(parameter.fan_in) == (parameter.role in ("matrix", "head")), parameter.name
        assert set(parameter.fan_in) <= set(parameter.axes)
    roles = {parameter.name: parameter.role for parameter in description.parameters}
    assert {name for name, role in roles.items() if role == "embedding"} == {"tokens", "positions"}
    assert {name for name, role in roles.items() if role == "head"} == {"head"}
    assert {name.rpartition(".")[2] for name, role in roles.items() if role == "matrix"} == {"kernel"}


def test_a_tied_table_begins_and_is_trained_as_a_head():
    tied, own = (describe(Model(preset="qwen3", tied_head=is_tied), 1000).by_name for is_tied in (True, False))
    assert (tied["tokens"].role, tied["tokens"].initial.size) == ("head", 0.02)
    assert (own["tokens"].role, own["tokens"].initial.size, own["head"].role) == ("embedding", 1.0, "head")
    assert describe(Model(preset="qwen3", tied_head=True), 1000).token_tables == ["tokens"]


def test_without_biases_there_are_none():
    assert not [p.name for p in describe(Model(bias=False), 100).parameters if p.role == "bias"]


def test_tensor_cuts_whole_heads_hidden_units_and_tokens_and_fsdp_the_width_of_what_is_no_vector():
    description = describe(Model(tied_head=False), 100)
    cut = {parameter.name: parameter.mesh_axes for parameter in description.parameters}
    assert cut["tokens"] == cut["head"] == ("tensor", "fsdp")
    assert cut["positions"] == (None, "fsdp")
    assert cut["blocks.query.kernel"] == (None, "fsdp", "tensor", None)
    assert cut["blocks.value.bias"] == (None, "tensor", None)
    assert cut["blocks.out.kernel"] == (None, "tensor", None, "fsdp")
    assert cut["blocks.out.bias"] == cut["blocks.norm1.gain"] == (None, None)
    assert cut["blocks.up.bias"] == (None, "tensor")


def test_a_cache_has_keys_of_every_layer_row_head_and_position():
    assert describe(GPT2, 50257).cache_shape(3) == (12, 3, 12, 1024, 64)


def test_two_models_fit_each_other_if_their_arrays_have_the_same_shapes():
    shapes = [describe(Model(width=32, **changes), 50).shapes for changes in ({}, {"dropout": 0.1}, {"heads": 2})]
    assert shapes[0] == shapes[1] != shapes[2]
