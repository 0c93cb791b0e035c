"""The PyTorch engine: a recipe's model on one device per process, trained, evaluated, sampled and saved."""

import logging
import os
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raygpt.config import Recipe
from raygpt.engines import base
from raygpt.engines.base import Devices, PlainState, Positions
from raygpt.engines.loss_scale import LossScale
from raygpt.engines.microbatches import Microbatches, arrange, needed_rows
from raygpt.engines.spikes import Spikes
from raygpt.engines.torch.checkpoint import (
    FORMAT,
    Saver,
    Shard,
    implementation_of,
    layout_of,
    open_checkpoint,
    read_plain_state,
)
from raygpt.engines.torch.devices import DTYPES, accurate, autocast, choose_device, choose_precision
from raygpt.engines.torch.loss import Objective
from raygpt.engines.torch.model import GPT
from raygpt.engines.torch.optimizer import Optimizer
from raygpt.engines.torch.parameters import Values
from raygpt.engines.torch.remat import recompute
from raygpt.engines.torch.sharding import (
    gather_tensor,
    is_owner,
    local,
    make_mesh,
    process_count,
    replicate,
    shard_parameters,
    shard_slices,
)
from raygpt.engines.torch.state import FIRST_SCALE, PARAMETERS, State
from raygpt.engines.torch.step import Batch, Metrics, make_step, window_losses
from raygpt.host import cores, memory_for_work
from raygpt.models import describe


def find_devices(recipe: Recipe) -> Devices:
    """The devices of a recipe: one for each connected process."""
    device = choose_device()
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else memory_for_work()
    share = recipe.cluster.gpu_share if cuda else torch.get_num_threads() / cores()  # others use the rest
    number_bytes = DTYPES[choose_precision(recipe.model.precision, device)].itemsize
    return Devices(
        process_count(), int(total * share), number_bytes, keeps_scores=False, platform="gpu" if cuda else "cpu"
    )


def set_up(recipe: Recipe | None = None) -> None:
    """Set up PyTorch: fp32 matrix products use TF32 on tensor cores, which is accurate enough and several times faster.

    `training.deterministic` excludes sums without a fixed order, and kernels chosen by timing.
    """
    torch.set_float32_matmul_precision("high")
    # Its one warning is that parts which are computed again must not change anything in place; blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if recipe and recipe.training.deterministic:
        # Otherwise cuBLAS may choose another algorithm when streams overlap
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        # FlashAttention's backward pass sums in a fixed order, cuDNN's does not
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch._inductor.config.deterministic = True


class TorchEngine:
    """Computes a recipe together with all connected processes."""

    def __init__(
        self,
        recipe: Recipe,
        vocab: int,
        *,
        accumulation: int = 1,
        precision: str | None = None,
        device: torch.device | str | None = None,
    ):
        self.recipe, self.vocab, self.accumulation = recipe, vocab, accumulation
        self.context = recipe.model.context
        self.device = torch.device(device) if device else choose_device()
        self.mesh = make_mesh(recipe, self.device)
        self.batch_rows = recipe.rows
        self._microbatches = Microbatches(recipe.rows, accumulation, self.mesh.dp_size)
        self._description = describe(recipe.model, vocab)
        self._layout = layout_of(recipe.model.implementation, self._description)
        self.precision = precision or choose_precision(recipe.model.precision, self.device)
        self._dtype = DTYPES[self.precision]
        self._param_dtype = accurate(self._dtype)
        self._half = self.precision == "fp16"
        self._autocast = autocast(self.device, self._dtype)
        self._compiles = recipe.training.compile == "unrolled" or (
            recipe.training.compile == "auto" and self.device.type == "cuda"
        )

    @property
    def device_count(self) -> int:
        """How many devices compute, over all workers."""
        return self.mesh.size

    def describe(self) -> dict[str, str]:
        """A description of the engine, for the console."""
        axes = {"data": self.mesh.data, "fsdp": self.mesh.fsdp, "tensor": self.mesh.tensor}
        cuda = self.device.type == "cuda"
        ours = self.recipe.model.implementation == "raygpt"
        return {
            "engine": f"torch {torch.__version__}",
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "devices": str(self.mesh.size),
            "mesh": " × ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one device",
            "precision": self.precision,
            "attention": "PyTorch SDPA",
            "compiled": "no" if not self._compiles else "whole" if self.mesh.size == 1 else "by blocks",
            "model": "raygpt GPT" if ours else "transformers GPT2LMHeadModel, without dropout inside attention",
        }

    # The state

    def start(self) -> State:
        """The state before step 0."""
        state = self._blank()
        self._fill(state, PARAMETERS, self._layout.initial_values(self.recipe.training.seed, self.device))
        return self._joined(state)

    def load(self, plain: PlainState) -> State:
        """A state with those parameters; slots that are not given are zero."""
        state = self._blank(plain.step)
        zeros = {name: np.broadcast_to(0.0, shape) for name, shape in self._description.shapes.items()}
        given = {slot: zeros | {**arrays} for slot, arrays in plain.slots.items() if slot in state.optimizer.slots}
        for kind, arrays in {PARAMETERS: plain.parameters, **given}.items():
            self._fill(state, kind, self._layout.values(arrays))
        if given:
            state.optimizer.set_updates(plain.step)
        return self._joined(state)

    def gather(self, state: State) -> PlainState:
        """A full state as arrays in host memory. Every process takes part and gets it."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for kind, name, tensor in state.tensors():
            tensors.setdefault(kind, {})[name] = gather_tensor(tensor, self.mesh).cpu()
        arrays = {kind: self._layout.arrays(named) for kind, named in tensors.items()}
        return PlainState(arrays.pop(PARAMETERS), arrays, state.step)

    def save(self, state: State, folder: str) -> None:
        """Start to write the state into a folder, in the background."""
        if self.mesh.is_first_copy:
            index = {"format": FORMAT, "shares": self.mesh.num_shards, "step": state.step}
            is_first = self.mesh.shard == 0
            self._saver.save(self._shards(state), folder, self.mesh.shard, index if is_first else None)

    def _shards(self, state: State) -> dict[str, Shard]:
        """The shards that this process saves."""
        shards = {
            f"{kind}/{name}": Shard(local(tensor), shard_slices(tensor, self.mesh))
            for kind, name, tensor in state.tensors()
            if is_owner(tensor, self.mesh)
        }
        if self.mesh.shard == 0:
            shards |= {name: Shard(number.view(1), (slice(0, 1),)) for name, number in state.numbers().items()}
        return shards

    def wait_for_save(self) -> None:
        """Wait until the last save is written."""
        self._saver.wait()

    @cached_property
    def _saver(self) -> Saver:
        return Saver()

    def restore(self, folder: str) -> State:
        """The state that was saved in a folder, by any number of processes."""
        reader = open_checkpoint(folder, self.recipe.model.heads)
        if implementation_of(reader) != self.recipe.model.implementation:
            return self.load(read_plain_state(folder, self.recipe.model, self.vocab))
        state = self._blank(reader.index["step"])
        self._fill(state, PARAMETERS, partial(reader.read_shard, PARAMETERS))
        for slot in state.optimizer.slots:
            self._fill(state, slot, partial(reader.read_shard, slot), reader.names(slot))
        for name, number in state.numbers().items():
            number.copy_(reader.read(name)[0])
        state.optimizer.set_updates(state.optimizer.updates)
        return self._joined(state)

    def _blank(self, step: int = 0) -> State:
        """A state whose parameters are not set yet. If they are sharded, no device ever has all of them."""
        with torch.device("meta"):
            objective = Objective(self._gpt_class(self.recipe.model, self.vocab, self._dtype), self.vocab)
        objective.to(self._param_dtype)
        for block in objective.gpt.blocks:
            recompute(block, self.recipe.training.remat)
        shard_parameters(objective, self.mesh)
        objective.to_empty(device=self.device)
        first = FIRST_SCALE * self.accumulation * self.mesh.dp_size
        scale = LossScale(
            torch.tensor(first, dtype=self._param_dtype, device=self.device), torch.tensor(0, device=self.device)
        )
        parameters = dict(objective.gpt.named_parameters())
        optimizer = Optimizer(self.recipe, parameters, self._layout.role, self.mesh, self.precision, self._compiles)
        spikes = Spikes(*(torch.tensor(0.0, device=self.device) for _ in Spikes._fields))
        return State(objective, objective, parameters, optimizer, step, scale, spikes)

    @property
    def _gpt_class(self) -> Any:
        if self.recipe.model.implementation == "raygpt":
            return GPT
        from raygpt.engines.torch.huggingface import HuggingFaceGPT

        return HuggingFaceGPT

    def _fill(self, state: State, kind: str, values: Values, names: Collection[str] | None = None) -> None:
        """Set this process's shard of every tensor of a kind, or of those with these names; the others stay zero."""
        for filled, name, tensor in state.tensors():
            if filled == kind and (names is None or name in names):
                local(tensor).copy_(values(name, shard_slices(tensor, self.mesh)))

    def _joined(self, state: State) -> State:
        """The state, ready to train, after its parameters are set."""
        state.module = replicate(state.objective, self.mesh)
        if self._compiles and self.mesh.size == 1:
            state.objective.compile()
        elif self._compiles:
            state.objective.compile_parts()
        return state

    # Rows in, numbers out

    @cached_property
    def _numbers(self) -> NDArray[np.int32]:
        """[accumulation, rows]: the rows of a batch that this process computes; those beyond it are padding."""
        return self._microbatches.numbers_of(self.mesh.dp_rank)

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch, over all processes."""
        return self._microbatches.micro_rows

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this process needs, in order."""
        return needed_rows(self._numbers, self.batch_rows)

    def put(self, windows: NDArray[np.int32], weights: NDArray[np.floating[Any]] | None = None) -> Batch:
        """These rows' windows [rows, context + 1] on their device, and how much each target counts."""
        arranged = arrange(self._numbers, self.rows, windows)
        both = self._put(arranged[..., :-1]), self._put(arranged[..., 1:])
        if weights is None:
            return Batch(*both, *self._row_facts, is_weighted=False)
        by_token = self._put(arrange(self._numbers, self.rows, weights)).to(self._param_dtype)
        return Batch(*both, self._row_facts[0], by_token, is_weighted=True)

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # otherwise the copy would wait for the device
        return tensor.to(self.device, non_blocking=True)

    @cached_property
    def _row_facts(self) -> tuple[Tensor, Tensor]:
        """Number of each row, [accumulation, rows], and weight of its targets, [accumulation, rows, time]; the same for
        every batch without weights."""
        weights = np.repeat((self._numbers < self.batch_rows)[..., None], self.context, axis=-1)
        return self._put(self._numbers), self._put(weights).to(self._param_dtype)

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Train on a batch; the state is changed in place."""
        if self.device.type == "cuda" and self.mesh.is_first_copy and not self._saver.is_reserved:
            self._saver.reserve(self._shards(state))
        return state, self._step(state, batch)

    @cached_property
    def _step(self) -> Callable[[State, Batch], Metrics]:
        return make_step(self.recipe, self.mesh, self._autocast, self._half)

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for a step's metrics."""
        return metrics.read()

    def spikes(self, state: State) -> float:
        """How many spikes a state has counted."""
        return float(state.spikes.spikes)

    def window_losses(self, state: State, windows: NDArray[np.int32]) -> NDArray[np.floating[Any]]:
        """The loss of each window [rows, context + 1], a mean over its tokens; every process passes and gets all."""
        mine = self._own_rows(windows)
        # Not compiled: without gradients it is another program, and compiling takes longer than a validation.
        with torch.compiler.set_stance("force_eager"):
            losses = window_losses(state.objective, mine[:, :-1], mine[:, 1:], self._autocast)
        return self._of_all(losses).sum(1).flatten().cpu().numpy()[: len(windows)]  # over parts of time

    @torch.no_grad()
    def token_logprobs(
        self, state: State, windows: NDArray[np.int32]
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        mine = self._own_rows(windows)
        with torch.compiler.set_stance("force_eager"), self._autocast:
            logprobs, hits = state.objective.token_logprobs(mine[:, :-1], mine[:, 1:])
        both = self._of_all(torch.stack([logprobs, hits.to(logprobs.dtype)], dim=1))[:, 0].flatten(0, 1).cpu().numpy()
        return both[: len(windows), 0], both[: len(windows), 1] > 0

    def _own_rows(self, windows: NDArray[np.int32]) -> Tensor:
        """The windows of this process's group; all groups have the same number."""
        padded = np.pad(windows, ((0, -len(windows) % self.mesh.dp_size), (0, 0)))
        return self._put(np.split(padded, self.mesh.dp_size)[self.mesh.dp_rank])

    def _of_all(self, own: Tensor) -> Tensor:
        """Gather every process's tensor: [groups, processes of a group, …]."""
        if self.mesh.size == 1:
            return own[None, None]
        parts = [torch.empty_like(own) for _ in range(self.mesh.size)]
        dist.all_gather(parts, own)
        return torch.stack(parts).unflatten(0, (self.mesh.dp_size, -1))

    # Sampling

    def prefill(self, state: State, ids: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read prompts [rows, time]: the logits of the token that follows each, and a cache for `decode`."""
        return self.decode(state, ids, 0, state.objective.gpt.empty_cache(len(ids)))

    @torch.no_grad()
    def decode(
        self, state: State, ids: NDArray[np.int32], start: Positions, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read ids [rows, time] after `start` earlier ones: logits [rows, vocabulary] of what follows, and a cache."""
        # Not compiled: every length of the cache would be another shape.
        with torch.compiler.set_stance("force_eager"), self._autocast:
            logits = state.objective.next_logits(self._put(ids), start, cache)
        return logits.to(self._param_dtype).cpu().numpy(), cache


Engine: type[base.Engine] = TorchEngine
