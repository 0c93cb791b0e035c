"""Checkpoints of format 2, in which queries, keys and values were one matrix: read, and trained on from."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from safetensors import safe_open  # noqa: E402

from raygpt.corpus.feed import Feed  # noqa: E402
from raygpt.corpus.store import open_store  # noqa: E402
from raygpt.engines.base import PlainState  # noqa: E402
from raygpt.engines.torch.checkpoint import read_parameters, read_plain_state  # noqa: E402
from raygpt.engines.torch.engine import TorchEngine  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROWS, LAYERS, HEADS, WIDTH, VOCAB = 4, 2, 2, 16, 257


@pytest.fixture(scope="module", params=["torch", "transformers"])
def run(request, tmp_path_factory):
    """A run of two layers that was stopped at step 3 of 6, unpacked: its folder and its checkpoint's."""
    folder = tmp_path_factory.mktemp(request.param)
    with tarfile.open(FIXTURES / f"run-{request.param}-0.1.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder, folder / "runs" / request.param


def recipe_of(run):
    return load_recipe(str(run[1] / "recipe.yaml"), {"cluster.workers": 1, "cluster.mesh": {"data": 1, "fsdp": 1}})


def checkpoint_of(run):
    return run[1] / "checkpoints" / "step-00000003"


def old_tensors(folder):
    """Every tensor of a checkpoint, put together from its shards."""
    parts = {}
    for path in sorted(folder.glob("share-*.safetensors")):
        with safe_open(path, "np") as file:
            for name, start in file.metadata().items():
                parts.setdefault(name, []).append((int(start.split()[0]), file.get_tensor(name)))
    return {
        name: np.concatenate([part for _, part in sorted(found, key=lambda p: p[0])]) for name, found in parts.items()
    }


def by_hand(old, kind):
    """What was saved as blocks.N.qkv.weight [heads · 3 · head, width], and as c_attn.weight [width, 3 · width]."""
    found = {}
    for place, part in enumerate(("query", "key", "value")):
        if f"{kind}/tokens.weight" in old:
            kernels = [old[f"{kind}/blocks.{layer}.qkv.weight"] for layer in range(LAYERS)]
            split = [kernel.reshape(HEADS, 3, WIDTH // HEADS, WIDTH)[:, place] for kernel in kernels]
            found[f"blocks.{part}.kernel"] = np.stack([kernel.transpose(2, 0, 1) for kernel in split])
            biases = [old[f"{kind}/blocks.{layer}.qkv.bias"] for layer in range(LAYERS)]
            found[f"blocks.{part}.bias"] = np.stack([bias.reshape(HEADS, 3, -1)[:, place] for bias in biases])
        else:
            kernels = [old[f"{kind}/transformer.h.{layer}.attn.c_attn.weight"] for layer in range(LAYERS)]
            found[f"blocks.{part}.kernel"] = np.stack(
                [kernel.reshape(WIDTH, 3, HEADS, -1)[:, place] for kernel in kernels]
            )
    ours, theirs = (
        ("tokens.weight", "blocks.{}.down.weight"),
        ("transformer.wte.weight", "transformer.h.{}.mlp.c_proj.weight"),
    )
    tokens, down = ours if f"{kind}/tokens.weight" in old else theirs
    found["tokens"] = old[f"{kind}/{tokens}"][:VOCAB]
    downs = np.stack([old[f"{kind}/{down.format(layer)}"] for layer in range(LAYERS)])
    found["blocks.down.kernel"] = downs.transpose(0, 2, 1) if down in ours else downs
    return found


def test_weights_are_those_that_were_saved(run):
    folder, model = checkpoint_of(run), recipe_of(run).model
    old, weights = old_tensors(folder), read_plain_state(str(folder), model, VOCAB)
    assert weights.step == 3
    assert weights.slots.keys() == {"means", "squares"}
    for kind, arrays in {"parameters": weights.parameters, **weights.slots}.items():
        for name, value in by_hand(old, kind).items():
            np.testing.assert_array_equal(arrays[name], value, err_msg=f"{kind} {name}")
        count = sum(array.size for array in arrays.values())
        padding = sum(t.size - t[:VOCAB].size for n, t in old.items() if n.startswith(kind) and len(t) > VOCAB)
        assert count == sum(t.size for n, t in old.items() if n.startswith(f"{kind}/")) - padding
    alone = read_parameters(str(folder), model, VOCAB)
    assert alone.keys() == weights.parameters.keys()
    assert all(np.array_equal(alone[name], value) for name, value in weights.parameters.items())


def test_training_goes_on_as_if_it_had_never_stopped(run, tmp_path):
    if run[1].name == "transformers":
        pytest.importorskip("transformers")
    recipe = recipe_of(run)
    engine = TorchEngine(recipe, VOCAB, device="cpu")
    store = open_store(str(next((run[0] / "runs" / "stores").iterdir())))
    feed = Feed([store.train], context=recipe.model.context, batch_rows=ROWS, seed=recipe.training.seed)
    lines = [json.loads(line) for line in (run[0] / "expected.jsonl").read_text().splitlines()]
    expected = [[line["loss"], line["grad_norm"], line["lr"]] for line in lines if line["step"] > 3 and "loss" in line]

    def rest(state, steps):
        numbers = []
        for step in steps:
            state, metrics = engine.step(state, engine.put(feed.rows(step)))
            numbers.append([engine.read(metrics)[key] for key in ("loss", "grad_norm", "lr")])
        return numbers, state

    restored = engine.restore(str(checkpoint_of(run)))
    before = read_plain_state(str(checkpoint_of(run)), recipe.model, VOCAB)
    loaded = engine.load(PlainState(before.parameters, before.slots, before.step))
    np.testing.assert_allclose(rest(loaded, range(3, 6))[0], expected, rtol=1e-5)
    found, state = rest(restored, range(3, 5))
    engine.save(state, str(tmp_path))  # in the present format
    engine.wait_for_save()
    found += rest(engine.restore(str(tmp_path)), range(5, 6))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert json.loads((tmp_path / "state.json").read_text())["format"] == 3
