"""Llama, Qwen3 and NanoChat in and out: transformers computes what we do, with a cache as well; the rest is refused."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import also
from safetensors.numpy import save_file

from raygpt.config import Model
from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Bytes
from raygpt.engines import engine_of
from raygpt.errors import RaygptError
from raygpt.inference.loaded import load, read
from raygpt.interop import decoder
from raygpt.interop.exporting import export
from raygpt.interop.families import family_of
from raygpt.interop.importing import import_run
from raygpt.interop.tokenizer_json import to_json
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.training import resume

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from reference import logits

pytestmark = pytest.mark.usefixtures("compiled_quickly")

VOCAB, CONTEXT, PROMPT = 257, 16, 5
IDS = np.random.default_rng(5).integers(0, VOCAB, (2, 9)).astype(np.int32)
SIZES = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, "precision": "fp32"}
LLAMA = {**SIZES, "preset": "llama", "kv_heads": 2, "hidden": 72}
QWEN3 = {**SIZES, "preset": "qwen3", "kv_heads": 2, "hidden": 72}
NANOCHAT = {**SIZES, "preset": "nanochat", "kv_heads": 2}


def random_parameters(model):
    """Large weights, gains and biases too: a wrong place shows."""
    random, shapes = np.random.default_rng(6), describe(model, VOCAB).shapes
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def saved(model, parameters, folder):
    """As `export` writes them, without a run."""
    family = family_of(model)
    save_file(family.exported(parameters, model, VOCAB), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.full_config(model, VOCAB, 256)))
    return family


def token_by_token(read_first, read_next, ids=IDS):
    """Logits [rows, time, vocab] of the prompt's last token and of every one behind it, each through the cache."""
    first, cache = read_first(ids[:, :PROMPT])
    found = [first]
    for place in range(PROMPT, ids.shape[1]):
        one, cache = read_next(ids[:, place : place + 1], place, cache)
        found.append(one)
    return np.stack(found, axis=1)


def by_transformers(folder):
    """All logits at once, and token by token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def forward(ids, _=None, cache=None):
        result = model(torch.tensor(ids).long(), past_key_values=cache, use_cache=True)
        return result.logits[:, -1].numpy(), result.past_key_values

    with torch.no_grad():
        return model(torch.tensor(IDS).long()).logits.numpy(), token_by_token(forward, forward)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (LLAMA, "Llama"),
        ({**LLAMA, "bias": True, "tied_head": True, "norm_gain": False, "head_size": 12, "rope_base": 50.0}, "Llama"),
        ({**LLAMA, "rope_share": 0.5}, "Llama"),
        (QWEN3, "Qwen3"),
        ({**QWEN3, "heads": 5, "kv_heads": 1, "head_size": 12, "rope_share": 0.4, "norm_gain": False}, "Qwen3"),
        (NANOCHAT, "NanoChat"),
        (
            {**NANOCHAT, "mlp": "gelu", "softcap": None, "head_size": 12, "rope_share": 0.5, "tied_head": True},
            "NanoChat",
        ),
        ({**SIZES, "norm_gain": False, "bias": False}, "GPT-2"),
    ],
)
def test_transformers_computes_what_an_exported_model_does(tmp_path, keys, name):
    model = Model.model_validate(keys)
    parameters = random_parameters(model)
    assert saved(model, parameters, tmp_path).name == name
    expected = logits(parameters, model, IDS)
    whole, cached = by_transformers(tmp_path)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(cached, expected[:, PROMPT - 1 :], rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 1


THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": None,
    "initializer_range": 0.3,
}


def theirs(folder, name, dtype=torch.float32, shard="1GB", **settings):
    """A random model of a class with the bytes tokenizer, saved by transformers."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**{**THEIRS, **settings})
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for gain in (parameter for parameter in made.parameters() if parameter.ndim == 1):
            gain.add_(0.3 * torch.randn_like(gain))
    folder.mkdir(exist_ok=True)
    made.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text(json.dumps(to_json(Bytes())))


def by_our_reader(run):
    loaded = load(run)
    reader, state = loaded.reader, loaded.state
    return token_by_token(lambda ids: reader.prefill(state, ids), lambda *args: reader.decode(state, *args))


@pytest.mark.parametrize(
    ("engine", "name", "saving", "settings"),
    [
        ("jax", "Llama", {}, {"rope_parameters": {"rope_theta": 100.0}, "rms_norm_eps": 1e-3}),
        ("torch", "Qwen3", {"dtype": torch.bfloat16, "shard": "20KB"}, {"head_dim": 12, "tie_word_embeddings": True}),
        ("torch", "NanoChat", {"shard": "20KB"}, {"final_logit_softcapping": 2.0, "vocab_size": 300}),
        *also(
            ("torch", "Llama", {"dtype": torch.bfloat16}, {"attention_bias": True, "mlp_bias": True}),
            ("jax", "Qwen3", {"dtype": torch.bfloat16, "shard": "20KB"}, {"head_dim": 12, "tie_word_embeddings": True}),
            ("jax", "NanoChat", {}, {"final_logit_softcapping": None, "hidden_act": "gelu_new"}),
        ),
    ],
)
def test_an_imported_model_computes_what_it_did_and_does_when_it_is_exported(tmp_path, engine, name, saving, settings):
    theirs(tmp_path / "theirs", name, **saving, **settings)
    assert (len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1) is ("shard" in saving)
    whole, cached = by_transformers(tmp_path / "theirs")
    run = import_run(str(tmp_path / "theirs"), str(tmp_path / "run"), engine)
    assert run.recipe.model.preset == name.lower()
    np.testing.assert_allclose(by_our_reader(run), cached[..., :VOCAB], rtol=0, atol=1e-4)
    export(read(run), str(tmp_path / "ours"))
    again, again_cached = by_transformers(tmp_path / "ours")
    np.testing.assert_allclose(again, whole[..., :VOCAB], rtol=0, atol=1e-4)
    np.testing.assert_allclose(again_cached, cached[..., :VOCAB], rtol=0, atol=1e-4)
    assert f"A {name}-style model of" in (tmp_path / "ours" / "README.md").read_text()


READ = "raygpt generate and raygpt eval read the run as it is"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {**NANOCHAT, "kv_heads": None, "value_embeddings": 1, "x0_mixing": True},
            f"model.value_embeddings 1, model.x0_mixing true: no class of transformers has them; {READ}",
        ),
        ({**LLAMA, "head_gates": True}, f"model.head_gates true: no class of transformers has it; {READ}"),
        ({**LLAMA, "x0_mixing": True}, f"model.x0_mixing true: no class of transformers has it; {READ}"),
        (
            {**QWEN3, "softcap": 15.0, "mlp": "relu2"},
            "model.mlp relu2, model.softcap 15.0: no class of transformers has this together with the model's other "
            f"keys, not even the nearest, Qwen3; {READ}",
        ),
        (
            {**SIZES, "kv_heads": 1},
            "model.kv_heads 1: no class of transformers has this together with the model's other keys, not even the "
            f"nearest, GPT-2; {READ}",
        ),
    ],
)
def test_what_no_class_has_is_refused_by_the_names_of_its_keys(keys, message):
    with pytest.raises(RaygptError) as caught:
        family_of(Model.model_validate(keys))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["modern-124m", "modern-350m", "modern-1.5b"])
def test_a_modern_recipe_is_a_shape_that_transformers_loads(name):
    assert family_of(load_recipe(name).model).name == "NanoChat"


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "Llama",
            {"rope_parameters": {**SCALED, "rope_theta": 5e5}},
            "its RoPE is {'rope_type': 'llama3', 'factor': 8.0",
        ),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "its RoPE is {'type': 'linear', 'factor': 2.0}"),
        ("Llama", {"rope_parameters": [1]}, "its RoPE is {'rope_parameters': [1]}, and raygpt's is not scaled"),
        ("Llama", {"rope_parameters": {"rope_theta": "1e4"}}, "its RoPE is {'rope_theta': '1e4'}, and raygpt's is not"),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 100.0}}},
            "its RoPE is {'full_attention': {'rope_theta': 100.0}}, and raygpt's is not scaled; name another model",
        ),
        (
            "Llama",
            {"attention_bias": True},
            "{'attention_bias': True, 'mlp_bias': False}, and raygpt's layers all have",
        ),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act is gelu, and raygpt's Llama has silu; name another model"),
        (
            "Llama",
            {"quantization_config": {"bits": 4}},
            'quantization_config is {"bits": 4}, and raygpt\'s Llama has null',
        ),
        ("Llama", {"num_hidden_layers": 1}, "the weights are not those of the config: model.layers.1.input_layernorm"),
        ("Llama", {"num_hidden_layers": 3}, "the weights are not those of the config: 'model.layers.2.input_layernorm"),
        (
            "Llama",
            {"intermediate_size": 80},
            "mlp.gate_proj.weight is [72, 32], and should be [80, 32]; copy the model",
        ),
        ("Llama", {"hidden_size": None}, "config.json has no hidden_size; copy it again"),
        ("Qwen3", {"use_sliding_window": True}, "use_sliding_window is true, and raygpt's Qwen3 has false"),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("Qwen3", {"attention_bias": True}, "attention_bias is true, and raygpt's Qwen3 has false"),
        ("NanoChat", {"hidden_act": "silu"}, "hidden_act is silu, and raygpt's NanoChat has relu2"),
    ],
)
def test_a_config_that_we_do_not_compute_is_refused_in_one_line(tmp_path, name, changes, message):
    theirs(tmp_path / "theirs", name)
    path = tmp_path / "theirs" / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key not in changes or value is not None})
    )
    with pytest.raises(RaygptError) as caught:
        import_run(str(tmp_path / "theirs"), str(tmp_path / "run"))
    assert message in str(caught.value)
    assert str(caught.value).startswith((f"{tmp_path}", "the weights"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "base", "share"),
    [
        ({}, 1e4, 1.0),
        ({"rope_theta": 100}, 100.0, 1.0),
        ({"rope_theta": None, "rope_parameters": None}, 1e4, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, 1e4, 1.0),
        ({"rope_theta": 100.0, "rope_parameters": {"rope_type": None, "rope_theta": None}}, 100.0, 1.0),
        (
            {
                "rope_parameters": {
                    "type": "proportional",
                    "rope_theta": 50,
                    "partial_rotary_factor": 0.5,
                    "factor": 1.0,
                }
            },
            50.0,
            0.5,
        ),
    ],
)
def test_what_a_config_does_not_have_or_has_as_null_of_rope_is_transformers_default(settings, base, share):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 72}
    keys = decoder.keys({**sizes, "max_position_embeddings": CONTEXT, **settings})
    assert (keys["rope_base"], keys["rope_share"]) == (base, share)


@pytest.mark.parametrize("keys", [LLAMA, NANOCHAT, SIZES])
def test_a_model_in_fp64_is_exported_in_fp32(keys):
    model = Model.model_validate({**keys, "precision": "fp64"})
    parameters = {name: array.astype(np.float64) for name, array in random_parameters(model).items()}
    family = family_of(model)
    assert {array.dtype for array in family.exported(parameters, model, VOCAB).values()} == {np.dtype(np.float32)}
    config = family.full_config(model, VOCAB, 256)
    assert config["torch_dtype"] == "float32"


def test_configs_before_transformers_5_are_read(tmp_path):
    theirs(tmp_path / "theirs", "Llama", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    expected, _ = by_transformers(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["head_dim"]
    path.write_text(json.dumps({**config, "rope_theta": 100.0, "rope_scaling": None}))
    run = import_run(str(tmp_path / "theirs"), str(tmp_path / "run"))
    model = run.recipe.model
    assert (model.rope_base, model.head_size, model.kv_heads, model.hidden) == (100.0, None, 2, 72)
    np.testing.assert_allclose(logits(read(run).parameters, model, IDS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ["torch", *also("jax")])
def test_training_goes_on_from_an_imported_model(tmp_path, engine):
    theirs(tmp_path / "theirs", "Qwen3", head_dim=12, tie_word_embeddings=True)
    run = import_run(str(tmp_path / "theirs"), str(tmp_path / "run"), engine)
    changes = ["run.start_from=run", "run.name=further", "training.steps=3", "training.batch_tokens=64"]
    recipe = load_recipe(f"{run.folder}/recipe.yaml", [*changes, "schedule.warmup_steps=0", "model.precision=fp32"])
    checkpoint = resume.fork(recipe, str(tmp_path), tokenizers.fingerprint(Bytes()))
    computes = engine_of(engine).Engine(recipe, VOCAB)
    state = computes.restore(checkpoint.folder)
    windows = np.random.default_rng(7).integers(0, VOCAB, (4, CONTEXT + 1)).astype(np.int32)
    losses = []
    for _ in range(3):
        state, metrics = computes.step(state, computes.put(windows))
        losses.append(computes.read(metrics)["loss"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    expected = model(torch.tensor(windows).long(), labels=torch.tensor(windows).long()).loss.item()
    assert losses[0] == pytest.approx(expected, abs=1e-4)
    assert losses[2] < losses[1] < losses[0]


def test_a_model_with_rope_may_see_fewer_tokens_than_it_could(tmp_path):
    theirs(tmp_path / "theirs", "Llama")
    with pytest.raises(RaygptError, match="--context: this model was made for 16 tokens; write that or less"):
        import_run(str(tmp_path / "theirs"), str(tmp_path / "run"), context=17)
    run = import_run(str(tmp_path / "theirs"), str(tmp_path / "run"), context=12)
    assert (run.recipe.model.context, run.recipe.training.batch_tokens) == (12, 12)
    whole, _ = by_transformers(tmp_path / "theirs")
    np.testing.assert_allclose(logits(read(run).parameters, run.recipe.model, IDS), whole, rtol=0, atol=1e-4)


def test_a_model_that_cannot_be_exported_leaves_no_files(tmp_path):
    found = SimpleNamespace(model=Model.model_validate({**LLAMA, "x0_mixing": True}), tokenizer=Bytes())
    with pytest.raises(RaygptError, match=r"model\.x0_mixing true: no class of transformers has it"):
        export(found, str(tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_bf16_is_read_where_jax_is_not_loaded(tmp_path):
    theirs(tmp_path / "theirs", "Llama", dtype=torch.bfloat16)
    code = (
        "import sys; from pathlib import Path; from raygpt.interop.importing import _arrays; "
        "found = _arrays(Path(sys.argv[1])); assert 'jax' not in sys.modules; "
        "print({str(array.dtype) for array in found.values()}, found['model.norm.weight'][0])"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "theirs" / "model.safetensors")]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    right = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").model.norm.weight[0].item()
    assert told == f"{{'float32'}} {right}\n"
