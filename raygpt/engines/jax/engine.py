"""The JAX engine: a recipe's model on a mesh of devices, trained, evaluated, sampled and saved."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from raygpt.config import Recipe
from raygpt.engines import base, choices
from raygpt.engines.base import Devices, PlainState, Positions
from raygpt.engines.jax import processes, sharding
from raygpt.engines.jax.attention import Cache, choose_attention
from raygpt.engines.jax.checkpoint import Saver, restore
from raygpt.engines.jax.devices import accurate, dtype_of, precision_on
from raygpt.engines.jax.fused import choose_kernels, make_fused_losses
from raygpt.engines.jax.logits import logits
from raygpt.engines.jax.model import GPT, LayerCompilation
from raygpt.engines.jax.optimizer import Tree, learning_rate, make_optimizer
from raygpt.engines.jax.parameters import from_plain, initial_keys, initial_values, to_plain
from raygpt.engines.jax.step import (
    Batch,
    Forward,
    Losses,
    Metrics,
    State,
    make_losses,
    make_step,
    make_token_logprobs,
    make_window_losses,
)
from raygpt.engines.loss_scale import LossScale
from raygpt.engines.microbatches import Microbatches, arrange, needed_rows
from raygpt.engines.padding import pad_windows
from raygpt.engines.spikes import Spikes
from raygpt.host import cores, memory_for_work
from raygpt.models import describe

# Of each token's loss in fp16, not of their mean: no more than a few steps away from the right one.
FIRST_SCALE = 2.0**10


def find_devices(recipe: Recipe) -> Devices:
    """The devices of all connected processes, as a recipe uses them."""
    device, mesh = jax.local_devices()[0], sharding.make_mesh(recipe.mesh_over(jax.device_count()))
    dtype = dtype_of(precision_on(device, recipe.model.precision))
    setup = device, dtype, mesh, recipe.model
    _, kernel = choose_attention(*setup, recipe.training.deterministic)
    compilation = LayerCompilation(choices.scans(recipe.training.compile, device.platform, recipe.model.layers))
    return Devices(
        mesh.size,
        _memory(device),
        jnp.dtype(dtype).itemsize,
        keeps_scores=kernel == "XLA",
        platform=device.platform,
        fused=choose_kernels(*setup, compilation) == "fused",
    )


def _memory(device: Any) -> int:
    """Usable bytes of a device; for a CPU device an equal part of the host's."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit") or memory_for_work() // max(cores(), jax.local_device_count()))


class JaxEngine:
    """Computes a recipe on the devices of all connected processes."""

    def __init__(
        self,
        recipe: Recipe,
        vocab: int,
        *,
        accumulation: int = 1,
        devices: Sequence[Any] | None = None,
        precision: str | None = None,
        kernels: str | None = None,
    ):
        self.recipe, self.vocab, self.accumulation = recipe, vocab, accumulation
        devices = jax.devices() if devices is None else devices
        self.context = recipe.model.context
        self.mesh = sharding.make_mesh(recipe.mesh_over(len(devices)), devices)
        self.batch_rows = recipe.rows
        self._description = describe(recipe.model, vocab)
        self.precision = precision or precision_on(self._device, recipe.model.precision)
        self._dtype = dtype_of(self.precision)
        self._param_dtype = accurate(self._dtype)
        setup = self._device, self._dtype, self.mesh, recipe.model
        self._attention, self._attention_name = choose_attention(*setup, recipe.training.deterministic)
        self._optimizer = make_optimizer(recipe, self._description, self.mesh, self.precision)
        scanned = choices.scans(recipe.training.compile, self._device.platform, recipe.model.layers)
        self._compilation = LayerCompilation(scanned, recipe.training.remat)
        self._kernels = kernels or choose_kernels(*setup, self._compilation)  # `fused` or `plain`

    @property
    def _device(self) -> Any:
        return self.mesh.devices.flat[0]

    @property
    def device_count(self) -> int:
        """How many devices compute, over all workers."""
        return int(self.mesh.size)

    def describe(self) -> dict[str, str]:
        """A description of the engine, for the console."""
        axes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        return {
            "engine": f"jax {jax.__version__}",
            "device": self._device.device_kind,
            "devices": str(self.mesh.size),
            "mesh": axes or "one device",
            "precision": self.precision,
            "attention": self._attention_name,
            "kernels": self._kernels,
        }

    # The state

    def start(self) -> State:
        """The state before step 0, created sharded: no device ever has more than its shards."""
        return jax.jit(self._initial, out_shardings=self._shardings)(self._initial_keys)

    @cached_property
    def _initial_keys(self) -> Any:
        return initial_keys(self._description, self.recipe.training.seed)

    def _initial(self, keys: Any) -> State:
        parameters = initial_values(self._description, keys, self._param_dtype)
        return State(parameters, self._optimizer.init(parameters), *self._counters(0))

    def _counters(self, step: int) -> tuple[Any, ...]:
        """What a state has besides parameters and slots, after `step` steps of which none was skipped."""
        zero, count = jnp.zeros((), jnp.float32), jnp.asarray(step, jnp.int32)
        scale = LossScale(jnp.asarray(FIRST_SCALE, jnp.float32), jnp.zeros((), jnp.int32))
        return count, count, scale, Spikes(*[zero] * len(Spikes._fields))

    @cached_property
    def _shapes(self) -> State:
        return jax.eval_shape(self._initial, self._initial_keys)

    @cached_property
    def _shardings(self) -> State:
        return sharding.state_shardings(self.mesh, self._description, self._shapes)

    def save(self, state: State, folder: str) -> None:
        """Start to copy the state to the host, for a folder."""
        self._saver.save(state, folder)

    def wait_for_save(self) -> None:
        """Write the copy."""
        self._saver.wait()

    @cached_property
    def _saver(self) -> Saver:
        return Saver()

    def restore(self, folder: str) -> State:
        """The state that was saved in a folder, on any mesh."""
        return restore(folder, self._shapes, self._shardings)

    def gather(self, state: State) -> PlainState:
        """A full state as arrays in host memory; every process takes part, one array after another."""
        whole = jax.tree.map(sharding.on_this_host, state)
        plain = partial(to_plain, description=self._description)
        return PlainState(plain(whole.parameters), {k: plain(slot) for k, slot in whole.slots.items()}, int(whole.step))

    def load(self, plain: PlainState) -> State:
        """A state with those parameters; slots that are not given are zero, as before step 0."""
        ours = partial(from_plain, description=self._description, dtype=self._param_dtype)
        zeros = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), self._shapes.slots)
        given = {slot: plain.slots.get(slot, {}) for slot in zeros}
        slots = {slot: zeros[slot] | ours(given[slot], names=given[slot].keys() & zeros[slot]) for slot in zeros}
        state = State(ours(plain.parameters), slots, *self._counters(plain.step))
        return jax.tree.map(sharding.from_this_host, state, self._shardings)

    # Rows in, numbers out

    @cached_property
    def _microbatches(self) -> Microbatches:
        return Microbatches(self.batch_rows, self.accumulation, self._row_shards)

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch, over all devices."""
        return self._microbatches.micro_rows

    @property
    def _shape(self) -> tuple[int, int, int]:
        """[accumulation, rows, time] of a batch, with padding rows so that the mesh divides it."""
        return self.accumulation, self.micro_rows, self.context

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this process needs, in order."""
        places = NamedSharding(self.mesh, sharding.BATCH).addressable_devices_indices_map(self._shape)
        needed = [self._microbatches.numbers[index[:2]].ravel() for index in places.values() if index]
        return needed_rows(np.concatenate(needed), self.batch_rows)

    def put(self, windows: NDArray[np.int32], weights: NDArray[Any] | None = None) -> Batch:
        """These rows' windows [rows, context + 1], and weights [rows, context] of their targets, on their devices."""
        batch = arrange(self._microbatches.numbers, self.rows, windows)
        counts = self._all_count if weights is None else (self._put_weights(weights), None)
        return Batch(self._put(batch[..., :-1]), self._put(batch[..., 1:]), *counts)

    def _put(self, array: NDArray[Any], spec: P = sharding.BATCH) -> jax.Array:
        return sharding.from_this_host(array, NamedSharding(self.mesh, spec))

    def _put_weights(self, weights: NDArray[Any]) -> jax.Array:
        return self._put(arrange(self._microbatches.numbers, self.rows, weights.astype(self._param_dtype)))

    @cached_property
    def _all_count(self) -> tuple[jax.Array, jax.Array]:
        """1 for every target of a batch, and their sum: the same for every batch."""
        total = np.asarray(self.batch_rows * self.context, self._param_dtype)
        return self._put_weights(np.ones((len(self.rows), self.context))), self._put(total, P())

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Train on a batch; the old state becomes invalid."""
        if self._device.platform == "gpu" and not self._saver.is_reserved:
            self._saver.reserve(state)
        state, metrics = self._step(state, batch)
        for value in metrics:
            value.copy_to_host_async()  # now: the copy of a checkpoint that follows would delay them
        return state, metrics

    @cached_property
    def _step(self) -> Any:
        scaled = self.precision == "fp16"
        rates, shards = learning_rate(self.recipe), self._row_shards
        step = make_step(self.recipe, self._training_losses, self._optimizer, rates, scaled, shards)
        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, None))

    def lower_step(self) -> Any:
        """The step, lowered for the mesh's devices, which need not exist: nothing is put on them."""
        state = jax.tree.map(sharding.shape_at, self._shapes, self._shardings)
        place = NamedSharding(self.mesh, sharding.BATCH)
        tokens: Any = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=place)
        weights: Any = jax.ShapeDtypeStruct(self._shape, self._param_dtype, sharding=place)
        total: Any = jax.ShapeDtypeStruct((), self._param_dtype, sharding=NamedSharding(self.mesh, P()))
        return self._step.lower(state, Batch(tokens, tokens, weights, total))

    @cached_property
    def _gpt(self) -> GPT:
        constrain = partial(sharding.constrain_residual, self.mesh)
        return GPT(self.recipe.model, self._dtype, self._attention, self._compilation, constrain)

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self._gpt, self._description, self.mesh)

    @cached_property
    def _losses(self) -> Losses:
        return make_losses(self._forward)

    @property
    def _training_losses(self) -> Losses:
        """Fused or plain. Evaluation is always plain: its logits are fp32, the kernels' are bf16."""
        return self._losses if self._kernels == "plain" else make_fused_losses(self._forward)

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for a step's metrics."""
        return {name: float(value) for name, value in jax.device_get(metrics)._asdict().items()}

    def spikes(self, state: State) -> float:
        """How many spikes a state has counted."""
        return float(state.spikes.spikes)

    def window_losses(self, state: State, windows: NDArray[np.int32]) -> NDArray[np.floating[Any]]:
        """The loss of each window [rows, context + 1], a mean over its tokens; every process passes and gets all."""
        padded = np.pad(windows, ((0, -len(windows) % self._row_shards), (0, 0)))
        return np.asarray(self._window_losses(state.parameters, *self._put_both(padded)))[: len(windows)]

    @cached_property
    def _window_losses(self) -> Any:
        return jax.jit(make_window_losses(self._losses), out_shardings=NamedSharding(self.mesh, P()))

    def token_logprobs(
        self, state: State, windows: NDArray[np.int32]
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        rows, time = len(windows), windows.shape[1] - 1
        both = self._put_both(pad_windows(windows, self.context, self._row_shards, self.mesh.shape["context"]))
        logprobs, hits = (np.asarray(part)[:rows, :time] for part in self._token_logprobs(state.parameters, *both))
        return logprobs, hits

    @cached_property
    def _token_logprobs(self) -> Any:
        return jax.jit(make_token_logprobs(self._forward), out_shardings=NamedSharding(self.mesh, P()))

    @property
    def _row_shards(self) -> int:
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def _put_both(self, windows: NDArray[np.int32]) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets."""
        place = P(sharding.ROWS, "context")
        return self._put(windows[:, :-1], place), self._put(windows[:, 1:], place)

    # Sampling

    def prefill(self, state: State, ids: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read prompts [rows, time]: the logits of the token that follows each, and a cache for `decode`."""
        shape = self._description.cache_shape(len(ids))
        return self.decode(state, ids, 0, Cache(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype)))

    def decode(
        self, state: State, ids: NDArray[np.int32], start: Positions, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read ids [rows, time] after `start` earlier ones: logits [rows, vocabulary] of what follows, and a cache."""
        scores, cache = self._extend(state.parameters, ids, start, cache)
        return np.asarray(scores), cache

    @cached_property
    def _extend(self) -> Any:
        def extend(parameters: Tree, ids: jax.Array, start: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            hidden, cache = self._gpt.extend(parameters, ids, start, cache)
            table = parameters[self._description.output_table]
            return logits(hidden[:, -1], table, self.recipe.model.softcap)[:, : self.vocab], cache

        # Every process draws from all logits, which `tensor` would leave in shards of the vocabulary.
        return jax.jit(extend, donate_argnums=3, out_shardings=(NamedSharding(self.mesh, P()), None))


Engine: type[base.Engine] = JaxEngine
set_up = processes.set_up
