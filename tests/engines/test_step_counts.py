"""What a training step costs, in counts and not in seconds: products, kernels, operations, waits for the host.

A noisy machine cannot tell a step that became 5 % slower. It can tell a product that is computed twice, an array that
crosses to the host, or an operation more in every layer.
"""

import re
from collections import Counter

import numpy as np
import pytest
from conftest import also

from raygpt.recipes import load_recipe

ROWS, CONTEXT, VOCAB = 2, 16, 100
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (3, ROWS, CONTEXT + 1)).astype(np.int32)


def recipe(engine, layers, how="unrolled", optimizer="adamw", **model):
    sizes = {"layers": layers, "heads": 4, "width": 256, "context": CONTEXT, "dropout": 0.0, **model}
    training = {"steps": 10, "batch_tokens": ROWS * CONTEXT, "compile": how if engine == "jax" else "off"}
    settings = {"engine": engine, "model": sizes, "training": training, "schedule.warmup_steps": 0}
    return load_recipe("gpt2-tiny", {**settings, "optimizer.kind": optimizer})


# JAX


def counted(jaxpr, found=None):
    """Every primitive of a program and of the programs inside it, but for those inside kernels."""
    found = Counter() if found is None else found
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        if equation.primitive.name == "pallas_call":
            found[equation.params["name"] or ""] += 1
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    counted(inner, found)
    return found


def traced(layers, kernels):
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine

    engine = JaxEngine(recipe("jax", layers), VOCAB, devices=jax.devices()[:1], kernels=kernels)
    return jax.jit(engine._step).trace(engine._shapes, engine.put(WINDOWS[0]))


def step_of(layers, kernels):
    return counted(traced(layers, kernels).jaxpr.jaxpr)


def test_a_fused_layer_is_eighteen_products_and_six_kernels():
    one, two = (step_of(layers, "fused") for layers in (1, 2))
    # Q, K, V, out, up and down: each forward, and for the gradients of both its factors. The values' bias passes
    # through `out`, a vector times a matrix: three more. Attention, a kernel on a GPU, is six on a CPU.
    assert two["dot_general"] - one["dot_general"] == 18 + 3 + 6
    assert two["pallas_call"] - one["pallas_call"] == 6  # two norms and GELU, forward and backward
    # The first norm, forward and backward, and the loss, which is one kernel for both; its three products.
    assert one["pallas_call"] == 6 + 2 + 1
    assert one["dot_general"] == 18 + 3 + 6 + 3


def test_a_fused_block_is_one_function_that_all_layers_call():
    two, four = (traced(layers, "fused").lower().as_text() for layers in (2, 4))
    assert len(four) < 1.2 * len(two)  # else tracing, and compiling its kernels, takes longer with every layer


def test_a_plain_layer_computes_no_product_twice():
    pytest.importorskip("jax")
    one, two = (step_of(layers, "plain") for layers in (1, 2))
    # Q/K/V together, out, up, down, scores and sums: each forward and twice backward
    assert two["dot_general"] - one["dot_general"] == 18


@pytest.fixture
def compiled_quickly():
    """XLA's passes take most of a test's time, and change nothing that is counted here."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compiled_quickly")
def test_a_jax_step_exchanges_nothing_with_the_host():
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine

    engine = JaxEngine(recipe("jax", 1), VOCAB, devices=jax.devices()[:1])
    state, batches = engine.start(), [engine.put(windows) for windows in WINDOWS]
    state, _ = engine.step(state, batches[0])
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, metrics = engine.step(state, batch)
    assert np.isfinite(engine.read(metrics)["loss"])


@pytest.mark.parametrize(
    ("how", "optimizer", "most"), [("scanned", "adamw", 2), *also(("unrolled", "adamw", 2), ("scanned", "muon", 5))]
)
def test_copies_of_the_model_on_cpus_exchange_few_things(how, optimizer, most):
    """Each that waits holds a thread: those that engines/jax/processes.py counts are enough for no more."""
    jax = pytest.importorskip("jax")
    from raygpt.engines.jax.engine import JaxEngine
    from raygpt.engines.jax.processes import MUON_EXTRA_THREADS, REPLICA_THREADS

    engine = JaxEngine(recipe("jax", 2, how, optimizer), VOCAB, devices=jax.devices()[:2])
    state, both = engine.start(), engine._put_both(WINDOWS[0])
    programs = {
        "step": engine._step.lower(state, engine.put(WINDOWS[0])),
        "losses": engine._window_losses.lower(state.parameters, *both),
        "logprobs": engine._token_logprobs.lower(state.parameters, *both),
    }
    for name, program in programs.items():
        exchanged = re.findall(r" (all-\w+|reduce-scatter|collective-\w+)\(", program.compile().as_text())
        assert 1 <= len(exchanged) <= most, (name, exchanged)
    assert most == REPLICA_THREADS + (MUON_EXTRA_THREADS if optimizer == "muon" else 0)


# PyTorch


def operations(layers, optimizer="adamw", **model):
    """Operations that a step dispatches, forward, backward and update."""
    pytest.importorskip("torch", reason="needs the extra torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    from raygpt.engines.torch.engine import TorchEngine

    found = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found[function.name().removeprefix("aten::").split(".")[0]] += 1
            return function(*args, **(kwargs or {}))

    engine = TorchEngine(recipe("torch", layers, optimizer=optimizer, **model), VOCAB, device="cpu")
    state, batch = engine.start(), engine.put(WINDOWS[0])
    state, _ = engine.step(state, batch)
    with Counting():
        engine.step(state, batch)
    return found


def test_a_torch_step_waits_for_no_number_and_updates_all_parameters_at_once():
    one, two = operations(1), operations(2)
    assert one["_local_scalar_dense"] == two["_local_scalar_dense"] == 0  # what .item() and float() do
    assert one["_fused_adamw_"] == two["_fused_adamw_"] == 2  # matrices, and vectors that do not decay
    products = Counter({name: two[name] - one[name] for name in ("mm", "addmm", "bmm")})
    assert products == {"addmm": 4, "mm": 8, "bmm": 0}  # with a bias forward; two gradients each
    attention = [name for name in two if "scaled_dot_product" in name]
    assert all(two[name] - one[name] == 1 for name in attention)
    assert len(attention) == 2  # forward and backward, fused


def test_a_modern_layer_has_one_product_for_gate_and_up_and_all_layers_share_one_rotation():
    one, two = (operations(layers, preset="qwen3", kv_heads=2) for layers in (1, 2))
    assert two["mm"] - one["mm"] == 3 * 4  # Q/K/V together, out, gate and up together, down
    assert one["raygpt::rotations"] == two["raygpt::rotations"] == 1
    assert all(two[name] - one[name] == 1 for name in two if "scaled_dot_product" in name)


def test_muon_on_torch_waits_for_no_number_and_computes_matrices_of_one_shape_together():
    one, three = operations(1, "muon"), operations(3, "muon")
    assert one["_local_scalar_dense"] == three["_local_scalar_dense"] == 0
    assert one["bmm"] == three["bmm"] == 2 * 15  # two shapes, five polynomials of three products
    assert three["stack"] == one["stack"]
