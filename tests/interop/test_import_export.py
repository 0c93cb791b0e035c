"""Hugging Face's GPT-2 in and out: any shape, safetensors only, and what cannot be taken is said in one line."""

import json
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from raygpt.corpus import tokenizers
from raygpt.corpus.tokenizers import Bytes
from raygpt.engines import engine_of, make_reader, read_plain_state
from raygpt.errors import RaygptError
from raygpt.inference.loaded import load, read
from raygpt.interop import gpt2
from raygpt.interop.exporting import export
from raygpt.interop.importing import import_run
from raygpt.interop.tokenizer_json import to_json
from raygpt.recipes import load_recipe
from raygpt.training import resume

VOCAB = 257


def theirs(folder, vocab=VOCAB, dtype=torch.float32, **settings):
    """A random model with the bytes tokenizer, saved by transformers."""
    torch.manual_seed(4)
    sizes = {"vocab_size": vocab, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**sizes, "bos_token_id": 256, "eos_token_id": 256, **settings})
    )
    made = made.to(dtype).eval()
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(to_json(Bytes())))
    return made


IDS = np.random.default_rng(5).integers(0, 256, (2, 9)).astype(np.int32)


def logits(model):
    with torch.no_grad():
        return model.float()(torch.tensor(IDS).long()).logits[:, -1].numpy()


@pytest.mark.parametrize(
    ("engine", "settings", "vocab"),
    [
        ("torch", {}, VOCAB),
        ("torch", {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}, VOCAB),
        ("torch", {}, 300),  # more rows than tokens, as padded models have
        ("jax", {}, VOCAB),
    ],
)
def test_an_imported_model_computes_what_it_did(tmp_path, engine, settings, vocab):
    expected = logits(theirs(tmp_path, vocab, **settings))[:, :VOCAB]
    run = import_run(str(tmp_path), str(tmp_path / "run"), engine)
    loaded = load(run)
    found, _ = loaded.reader.prefill(loaded.state, IDS)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (loaded.checkpoint.step, run.tokenizer.vocab) == (0, VOCAB)


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_training_starts_from_an_imported_run_in_either_engine(tmp_path, engine):
    made = theirs(tmp_path)
    run = import_run(str(tmp_path), str(tmp_path / "run"), "torch")
    changes = {"model": {"layers": 2, "heads": 2, "width": 32, "context": 16}, "training.batch_tokens": 128}
    recipe = load_recipe("gpt2-tiny", {"engine": engine, "run.start_from": run.folder, **changes})
    checkpoint = resume.fork(recipe, str(tmp_path), tokenizers.fingerprint(Bytes()))
    assert (checkpoint.step, checkpoint.folder) == (0, run.pick().folder)
    written = read_plain_state("torch", checkpoint.folder, recipe.model, VOCAB)
    computes = engine_of(engine).Engine(recipe, VOCAB)
    state = computes.restore(checkpoint.folder) if engine == "torch" else computes.load(written)  # as the loop does it
    again = computes.gather(state)
    right = made.state_dict()["transformer.h.1.mlp.c_fc.weight"].numpy()
    np.testing.assert_array_equal(again.parameters["blocks.up.kernel"][1], right)
    assert (again.step, np.abs(again.slots["means"]["blocks.up.kernel"]).max()) == (0, 0)
    with pytest.raises(RaygptError, match=r"another model \(model.layers: 2 → 3, its tokenizer\)"):
        resume.fork(load_recipe("gpt2-tiny", {"run.start_from": run.folder, **changes, "model.layers": 3}), "", "x")


def test_weights_of_older_files_in_parts_and_in_bf16_are_read(tmp_path):
    made = theirs(tmp_path, dtype=torch.bfloat16)
    expected = logits(made)
    arrays = {name.removeprefix("transformer."): t.float().numpy() for name, t in made.state_dict().items()}
    first = import_run(str(tmp_path), str(tmp_path / "bf16"), "torch")
    (tmp_path / "model.safetensors").unlink()
    arrays["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)  # a mask, which old files hold
    names = sorted(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: np.ascontiguousarray(arrays[name]) for name in mine}, tmp_path / file)
    where = {name: file for file, mine in parts.items() for name in mine}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    second = import_run(str(tmp_path), str(tmp_path / "parts"), "torch")
    for run in (first, second):
        loaded = load(run)
        np.testing.assert_allclose(loaded.reader.prefill(loaded.state, IDS)[0], expected, atol=1e-4)


def test_gpt2s_own_size_and_tokenizer_are_known_by_name(tmp_path):
    from raygpt.corpus.tokenizers import Gpt2
    from raygpt.interop.importing import _recipe

    sizes = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "n_positions": 1024}
    recipe = _recipe(gpt2.FAMILY.keys(sizes), Gpt2.from_files(), str(tmp_path / "run"), "jax")
    assert (recipe.model.preset, recipe.data.tokenizer) == ("gpt2-medium", "gpt2")


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_array(folder, name, shape):
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: np.zeros(shape, np.float32)}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json; it is no model of transformers"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (
            lambda f: change(f, model_type="bert"),
            "of type bert, which raygpt does not have; name one of gpt2, llama, qwen3",
        ),
        (
            lambda f: change(f, activation_function="relu"),
            "activation_function is relu, and raygpt's GPT-2 has gelu_new",
        ),
        (lambda f: change(f, n_inner=100), "n_inner is 100"),
        (
            lambda f: change(f, n_layer=3),
            "the weights are not those of the config: 'transformer.h.2.attn.c_attn.weight'",
        ),
        (
            lambda f: change(f, n_layer=1),
            "not those of the config: transformer.h.1.attn.c_attn.bias is not among them; copy the model again",
        ),
        (
            lambda f: change(f, n_embd=48),
            r"not those of the config: transformer.wte.weight is \[257, 32\], and should be \[257, 48\]; copy",
        ),
        (
            lambda f: change_array(f, "transformer.h.1.attn.c_attn.weight", (32, 99)),
            r"transformer.h.1.attn.c_attn.weight is \[32, 99\], and should be \[32, 96\]; copy the model again",
        ),
        (
            lambda f: change_array(f, "transformer.h.0.attn.c_proj.weight", (30, 32)),
            r"transformer.h.0.attn.c_proj.weight is \[30, 32\], and should be \[32, 32\]; copy the model again",
        ),
        (
            lambda f: change_array(f, "transformer.h.0.ln_1.bias", (1, 32)),
            r"transformer.h.0.ln_1.bias is \[1, 32\], and should be \[32\]; copy the model again",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json; save its tokenizer there"),
        (
            lambda f: (f / "tokenizer.json").write_text('{"model": 1}'),
            "tokenizer.json is no tokenizer that can be read",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk" * 9), "model.safetensors cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; name a folder"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "as a pickle .pytorch_model.bin., which can run any code and is not read; make safetensors of it",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path, spoil, message):
    (tmp_path / "model").mkdir()
    theirs(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(RaygptError, match=message) as caught:
        import_run(str(tmp_path / "model"), str(tmp_path / "run"), "torch")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints" / "step-00000000" / "checkpoint.json").exists()


def test_a_run_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("mine")
    with pytest.raises(RaygptError, match="is not empty; name a new folder for the run"):
        import_run("anything", str(tmp_path / "run"))


def test_a_name_on_the_hub_needs_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RaygptError, match=r"needs the extra hf: pip install 'raygpt\[hf\]'"):
        import_run("openai-community/gpt2", str(tmp_path / "run"))
    with pytest.raises(RaygptError, match="there is no such folder; name one that holds"):
        import_run("./models/gpt2", str(tmp_path / "run"))


@pytest.mark.parametrize(("bias", "tied"), [(False, True), (False, False)])
def test_models_that_transformers_has_not_are_exported_with_equal_logits(tmp_path, bias, tied):
    sizes = {"layers": 2, "heads": 2, "width": 32, "context": 16, "bias": bias, "tied_head": tied}
    recipe = load_recipe("gpt2-tiny", {"engine": "torch", "model": sizes, "training.batch_tokens": 128})
    engine = engine_of("torch").Engine(recipe, VOCAB)
    parameters = engine.gather(engine.start()).parameters
    random = np.random.default_rng(6)
    parameters = {name: random.normal(0, 0.2, array.shape).astype(np.float32) for name, array in parameters.items()}
    family = gpt2.FAMILY
    save_file(family.exported(parameters, recipe.model, VOCAB), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(family.full_config(recipe.model, VOCAB, 256)))
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    reader = make_reader("torch", recipe.model, VOCAB)
    found, _ = reader.prefill(reader.load(parameters), IDS)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_every_tokenizer_is_opened_by_transformers(tmp_path):
    from raygpt.corpus.tokenizers import Bpe, Char
    from raygpt.interop.exporting import _tokenizer_config

    text = "Ein Bär, 12 Bäume\n\tund… “Zitate” 👋"
    for number, ours in enumerate((Bytes(), Char(text), Bpe.train(iter([text] * 3), 300))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(to_json(ours)))
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(ours, 16)))
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        opened = transformers.AutoTokenizer.from_pretrained(folder)
        assert opened(text)["input_ids"] == ours.encode([text])[0].tolist()
        assert opened.decode(opened(text)["input_ids"]) == text
        assert opened.eos_token_id == ours.end_of_text


@pytest.mark.extended
def test_a_run_on_s3_is_exported_there(trained_run, s3):
    from raygpt import storage
    from raygpt.runs import open_run

    local = trained_run("torch")
    for path in local.rglob("*"):
        if path.is_file():
            storage.write_bytes(f"{s3}/mine/small/{path.relative_to(local).as_posix()}", path.read_bytes())
    files = export(read(open_run(f"{s3}/mine/small")), f"{s3}/exported")
    assert files["model.safetensors"] > 50_000
    config = json.loads(storage.read_bytes(f"{s3}/exported/config.json"))
    assert (config["n_layer"], config["vocab_size"]) == (2, VOCAB)
