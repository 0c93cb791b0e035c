"""The PyTorch engine with recomputation and compiled: the same numbers, from less memory or in one graph."""

# ruff: noqa: F811  # a fixture is an argument of the same name

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from conftest import also  # noqa: E402
from test_torch_engine import CONTEXT, MODERN, ROWS, WINDOWS, alone, make_engine, train  # noqa: E402, F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from raygpt.inference.sampling import sample  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Kept:
    """Bytes that the forward pass keeps for the backward pass."""

    def __enter__(self):
        self.tensors = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor):
        self.tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self.bytes = sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


@pytest.mark.parametrize("implementation", ["raygpt", "huggingface"])
@pytest.mark.parametrize("remat", ["products", "blocks"])
def test_what_is_computed_again_changes_no_number(remat, implementation, alone):
    if implementation == "huggingface":
        pytest.importorskip("transformers")
    engine = make_engine(precision="fp64", remat=remat, implementation=implementation)
    numbers, _ = train(engine, engine.start(), WINDOWS[:3])
    np.testing.assert_allclose(numbers, alone[0][:3], rtol=1e-12)


class Products(TorchDispatchMode):
    """Counts products of an activation with a kernel: one per linear layer, forward."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function == torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("products", 1), ("blocks", 2)])
def test_products_are_computed_again_only_with_whole_blocks(remat, times):
    engine = make_engine(remat=remat, layers=3)
    state, batch = engine.start(), engine.put(WINDOWS[0])
    with Products() as products:
        engine.step(state, batch)
    assert products.count == times * 3 * 4  # layers, and query, key and value together, out, up, down


def test_blocks_that_are_computed_again_keep_less():
    kept = {}
    for remat in ("none", "blocks"):
        engine = make_engine(remat=remat, layers=4)
        objective = engine.start().objective
        ids = torch.from_numpy(WINDOWS[0])
        with Kept() as seen:
            objective(ids[:, :-1], ids[:, 1:], torch.ones(ROWS, CONTEXT), None)
        kept[remat] = seen.bytes
    assert kept["blocks"] < kept["none"] / 3


def test_compiled_it_gives_the_same_numbers(alone):
    engine = make_engine(2, precision="fp64", compile="unrolled")
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch.compiler.set_stance(force_backend="aot_eager"):  # traced and cut like any other; C++ takes 30 s more
        numbers, state = train(engine, engine.start(), WINDOWS[:5])
        assert counters["stats"]["unique_graphs"] == 1, "one graph for the whole model and every step"
        np.testing.assert_allclose(numbers, alone[0][:5], rtol=1e-9)
        assert sample(engine, state, WINDOWS[0, :2, :3], 4).shape == (2, 4)
        assert counters["stats"]["unique_graphs"] == 1, "each length of the cache would be another"
    assert not counters["graph_break"]
    assert engine.describe()["compiled"] == "whole"


@pytest.mark.parametrize("remat", also("none", "products"))
def test_a_modern_model_is_compiled_as_one_graph_too(remat):
    right, engine = (
        make_engine(precision="fp64", compile=how, remat=remat, **MODERN, layers=3) for how in ("off", "unrolled")
    )
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch._dynamo.reset()  # else the sizes of another model would make these ones variables
    with torch.compiler.set_stance(force_backend="aot_eager"):
        numbers, _ = train(engine, engine.start(), WINDOWS[:3])
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    np.testing.assert_allclose(numbers, train(right, right.start(), WINDOWS[:3])[0], rtol=1e-9)
