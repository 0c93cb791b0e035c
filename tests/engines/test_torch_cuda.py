"""The PyTorch engine on a GPU: compiled, in bf16, and never waiting. Runs only where there is one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from raygpt.engines.torch.dropout import dropout, dropout_keys  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.inference.sampling import sample  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

STEPS, ROWS, CONTEXT, VOCAB = 20, 12, 64, 1000
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, CONTEXT + 1)).astype(np.int32)


def make_engine(device="cuda", precision=None, optimizer="adamw", **settings):
    training = {key: settings.pop(key) for key in ("compile", "remat", "on_nan") if key in settings}
    recipe = load_recipe(
        "gpt2-tiny",
        {
            "engine": "torch",
            "model": {"layers": 2, "heads": 4, "width": 256, "context": CONTEXT, "dropout": 0.1, **settings},
            "training": {"steps": STEPS, "batch_tokens": ROWS * CONTEXT, **training},
            "optimizer.kind": optimizer,
        },
    )
    return TorchEngine(recipe, VOCAB, accumulation=2, precision=precision, device=device)


def train(engine, state, steps=range(STEPS)):
    metrics = []
    for step in steps:
        state, told = engine.step(state, engine.put(WINDOWS[step]))
        metrics.append(told)
    return np.array([engine.read(told)["loss"] for told in metrics]), state


@pytest.fixture(scope="module")
def on_cpu():
    engine = make_engine("cpu")
    return train(engine, engine.start())[0]


@pytest.mark.parametrize(
    "settings", [{}, {"remat": "products"}, {"remat": "blocks"}, {"implementation": "huggingface"}]
)
def test_compiled_bf16_is_the_cpus_fp32_but_for_rounding(settings, on_cpu):
    engine = make_engine(**settings)
    about = engine.describe()
    assert (about["precision"], about["compiled"]) == ("bf16", "whole")
    losses, state = train(engine, engine.start())
    np.testing.assert_allclose(losses, on_cpu, rtol=5e-3)
    assert engine.window_losses(state, WINDOWS[0]).shape == (ROWS,)
    assert sample(engine, state, WINDOWS[0, :2, :3], 8).shape == (2, 8)


MODERN = {
    "preset": "qwen3",
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 64,
    "width": 128,
    "softcap": 5.0,
    "embedding_norm": True,
    "value_embeddings": 1,
    "x0_mixing": True,
    "head_gates": True,
    "init": "xavier",
    "dropout": 0.0,
}


def test_of_a_block_that_is_computed_again_only_its_input_is_kept():
    kept = []
    for layers in (2, 4):
        settings = {**MODERN, "layers": layers, "mlp": "relu2", "remat": "blocks", "precision": "bf16"}
        kept.append(kept_by(make_engine(**settings)))
    a_stream = ROWS // 2 * CONTEXT * MODERN["width"] * 2  # bytes of the rows of a micro-batch
    assert (kept[1] - kept[0]) / 2 < 1.5 * a_stream


def kept_by(engine):
    """Bytes that a forward pass keeps for its backward pass, without parameters."""
    state, batch, found = engine.start(), engine.put(WINDOWS[0]), {}
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: found.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
        ),
        engine._autocast,
    ):
        state.module(batch.inputs[0], batch.targets[0], batch.weights[0], None)
    for parameter in state.parameters.values():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("settings", [{"mlp": "swiglu"}, {"mlp": "relu2", "remat": "products"}])
def test_a_modern_model_compiled_in_bf16_is_the_cpus_fp32_but_for_rounding(settings):
    on_cpu, on_gpu = (make_engine(device, **MODERN, **settings) for device in ("cpu", "cuda"))
    losses, state = train(on_gpu, on_gpu.start())
    np.testing.assert_allclose(losses, train(on_cpu, on_cpu.start())[0], rtol=5e-3)
    assert sample(on_gpu, state, WINDOWS[0, :2, :3], 8).shape == (2, 8)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions_agree_too(precision, on_cpu):
    engine = make_engine(precision=precision, compile="off")
    np.testing.assert_allclose(train(engine, engine.start())[0], on_cpu, rtol={"fp32": 1e-4, "fp16": 5e-3}[precision])


def test_masks_are_the_cpus_bit_for_bit():
    x, rows = torch.randn(5, 33, 130), torch.arange(7, 12, dtype=torch.int32)
    right = dropout(x, dropout_keys(3, 9, rows, 4)[2], 0.3)
    for function in (dropout, torch.compile(dropout)):
        ours = function(x.cuda(), dropout_keys(3, 9, rows.cuda(), 4)[2], 0.3)
        torch.testing.assert_close((ours != 0).cpu(), right != 0, rtol=0, atol=0)


def test_compiled_muon_is_the_cpus_but_for_rounding():
    cpu = make_engine("cpu", "fp32", "muon")
    right, _ = train(cpu, cpu.start(), range(6))
    for precision, tolerance in (("fp32", 1e-3), ("bf16", 2e-2)):
        engine = make_engine("cuda", precision, "muon")
        np.testing.assert_allclose(train(engine, engine.start(), range(6))[0], right, rtol=tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_no_step_waits_for_the_device(on_nan, optimizer):
    engine = make_engine(on_nan=on_nan, optimizer=optimizer)
    _, state = train(engine, engine.start(), range(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            state, metrics = engine.step(state, engine.put(WINDOWS[step]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(engine.read(metrics)["loss"])


def test_a_checkpoint_is_of_its_step_though_training_goes_on(tmp_path):
    engine = make_engine(compile="off")
    _, state = train(engine, engine.start(), range(3))
    before = engine.gather(state)
    engine.save(state, str(tmp_path))
    _, state = train(engine, state, range(3, 8))
    engine.wait_for_save()
    after = engine.gather(engine.restore(str(tmp_path)))
    assert after.step == 3
    pairs = [(before.parameters, after.parameters), *((before.slots[k], after.slots[k]) for k in before.slots)]
    assert len(pairs) == 3
    for left, right in pairs:
        for name, value in left.items():
            np.testing.assert_array_equal(right[name], value, err_msg=name)
