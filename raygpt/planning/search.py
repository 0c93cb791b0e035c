"""Other ways to run the same recipe: which of them fit, which are faster, and the fastest of all."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from pydantic import ValidationError

from raygpt import storage
from raygpt.config import Recipe
from raygpt.errors import RaygptError
from raygpt.planning.forecast import LAUNCHES_S, Forecast, forecast
from raygpt.planning.target import as_overrides, other_hardware_keys

REMATS = ("none", "products", "blocks")
LARGEST_TENSOR = 8  # devices: beyond a node its sums cost more than they save
WORTH = 1.01  # times as fast: a smaller gain is within the plan's own error
LEAN = 0.9  # of the memory: what saves less is not worth a word
MOST = 3  # changes that are shown


@dataclass(frozen=True)
class Change:
    """Keys to change, and what then is to be expected."""

    keys: Mapping[str, Any]
    forecast: Forecast
    is_same_run: bool  # whether the losses stay as they are

    def __str__(self) -> str:
        return as_overrides(self.keys)

    def write(self, file: str) -> str:
        """The recipe with these keys, as a file that `raygpt train` takes."""
        about = f"# {self.forecast.recipe.run.name} with {self}, the fastest of its plans on {self.forecast.target}.\n"
        storage.write_bytes(file, (about + self.forecast.original.to_yaml()).encode())
        return file


def helpful_changes(now: Forecast) -> list[Change]:
    """The changes that help most, of each kind the best: those that make it faster; where it does not fit, those that
    make it fit, then those that save most memory."""
    kinds = [list(kind(now)) for kind in (_meshes, _remats, _engines, _batches, _contexts)]
    best = [found for kind in kinds if (found := _best(now, kind))]
    best.sort(key=lambda change: (not change.is_same_run, -change.forecast.tokens_per_s))
    if now.fits:
        return best[:MOST]
    lean = [min(kind, key=lambda change: change.forecast.memory.total) for kind in kinds if kind]
    lean = [change for change in lean if change.forecast.memory.total < LEAN * now.memory.total and change not in best]
    return [*best, *sorted(lean, key=lambda change: change.forecast.memory.total)][:MOST]


def _best(now: Forecast, changes: Sequence[Change]) -> Change | None:
    fitting = [change for change in changes if change.forecast.fits]
    faster = [change for change in fitting if change.forecast.tokens_per_s > WORTH * now.tokens_per_s]
    return max(faster if now.fits else fitting, key=lambda change: change.forecast.tokens_per_s, default=None)


def fastest(now: Forecast) -> Change:
    """The mesh, recomputation and accumulation with which a recipe is fastest on its target, and the workers that use
    all of it; refuses if none fits."""
    devices, target = now.devices, now.target
    workers = {**now.workers, **other_hardware_keys(now.original.cluster, target)}
    every = (
        {**workers, **_mesh_keys(mesh), "training.remat": remat, "training.accumulation": None}
        for mesh in meshes(now.recipe, devices.count)
        for remat in REMATS
    )
    found = list(_changes(now, every))
    fitting = [change for change in found if change.forecast.fits]
    if not found:
        raise RaygptError(
            f"--find: no mesh of {target} goes with the other keys of this recipe; leave out what it says of cluster"
        )
    if not fitting:
        least = min(change.forecast.memory.total for change in found)
        raise RaygptError(
            f"--find: no mesh and no recomputation fits on {target}, the least needs {least / 2**30:.1f} GiB of "
            f"{devices.memory_bytes / 2**30:.1f}; name more devices, or a smaller model"
        )
    best = _fastest_of(fitting)
    split = best.forecast.split.accumulation
    again = _change(now, {**best.keys, "training.accumulation": split})
    return again or best


def _fastest_of(fitting: Sequence[Change]) -> Change:
    """Where a mesh of data and fsdp alone takes less than 1 ms a step, none that splits products is chosen."""
    simple = [change for change in fitting if _keeps_rows_whole(change.forecast.mesh)]
    if any(change.forecast.time.total < LAUNCHES_S for change in simple):
        fitting = simple
    return max(fitting, key=lambda change: change.forecast.tokens_per_s)


def meshes(recipe: Recipe, count: int) -> Iterator[dict[str, int]]:
    """Every mesh of so many devices whose tensor axis fits into a node, and whose context axis divides the model's
    context into multiples of 128."""
    for tensor in (number for number in _divisors(count) if number <= LARGEST_TENSOR):
        for context in _divisors(count // tensor) if recipe.engine == "jax" else [1]:
            rest = count // (tensor * context)
            if context == 1 or recipe.model.context % (128 * context) == 0:
                for fsdp in _divisors(rest):
                    yield {"data": rest // fsdp, "fsdp": fsdp, "tensor": tensor, "context": context}


def _divisors(count: int) -> list[int]:
    small = [number for number in range(1, isqrt(count) + 1) if count % number == 0]
    return sorted({*small, *(count // number for number in small)})


def _mesh_keys(mesh: Mapping[str, int]) -> dict[str, Any]:
    return {f"cluster.mesh.{axis}": size for axis, size in mesh.items()}


def _changed(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe | None:
    """The recipe with these keys; None if they do not fit each other."""
    values = recipe.to_dict()
    for key, value in keys.items():
        *parents, last = key.split(".")
        part = values
        for parent in parents:
            part = part[parent]
        part[last] = value
    try:
        return Recipe.model_validate(values)
    except ValidationError:
        return None


def _change(now: Forecast, keys: Mapping[str, Any], is_same_run: bool = True) -> Change | None:
    changed = _changed(now.original, keys)
    try:
        if changed is None:
            return None
        return Change(keys, forecast(changed, now.target, now.corpus, laws=now.laws), is_same_run)
    except RaygptError:  # such as an engine that does not know the device
        return None


def _changes(now: Forecast, every: Iterator[dict[str, Any]], is_same_run: bool = True) -> Iterator[Change]:
    for keys in every:
        found = _change(now, keys, is_same_run)
        if found:
            yield found


def _meshes(now: Forecast) -> Iterator[Change]:
    if now.target.count > 1:
        others = (mesh for mesh in meshes(now.recipe, now.target.count) if mesh != now.mesh)
        if now.fits and now.time.total < LAUNCHES_S:
            others = (mesh for mesh in others if _keeps_rows_whole(mesh))
        yield from _changes(now, (_different(now.recipe, mesh) for mesh in others))


def _keeps_rows_whole(mesh: Mapping[str, int]) -> bool:
    """Whether no product is split over devices: splitting saves nothing where launching kernels decides."""
    return mesh["tensor"] == mesh["context"] == 1


def _different(recipe: Recipe, mesh: Mapping[str, int]) -> dict[str, Any]:
    """The keys of a mesh without those axes that are 1 in the recipe and stay so."""
    before = recipe.cluster.mesh.sizes()
    kept = {axis: size for axis, size in mesh.items() if axis == "data" or not size == before[axis] == 1}
    return _mesh_keys(kept)


def _remats(now: Forecast) -> Iterator[Change]:
    others = (remat for remat in REMATS if remat != now.recipe.training.remat)
    yield from _changes(now, ({"training.remat": remat} for remat in others))


def _engines(now: Forecast) -> Iterator[Change]:
    other = {"jax": "torch", "torch": "jax"}[now.recipe.engine]
    yield from _changes(now, iter([{"engine": other}]))


def _batches(now: Forecast) -> Iterator[Change]:
    """Twice the batch in half the steps: fewer updates and exchanges for the same tokens."""
    training = now.original.training
    keys = {"training.batch_tokens": 2 * training.batch_tokens}
    if training.steps is not None:
        keys["training.steps"] = max(1, training.steps // 2)
    yield from _changes(now, iter([keys]), is_same_run=False)


def _contexts(now: Forecast) -> Iterator[Change]:
    context = now.recipe.model.context
    if context >= 256 and context % 2 == 0:
        yield from _changes(now, iter([{"model.context": context // 2}]), is_same_run=False)
