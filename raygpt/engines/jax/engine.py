"""The JAX engine: a recipe's model on a mesh of devices, stepped, scored and named."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from raygpt.config import Recipe
from raygpt.engines.base import Devices, Weights, fill
from raygpt.engines.jax import processes, sharding
from raygpt.engines.jax.attention import Cache, choose_attention
from raygpt.engines.jax.checkpoint import Saver, restore
from raygpt.engines.jax.fused import choose_kernels, make_fused_losses
from raygpt.engines.jax.model import GPT, Layers
from raygpt.engines.jax.names import from_hugging_face, to_weights
from raygpt.engines.jax.optimizer import learning_rate, make_optimizer
from raygpt.engines.jax.scaling import Scale
from raygpt.engines.jax.spikes import Spikes
from raygpt.engines.jax.step import Batch, Losses, Metrics, State, make_grade, make_losses, make_score, make_step
from raygpt.host import cores, memory_for_work

FEW_LAYERS = 6  # that a CPU, too, compiles one after another within seconds
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32, "fp64": jnp.float64}


def choose_precision(wanted: str, device: Any) -> str:
    """bf16 where the device computes it fast: TPUs, and NVIDIA from Ampere on; fp16 on older GPUs; fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    if device.platform == "gpu":
        return "bf16" if float(getattr(device, "compute_capability", "8.0")) >= 8 else "fp16"
    return "bf16" if device.platform == "tpu" else "fp32"


def find_devices(recipe: Recipe) -> Devices:
    """The devices of all processes that joined, as a recipe uses them."""
    if recipe.model.precision == "fp64":
        jax.config.update("jax_enable_x64", True)
    device, mesh = jax.local_devices()[0], sharding.make_mesh(recipe.cluster.mesh.sizes())
    dtype = DTYPES[choose_precision(recipe.model.precision, device)]
    _, kernel = choose_attention(device, dtype, mesh, recipe.model, recipe.training.deterministic)
    return Devices(mesh.size, _memory(device), jnp.dtype(dtype).itemsize, keeps_scores=kernel == "XLA")


def _memory(device: Any) -> int:
    """Bytes that a device has for us; a CPU device's are its share of the host's."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit") or memory_for_work() // max(cores(), jax.local_device_count()))


def choose_compile(wanted: str, device: Any, layers: int) -> bool:
    """Whether the layers are one loop. One after another they run faster, by 10 % on a CPU, and compile longer."""
    if wanted != "auto":
        return wanted == "scanned"
    return device.platform == "tpu" or (device.platform == "cpu" and layers > FEW_LAYERS)


class JaxEngine:
    """Computes a recipe on the devices of all processes that joined."""

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
        self.context = recipe.model.context
        self.mesh = sharding.make_mesh(recipe.cluster.mesh.sizes(), devices)
        self.batch_rows = recipe.rows
        self.precision = precision or choose_precision(recipe.model.precision, self._device)
        self._dtype = DTYPES[self.precision]
        self._param_dtype = jnp.promote_types(self._dtype, jnp.float32)
        computes = self._device, self._dtype, self.mesh, recipe.model
        self._attention, self._attention_name = choose_attention(*computes, recipe.training.deterministic)
        self._optimizer = make_optimizer(recipe)
        scanned = choose_compile(recipe.training.compile, self._device, recipe.model.layers)
        self._layers = Layers(scanned, recipe.training.remat)
        self._kernels = kernels or choose_kernels(*computes, self._layers)  # `fused` or `plain`

    @property
    def _device(self) -> Any:
        return self.mesh.devices.flat[0]

    @property
    def device_count(self) -> int:
        return int(self.mesh.size)

    def describe(self) -> dict[str, str]:
        """What computes, for people."""
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
        """The state before step 0, born sharded: no device ever holds more than its share."""
        return jax.jit(self._initial, out_shardings=self._shardings)()

    def _model(self) -> GPT:
        rngs = nnx.Rngs(params=self.recipe.training.seed)
        return GPT(self.recipe.model, self.vocab, dtype=self._dtype, param_dtype=self._param_dtype, rngs=rngs)

    def _initial(self) -> State:
        parameters = nnx.to_pure_dict(nnx.split(self._model())[1])
        optimizer = self._optimizer.init(parameters)
        return State(parameters, optimizer, jnp.zeros((), jnp.int32), Scale.first(), Spikes.first())

    @cached_property
    def _graph(self) -> Any:
        return nnx.split(nnx.eval_shape(self._model))[0]

    @cached_property
    def _shardings(self) -> State:
        return sharding.parameter_shardings(self.mesh, jax.eval_shape(self._initial))

    def save(self, state: State, folder: str) -> None:
        """Begin to copy the state to the host, for a folder."""
        self._saver.save(state, folder)

    def wait_for_save(self) -> None:
        """Write what was copied."""
        self._saver.wait()

    @cached_property
    def _saver(self) -> Saver:
        return Saver()

    def restore(self, folder: str) -> State:
        """The state that was saved there, on whatever mesh."""
        return restore(folder, jax.eval_shape(self._initial), self._shardings)

    def gather(self, state: State) -> Weights:
        """All of a state as arrays of this host; every process takes part, one array after another."""
        whole = jax.tree.map(sharding.on_this_host, state)
        means, squares = (optax.tree.get(whole.optimizer, name) for name in ("mu", "nu"))
        return to_weights(whole.parameters, means, squares, whole.step, self.recipe.model, self.vocab)

    def load(self, weights: Weights) -> State:
        """A state with those parameters; averages that are not given are zero, as before step 0."""
        shapes = jax.eval_shape(self._initial)
        ours = partial(from_hugging_face, like=shapes.parameters, model=self.recipe.model, vocab=self.vocab)
        zeros = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes.parameters)
        means, squares = (ours(arrays) if arrays else zeros for arrays in (weights.means, weights.squares))
        step = jnp.asarray(weights.step, jnp.int32)
        optimizer = optax.tree.set(shapes.optimizer, mu=means, nu=squares, count=step)
        state = State(ours(weights.parameters), optimizer, step, Scale.first(), Spikes.first())
        return jax.tree.map(sharding.from_this_host, state, self._shardings)

    # Rows in, numbers out

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        """[accumulation, rows, time] of a batch, with rows that fill it up to what the mesh divides."""
        across = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        micro_rows = -(-self.batch_rows // (self.accumulation * across)) * across
        return self.accumulation, micro_rows, self.recipe.model.context

    @property
    def micro_rows(self) -> int:
        """Rows that are computed at a time, over all devices."""
        return self._shape[1]

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this process needs, in order."""
        numbers = np.arange(np.prod(self._shape[:2])).reshape(self._shape[:2])
        places = NamedSharding(self.mesh, sharding.BATCH).addressable_devices_indices_map(self._shape)
        needed = {int(row) for index in places.values() if index for row in numbers[index[:2]].flat}
        return sorted(row for row in needed if row < self.batch_rows)

    def put(self, windows: NDArray[np.int32]) -> Batch:
        """These rows' windows [rows, context + 1], on their devices."""
        accumulation, micro_rows, time = self._shape
        batch = np.zeros((accumulation * micro_rows, time + 1), dtype=np.int32)
        batch[self.rows] = windows
        cut = batch.reshape(accumulation, micro_rows, time + 1)
        return Batch(self._put(cut[..., :-1]), self._put(cut[..., 1:]), self._weights)

    def _put(self, array: NDArray[Any], spec: P = sharding.BATCH) -> jax.Array:
        return sharding.from_this_host(array, NamedSharding(self.mesh, spec))

    @cached_property
    def _weights(self) -> jax.Array:
        real = np.arange(np.prod(self._shape[:2])) < self.batch_rows
        return self._put(real.reshape(self._shape[:2]).astype(self._param_dtype), P(None, sharding.ROWS))

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Train on a batch; the old state is used up."""
        if self._device.platform == "gpu" and not self._saver.is_reserved:
            self._saver.reserve(state)
        return self._step(state, batch)

    @cached_property
    def _step(self) -> Any:
        scaled = self.precision == "fp16"
        step = make_step(self.recipe, self._training_losses, self._optimizer, learning_rate(self.recipe), scaled)
        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, None))

    def lower_step(self) -> Any:
        """The step, to be compiled for the mesh's devices, which need not be here: nothing is put on them."""
        state = jax.tree.map(sharding.shape_at, jax.eval_shape(self._initial), self._shardings)
        place = NamedSharding(self.mesh, sharding.BATCH), NamedSharding(self.mesh, P(None, sharding.ROWS))
        tokens: Any = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=place[0])
        weights: Any = jax.ShapeDtypeStruct(self._shape[:2], self._param_dtype, sharding=place[1])
        return self._step.lower(state, Batch(tokens, tokens, weights))

    @cached_property
    def _losses(self) -> Losses:
        return make_losses(self._graph, self._attention, self.mesh, self.vocab, self._layers)

    @property
    def _training_losses(self) -> Losses:
        """Fused or plain. Scores are always plain: their logits are fp32, the kernels' are bf16."""
        if self._kernels == "plain":
            return self._losses
        model, layers = self.recipe.model, self._layers
        return make_fused_losses(model, self._dtype, self._attention, self.mesh, self.vocab, layers)

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for a step's metrics."""
        return {name: float(value) for name, value in jax.device_get(metrics)._asdict().items()}

    def score(self, state: State, windows: NDArray[np.int32]) -> NDArray[np.floating[Any]]:
        """The loss of each window [rows, context + 1], a mean over its tokens; every process gives and gets all."""
        padded = np.pad(windows, ((0, -len(windows) % self._row_shards), (0, 0)))
        return np.asarray(self._score(state.parameters, *self._put_both(padded)))[: len(windows)]

    @cached_property
    def _score(self) -> Any:
        return jax.jit(make_score(self._losses), out_shardings=NamedSharding(self.mesh, P()))

    def grade(self, state: State, windows: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        rows, time = len(windows), windows.shape[1] - 1
        graded = self._grade(state.parameters, *self._put_both(fill(windows, self.context, self._row_shards)))
        logs, hits = (np.asarray(part)[:rows, :time] for part in graded)
        return logs, hits

    @cached_property
    def _grade(self) -> Any:
        grade = make_grade(self._graph, self._attention, self.mesh, self.vocab, self._layers)
        return jax.jit(grade, out_shardings=NamedSharding(self.mesh, P()))

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
        model = self.recipe.model
        shape = (model.layers, len(ids), model.heads, model.context, model.width // model.heads)
        empty = Cache(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype))
        return self.decode(state, ids, 0, empty)

    def decode(
        self, state: State, ids: NDArray[np.int32], start: int, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read ids [rows, time] after `start` earlier ones: logits [rows, vocabulary] of what follows, and a cache."""
        logits, cache = self._extend(state.parameters, ids, start, cache)
        return np.asarray(logits), cache

    @cached_property
    def _extend(self) -> Any:
        def extend(parameters: Any, ids: jax.Array, start: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            gpt: GPT = nnx.merge(self._graph, parameters)
            hidden, cache = gpt.extend(ids, start, cache)
            table = gpt.table[: self.vocab].astype(hidden.dtype)
            return jnp.einsum("bd,vd->bv", hidden[:, -1], table, preferred_element_type=jnp.float32), cache

        return jax.jit(extend, donate_argnums=3)


Engine, set_up = JaxEngine, processes.set_up
