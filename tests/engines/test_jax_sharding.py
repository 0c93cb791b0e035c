"""Meshes and the places of arrays on them."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from raygpt.config import Model  # noqa: E402
from raygpt.engines.jax.engine import JaxEngine  # noqa: E402
from raygpt.engines.jax.optimizer import make_optimizer  # noqa: E402
from raygpt.engines.jax.sharding import _arranged, gather_tables, make_mesh, spreading, state_shardings  # noqa: E402
from raygpt.errors import RaygptError  # noqa: E402
from raygpt.models import describe  # noqa: E402
from raygpt.recipes import load_recipe  # noqa: E402


def sizes(data=-1, fsdp=1, tensor=1, context=1):
    return {"data": data, "fsdp": fsdp, "tensor": tensor, "context": context}


@pytest.mark.parametrize(
    ("asked", "devices", "got"),
    [
        (sizes(), 8, (8, 1, 1, 1)),
        (sizes(), 1, (1, 1, 1, 1)),
        (sizes(tensor=2), 8, (4, 1, 2, 1)),
        (sizes(data=1, fsdp=-1), 8, (1, 8, 1, 1)),
        (sizes(data=2, context=-1), 8, (2, 1, 1, 4)),
        (sizes(data=2, fsdp=2, tensor=2), 8, (2, 2, 2, 1)),
        (sizes(fsdp=8), 8, (1, 8, 1, 1)),
        (sizes(tensor=3), 6, (2, 1, 3, 1)),
    ],
)
def test_the_open_axis_takes_what_the_others_leave(asked, devices, got):
    mesh = make_mesh(asked, jax.devices()[:devices])
    assert mesh.axis_names == ("data", "fsdp", "tensor", "context")
    assert mesh.devices.shape == got
    assert mesh.devices.flatten().tolist() == jax.devices()[:devices]


@dataclass(frozen=True)
class SliceChip:
    """As JAX describes a chip of several slices."""

    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0


def two_slices():
    return [SliceChip(number, (x, y, 0)) for number in range(2) for y in range(2) for x in range(2)]


@pytest.mark.parametrize(
    ("shape", "slices_of_fsdp"),
    [
        ((2, 4, 1, 1), [0, 0, 0, 0]),  # along data: fsdp stays inside a slice
        ((4, 1, 2, 1), [0]),
        ((1, 8, 1, 1), [0, 0, 0, 0, 1, 1, 1, 1]),  # there is no other axis
    ],
)
def test_the_slices_of_tpus_are_along_the_outermost_axis(shape, slices_of_fsdp):
    arranged = _arranged(two_slices(), shape)
    assert arranged.shape == shape
    assert [chip.slice_index for chip in arranged[0, :, 0, 0]] == slices_of_fsdp
    assert len({chip.slice_index for chip in arranged[:, :, 0, 0].flat}) == 2


def test_slices_that_data_and_fsdp_do_not_divide_are_refused():
    with pytest.raises(
        RaygptError, match=r"data=1 × fsdp=1 does not divide among 2 slices .* write cluster\.mesh\.data: 2"
    ):
        _arranged(two_slices(), (1, 1, 8, 1))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (sizes(data=2, tensor=2), "data=2 × tensor=2"),
        (sizes(data=16), "data=16"),
        (sizes(tensor=3), "data=-1 × tensor=3"),
        (sizes(fsdp=16), "data=-1 × fsdp=16"),
        (sizes(data=1), "data=1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(asked, named):
    with pytest.raises(RaygptError) as caught:
        make_mesh(asked)
    remedy = "change one" if "-1" in named else "write -1 for the axis that takes what is left"
    assert str(caught.value) == (
        f"cluster.mesh: {named} does not multiply to the 8 devices there are; {remedy}, or change cluster.workers"
    )


def test_what_is_left_for_an_axis_has_to_divide_the_model():
    recipe = load_recipe("gpt2-tiny", {"cluster.mesh": {"data": 1, "context": -1}, "model.context": 16})
    assert recipe.mesh_over(8)["context"] == 8
    with pytest.raises(RaygptError) as caught:
        JaxEngine(recipe, vocab=257, devices=jax.devices()[:3])
    assert str(caught.value) == (
        "cluster.mesh.context: 3 devices are left for it, which do not divide model.context 16; write 1"
    )


class Chip:
    """One of a TPU v6e slice 4x4, of which each host has four."""

    platform, device_kind, core_on_chip = "tpu", "TPU v6 lite", 0

    def __init__(self, x, y):
        self.id, self.coords, self.process_index = 4 * y + x, [x, y, 0], 2 * (y // 2) + x // 2


def test_on_a_tpu_neighbours_on_the_mesh_are_neighbours_on_the_chips_grid():
    chips = sorted((Chip(x, y) for x in range(4) for y in range(4)), key=lambda chip: (chip.process_index, chip.id))
    ring = make_mesh(sizes(data=1, fsdp=16), chips).devices.flatten()
    assert sorted(chip.id for chip in ring) == list(range(16))
    steps = [
        np.abs(np.subtract(one.coords, other.coords)).sum() for one, other in zip(ring, np.roll(ring, 1), strict=True)
    ]
    assert steps == [1] * 16  # in their own order some are three chips apart
    assert make_mesh(sizes(data=1, fsdp=8, tensor=2), chips).devices.shape == (1, 8, 2, 1)


@pytest.mark.parametrize(
    ("matrices", "mesh", "devices"),
    [
        (24, (2, 4, 1, 1), 8),
        (6, (2, 4, 1, 1), 8),  # two of eight are padding
        (4, (2, 4, 1, 1), 4),  # each device of fsdp has one: along data the same are computed twice
        (3, (2, 4, 1, 1), 4),  # cut along fsdp, they must come together there
        (24, (8, 1, 1, 1), 8),
        (2, (8, 1, 1, 1), 8),
        (1, (8, 1, 1, 1), 1),
    ],
)
def test_matrices_are_divided_among_devices_unless_most_would_be_padding(matrices, mesh, devices):
    asked = dict(zip(("data", "fsdp", "tensor", "context"), mesh, strict=True))
    specs, over = spreading(make_mesh(asked, jax.devices()[:8]), ("fsdp", None), (matrices, 8, 16))
    assert over == devices
    assert specs[-1][1:] == (None, None)  # whole


def shapes(vocab=128, context=16, width=32, heads=4, layers=2):
    """A model's description, and the shapes of its parameters."""
    model = Model(layers=layers, heads=heads, width=width, context=context, tied_head=False)
    found = describe(model, vocab)
    return found, {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in found.shapes.items()}


def share(placed, shape):
    """The part of an array that one device holds."""
    return placed.shard_shape(shape.shape)


def test_matrices_are_cut_along_fsdp_and_tensor_and_vectors_of_the_width_are_everywhere():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    description, tree = shapes()
    shares = jax.tree.map(share, state_shardings(mesh, description, tree), tree)
    assert shares["tokens"] == shares["head"] == (64, 16)
    assert shares["positions"] == (16, 16)
    for name in ("query", "key", "value"):
        assert (shares[f"blocks.{name}.kernel"], shares[f"blocks.{name}.bias"]) == ((2, 16, 2, 8), (2, 2, 8))
    assert (shares["blocks.out.kernel"], shares["blocks.out.bias"]) == ((2, 2, 8, 16), (2, 32))
    assert (shares["blocks.up.kernel"], shares["blocks.up.bias"]) == ((2, 16, 64), (2, 64))
    assert (shares["blocks.down.kernel"], shares["blocks.down.bias"]) == ((2, 64, 16), (2, 32))
    assert (shares["blocks.norm1.gain"], shares["blocks.norm1.bias"]) == ((2, 32), (2, 32))
    assert shares["norm.gain"] == (32,)


def test_a_dimension_that_an_axis_does_not_divide_is_not_cut():
    mesh = make_mesh(sizes(data=1, fsdp=8))
    description, tree = shapes(width=36)  # 36 / 8 is not whole
    shares = jax.tree.map(share, state_shardings(mesh, description, tree), tree)
    assert shares == jax.tree.map(lambda shape: shape.shape, tree)
    heads = make_mesh(sizes(data=1, fsdp=2, tensor=4))
    placed = state_shardings(heads, *shapes(width=36, heads=6))
    assert placed["blocks.query.kernel"].spec == P(None, "fsdp", None, None)  # 6 heads, 4 devices
    assert placed["blocks.up.kernel"].spec == P(None, "fsdp", "tensor")


def test_what_the_optimizer_remembers_lies_where_its_parameters_lie():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    description, tree = shapes()
    slots = jax.eval_shape(make_optimizer(load_recipe("gpt2-tiny"), description, mesh, "fp32").init, tree)
    expected = state_shardings(mesh, description, tree)
    placed = state_shardings(mesh, description, {"slots": slots, "step": jax.ShapeDtypeStruct((), jnp.int32)})
    assert placed["slots"] == {"means": expected, "squares": expected}
    assert placed["step"].spec == P()


def test_arrays_put_on_a_mesh_come_back_whole():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    kernel = np.arange(2 * 32 * 4 * 8, dtype=np.float32).reshape(2, 32, 4, 8)
    tree = {"blocks.query.kernel": kernel}
    placed = jax.device_put(tree, state_shardings(mesh, shapes()[0], tree))["blocks.query.kernel"]
    np.testing.assert_array_equal(placed, kernel)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 16, 2, 8)}


def test_of_a_gathered_table_each_device_gets_its_shard_of_the_gradient():
    mesh = make_mesh(sizes(data=1, fsdp=8))
    description, tree = shapes()
    places = state_shardings(mesh, description, tree)
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))

    def gradients(parameters, ids):
        def loss(parameters):
            return jnp.square(jnp.take(gather_tables(mesh, description, parameters)["tokens"], ids, axis=0)).sum()

        return jax.grad(loss)(parameters)["tokens"]

    given = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place), tree, places
    )
    compiled = jax.jit(gradients).lower(given, ids).compile()
    assert compiled.output_shardings.shard_shape((128, 32)) == (128, 4)
    assert "f32[128,32]" not in " ".join(re.findall(r"= (\S+) all-reduce", compiled.as_text()))
