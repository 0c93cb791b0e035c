"""The PyTorch engine: a recipe's model on one device per process, stepped, scored and named."""

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raygpt.config import Recipe
from raygpt.engines.base import Devices, Weights
from raygpt.engines.torch.checkpoint import FORMAT, CheckpointReader, Saver, Share
from raygpt.engines.torch.initial import initial
from raygpt.engines.torch.loss import Objective
from raygpt.engines.torch.memory import recompute
from raygpt.engines.torch.model import GPT, accurate
from raygpt.engines.torch.names import from_hugging_face, hugging_face_name, to_hugging_face
from raygpt.engines.torch.optimizer import make_optimizer
from raygpt.engines.torch.sharding import (
    fill,
    is_owner,
    join_copies,
    local,
    make_mesh,
    process_count,
    share_out,
    where,
    whole,
)
from raygpt.engines.torch.state import FIRST_SCALE, KINDS, MEANS, PARAMETERS, SQUARES, LossScale, Spikes, State
from raygpt.engines.torch.step import Batch, Metrics, make_step, score
from raygpt.host import cores, memory_for_work

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def choose_precision(wanted: str, device: torch.device) -> str:
    """bf16 where the device computes it fast: NVIDIA from Ampere on; fp16 on older GPUs; fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return "fp32"


def choose_device() -> torch.device:
    """The GPU that this process was given, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def find_devices(recipe: Recipe) -> Devices:
    """One device for each process that joined, as a recipe uses them."""
    device = choose_device()
    cuda = device.type == "cuda"
    share = torch.get_num_threads() / cores()  # of a machine that several workers use
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else int(memory_for_work() * share)
    number_bytes = DTYPES[choose_precision(recipe.model.precision, device)].itemsize
    return Devices(process_count(), memory, number_bytes, keeps_scores=False)


def set_up(recipe: Recipe | None = None) -> None:
    """Of matrix products in fp32 those on tensor cores, in TF32, are accurate enough, and several times faster.

    `training.deterministic` leaves out sums whose order is left to chance, and kernels chosen by their speed just now.
    """
    torch.set_float32_matmul_precision("high")
    if recipe and recipe.training.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS may take another path when streams overlap
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # FlashAttention's backward pass has an order, cuDNN's has none
        torch._inductor.config.deterministic = True


class TorchEngine:
    """Computes a recipe together with all processes that joined."""

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
        self.precision = precision or choose_precision(recipe.model.precision, self.device)
        self._dtype = DTYPES[self.precision]
        self._param_dtype = accurate(self._dtype)
        self._half = self.precision == "fp16"
        mixed = self._dtype != self._param_dtype
        self._autocast = torch.autocast(self.device.type, self._dtype if mixed else None, enabled=mixed)
        self._compiles = recipe.training.compile == "unrolled" or (
            recipe.training.compile == "auto" and self.device.type == "cuda"
        )

    @property
    def device_count(self) -> int:
        return self.mesh.size

    def describe(self) -> dict[str, str]:
        """What computes, for people."""
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
        self._fill(state, PARAMETERS, lambda name: initial(name, self.recipe, self.vocab))
        return self._joined(state)

    def load(self, weights: Weights) -> State:
        """A state with those parameters; averages that are not given are zero."""
        state = self._blank(weights.step)
        self._fill(state, PARAMETERS, lambda name: torch.tensor(weights.parameters[name]))
        if weights.means:
            self._fill(state, MEANS, lambda name: torch.tensor(weights.means[name]))
            self._fill(state, SQUARES, lambda name: torch.tensor(weights.squares[name]))
            state.set_updates(weights.step)
        return self._joined(state)

    def gather(self, state: State) -> Weights:
        """All of a state as arrays of this host. Every process takes part and gets it."""
        arrays: dict[str, dict[str, NDArray[Any]]] = {kind: {} for kind in KINDS}
        for kind, name, tensor in state.tensors():
            theirs = to_hugging_face(name, whole(tensor, self.mesh), self.vocab, self.recipe.model.heads)
            arrays[kind][hugging_face_name(name)] = theirs.cpu().contiguous().numpy().copy()
        return Weights(arrays[PARAMETERS], arrays[MEANS], arrays[SQUARES], state.step)

    def save(self, state: State, folder: str) -> None:
        """Begin to write the state into a folder, in the background."""
        if self.mesh.is_first_copy:
            whole_run = {"format": FORMAT, "shares": self.mesh.shares, "step": state.step}
            index = whole_run if self.mesh.share == 0 else None
            self._saver.save(self._shares(state), folder, self.mesh.share, index)

    def _shares(self, state: State) -> dict[str, Share]:
        """What this process writes down."""
        shares = {
            f"{kind}/{name}": Share(local(tensor), where(tensor, self.mesh))
            for kind, name, tensor in state.tensors()
            if is_owner(tensor, self.mesh)
        }
        if self.mesh.share == 0:
            shares |= {name: Share(number.view(1), (slice(0, 1),)) for name, number in state.numbers().items()}
        return shares

    def wait_for_save(self) -> None:
        """Until the state that was last saved is written."""
        self._saver.wait()

    @cached_property
    def _saver(self) -> Saver:
        return Saver()

    def restore(self, folder: str) -> State:
        """The state that was saved there, by any number of processes."""
        reader = CheckpointReader(folder)
        state = self._blank(reader.index["step"])
        for kind, name, tensor in state.tensors():
            local(tensor).copy_(reader.read(f"{kind}/{name}", where(tensor, self.mesh)))
        for name, number in state.numbers().items():
            number.copy_(reader.read(name)[0])
        state.set_updates(state.numbers()["updates"])
        return self._joined(state)

    def _blank(self, step: int = 0) -> State:
        """A state whose parameters are not set yet. Where they are shared out, no device ever holds all of them."""
        with torch.device("meta"):
            objective = Objective(self._gpt_class(self.recipe.model, self.vocab, self._dtype), self.vocab)
        objective.to(self._param_dtype)
        for block in objective.gpt.blocks:
            recompute(block, self.recipe.training.remat)
        share_out(objective, self.mesh)
        objective.to_empty(device=self.device)
        first = FIRST_SCALE * self.accumulation * self.mesh.groups
        scale = LossScale(
            torch.tensor(first, dtype=self._param_dtype, device=self.device), torch.tensor(0, device=self.device)
        )
        parameters = dict(objective.gpt.named_parameters())
        optimizer = make_optimizer(self.recipe, parameters.values())
        spikes = Spikes(*(torch.tensor(0.0, device=self.device) for _ in Spikes._fields))
        return State(objective, objective, parameters, optimizer, step, scale, spikes)

    @property
    def _gpt_class(self) -> Any:
        if self.recipe.model.implementation == "raygpt":
            return GPT
        from raygpt.engines.torch.huggingface import HuggingFaceGPT

        return HuggingFaceGPT

    def _fill(self, state: State, kind: str, values: Callable[[str], Tensor]) -> None:
        """Set every tensor of a kind to the values of its Hugging Face name."""
        for filled, name, tensor in state.tensors():
            if filled == kind:
                theirs = values(hugging_face_name(name)).to(self.device, self._param_dtype)
                fill(tensor, from_hugging_face(name, theirs, self.vocab, self.recipe.model.heads), self.mesh)

    def _joined(self, state: State) -> State:
        """Ready to train, now that its parameters are set."""
        state.module = join_copies(state.objective, self.mesh)
        if self._compiles and self.mesh.size == 1:
            state.objective.compile()
        elif self._compiles:
            state.objective.compile_parts()
        return state

    # Rows in, numbers out

    @cached_property
    def _numbers(self) -> NDArray[np.int32]:
        """[accumulation, rows]: the rows of a batch that this process computes, some beyond it that only fill up."""
        micro_rows = -(-self.batch_rows // (self.accumulation * self.mesh.groups))
        shape = (self.accumulation, self.mesh.groups, micro_rows)
        return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)[:, self.mesh.group]

    @property
    def micro_rows(self) -> int:
        """Rows that are computed at a time, over all processes."""
        return self._numbers.shape[1] * self.mesh.groups

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this process needs, in order."""
        return [int(row) for row in self._numbers.flat if row < self.batch_rows]

    def put(self, windows: NDArray[np.int32]) -> Batch:
        """These rows' windows [rows, context + 1], on their device."""
        cut = np.zeros((self._numbers.size, self.context + 1), dtype=np.int32)
        cut[: len(windows)] = windows  # what fills up comes last
        cut = cut.reshape(*self._numbers.shape, -1)
        return Batch(self._put(cut[..., :-1]), self._put(cut[..., 1:]), *self._places)

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # or the copy would wait for the device
        return tensor.to(self.device, non_blocking=True)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Number and weight of each row, [accumulation, rows]; the same for every batch."""
        real = self._numbers < self.batch_rows
        return self._put(self._numbers), self._put(real).to(self._param_dtype)

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Train on a batch; the state is changed in place."""
        if self.device.type == "cuda" and self.mesh.is_first_copy and not self._saver.is_reserved:
            self._saver.reserve(self._shares(state))
        return state, self._step(state, batch)

    @cached_property
    def _step(self) -> Callable[[State, Batch], Metrics]:
        return make_step(self.recipe, self.mesh, self._autocast, self._half)

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for a step's metrics."""
        return metrics.read()

    def score(self, state: State, windows: NDArray[np.int32]) -> NDArray[np.floating[Any]]:
        """The loss of each window [rows, context + 1], a mean over its tokens; every process gives and gets all."""
        mine = self._own_rows(windows)
        # Not compiled: without gradients it would be another program, and a validation is over before that is made.
        with torch.compiler.set_stance("force_eager"):
            losses = score(state.objective, mine[:, :-1], mine[:, 1:], self._autocast)
        return self._of_all(losses).sum(1).flatten().cpu().numpy()[: len(windows)]  # over parts of time

    @torch.no_grad()
    def grade(self, state: State, windows: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability, and whether it is the likeliest: [rows, time]."""
        mine = self._own_rows(windows)
        with torch.compiler.set_stance("force_eager"), self._autocast:
            logs, hits = state.objective.grade(mine[:, :-1], mine[:, 1:])
        both = self._of_all(torch.stack([logs, hits.to(logs.dtype)], dim=1))[:, 0].flatten(0, 1).cpu().numpy()
        return both[: len(windows), 0], both[: len(windows), 1] > 0

    def _own_rows(self, windows: NDArray[np.int32]) -> Tensor:
        """Those of this process's group, all groups having as many."""
        padded = np.pad(windows, ((0, -len(windows) % self.mesh.groups), (0, 0)))
        return self._put(np.split(padded, self.mesh.groups)[self.mesh.group])

    def _of_all(self, own: Tensor) -> Tensor:
        """What every process has, [groups, processes of a group, …]."""
        if self.mesh.size == 1:
            return own[None, None]
        shares = [torch.empty_like(own) for _ in range(self.mesh.size)]
        dist.all_gather(shares, own)
        return torch.stack(shares).unflatten(0, (self.mesh.groups, -1))

    # Sampling

    def prefill(self, state: State, ids: NDArray[np.int32]) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read prompts [rows, time]: the logits of the token that follows each, and a cache for `decode`."""
        return self.decode(state, ids, 0, state.objective.gpt.empty_cache(len(ids)))

    @torch.no_grad()
    def decode(
        self, state: State, ids: NDArray[np.int32], start: int, cache: Any
    ) -> tuple[NDArray[np.floating[Any]], Any]:
        """Read ids [rows, time] after `start` earlier ones: logits [rows, vocabulary] of what follows, and a cache."""
        # Not compiled: every length of the cache would be another shape.
        with torch.compiler.set_stance("force_eager"), self._autocast:
            logits = state.objective.extend(self._put(ids), start, cache)
        return logits.to(self._param_dtype).cpu().numpy(), cache


Engine = TorchEngine
