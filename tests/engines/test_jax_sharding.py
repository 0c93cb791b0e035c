"""Meshes and the places of arrays on them."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from raygpt.engines.jax.sharding import make_mesh, parameter_shardings  # noqa: E402
from raygpt.errors import RaygptError  # noqa: E402


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
    assert str(caught.value) == (
        f"cluster.mesh: {named} does not multiply to the 8 devices there are; "
        "write -1 for the axis that takes what is left, or change cluster.workers"
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


def parameters(vocab=128, context=16, width=32, heads=4, layers=2):
    """Shapes as the model has them."""
    size = width // heads
    kernel = lambda *shape: jax.ShapeDtypeStruct((layers, *shape), jnp.float32)  # noqa: E731
    return {
        "tokens": {"embedding": jax.ShapeDtypeStruct((vocab, width), jnp.float32)},
        "positions": {"embedding": jax.ShapeDtypeStruct((context, width), jnp.float32)},
        "blocks": {
            "norm1": {"scale": kernel(width), "bias": kernel(width)},
            "qkv": {"kernel": kernel(width, 3, heads, size), "bias": kernel(3, heads, size)},
            "out": {"kernel": kernel(heads, size, width), "bias": kernel(width)},
            "up": {"kernel": kernel(width, 4 * width), "bias": kernel(4 * width)},
            "down": {"kernel": kernel(4 * width, width), "bias": kernel(width)},
        },
        "norm": {"scale": jax.ShapeDtypeStruct((width,), jnp.float32)},
        "head": {"embedding": jax.ShapeDtypeStruct((vocab, width), jnp.float32)},
    }


def share(placed, shape):
    """The part of an array that one device holds."""
    return placed.shard_shape(shape.shape)


def test_matrices_are_cut_along_fsdp_and_tensor_and_vectors_of_the_width_are_everywhere():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    tree = parameters()
    shares = jax.tree.map(share, parameter_shardings(mesh, tree), tree)
    assert shares["tokens"]["embedding"] == shares["head"]["embedding"] == (64, 16)
    assert shares["positions"]["embedding"] == (16, 16)
    blocks = shares["blocks"]
    assert blocks["qkv"] == {"kernel": (2, 16, 3, 2, 8), "bias": (2, 3, 2, 8)}
    assert blocks["out"] == {"kernel": (2, 2, 8, 16), "bias": (2, 32)}
    assert blocks["up"] == {"kernel": (2, 16, 64), "bias": (2, 64)}
    assert blocks["down"] == {"kernel": (2, 64, 16), "bias": (2, 32)}
    assert blocks["norm1"] == {"scale": (2, 32), "bias": (2, 32)}
    assert shares["norm"]["scale"] == (32,)


def test_a_dimension_that_an_axis_does_not_divide_is_not_cut():
    mesh = make_mesh(sizes(data=1, fsdp=8))
    tree = parameters(width=36)  # 36 / 8 is not whole
    shares = jax.tree.map(share, parameter_shardings(mesh, tree), tree)
    assert shares == jax.tree.map(lambda shape: shape.shape, tree)
    heads = make_mesh(sizes(data=1, fsdp=2, tensor=4))
    placed = parameter_shardings(heads, parameters(width=36, heads=6))
    assert placed["blocks"]["qkv"]["kernel"].spec == P(None, "fsdp", None, None, None)  # 6 heads, 4 devices
    assert placed["blocks"]["up"]["kernel"].spec == P(None, "fsdp", "tensor")


@pytest.mark.parametrize("clip", [True, False])
def test_the_optimizers_averages_lie_where_their_parameters_lie(clip):
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    tree = parameters()
    adamw = optax.adamw(optax.constant_schedule(1e-3), mask=lambda tree: jax.tree.map(lambda _: True, tree))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw) if clip else adamw
    state = jax.eval_shape(optimizer.init, tree)
    expected = parameter_shardings(mesh, tree)
    placed = parameter_shardings(mesh, state)
    averages = [part for part in jax.tree.leaves(placed, is_leaf=is_adam) if is_adam(part)]
    assert len(averages) == 1
    assert averages[0].mu == averages[0].nu == expected
    counts = [
        spec for spec, shape in zip(jax.tree.leaves(placed), jax.tree.leaves(state), strict=True) if not shape.shape
    ]
    assert counts
    assert all(spec.spec == P() for spec in counts)


def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)


def test_arrays_put_on_a_mesh_come_back_whole():
    mesh = make_mesh(sizes(data=2, fsdp=2, tensor=2))
    kernel = np.arange(2 * 32 * 3 * 4 * 8, dtype=np.float32).reshape(2, 32, 3, 4, 8)
    tree = {"blocks": {"qkv": {"kernel": kernel}}}
    placed = jax.device_put(tree, parameter_shardings(mesh, tree))["blocks"]["qkv"]["kernel"]
    np.testing.assert_array_equal(placed, kernel)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 16, 3, 2, 8)}
