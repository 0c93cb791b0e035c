"""Saving and restoring the PyTorch engine's state: a file of safetensors per shard, written in the background.

Each file has a part of every tensor (parameters, the optimizer's slots), with its offset in the header; `state.json`
has the rest. So any number of processes can read just the parts that they need. Nothing is pickled.
"""

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from raygpt import storage
from raygpt.config import Model
from raygpt.engines.base import PlainState
from raygpt.engines.torch.huggingface_parameters import HuggingFaceLayout
from raygpt.engines.torch.parameters import Layout, OwnLayout, Slices
from raygpt.engines.torch.state import PARAMETERS
from raygpt.errors import RaygptError
from raygpt.models import Description, describe

INDEX = "state.json"
FORMAT = 3  # of the tensors: in the second, queries, keys and values were one


class Shard(NamedTuple):
    """A part of a tensor, and its offset."""

    tensor: Tensor
    slices: Slices


class Saver:
    """Writes one state at a time; `save` returns as soon as the tensors are on their way off the device."""

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}  # kept between saves: allocating pinned memory is slow
        self._making: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def reserve(self, shards: Mapping[str, Shard]) -> None:
        """Start to allocate host memory for saves: for GPT-2 1.5 GB, which takes 1.3 s if pinned. It happens while the
        first step is compiled, so no step waits for it."""
        tensors = {name: part.tensor for name, part in shards.items()}
        self._making = threading.Thread(target=self._make, args=(tensors,), daemon=True)
        self._making.start()

    @property
    def is_reserved(self) -> bool:
        """Whether memory is reserved, or being reserved."""
        return self._making is not None

    def save(self, shards: Mapping[str, Shard], folder: str, number: int, index: dict[str, Any] | None) -> None:
        """Start to write this process's shards as a file of that number, and the index if it is given."""
        self.wait()
        copied = self._copy({name: part.tensor for name, part in shards.items()})
        places = {name: " ".join(str(side.start) for side in part.slices) for name, part in shards.items()}

        def write() -> None:
            try:
                if copied:
                    copied.synchronize()
                with storage.atomic_write(storage.join(folder, _file(number))) as path:
                    save_file({name: self._host[name] for name in shards}, path, places)
                if index is not None:
                    storage.write_json(storage.join(folder, INDEX), index)
            except BaseException as error:
                self._error = error

        # Not a daemon: the program finishes its checkpoint before it exits
        self._thread = threading.Thread(target=write)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save is written; raises its error."""
        if self._thread:
            self._thread.join()
        error, self._error, self._thread = self._error, None, None
        if error:
            raise error

    def _copy(self, tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
        """Start to copy to the host, on the stream of the steps: the next step may change the tensors."""
        if self._making:
            self._making.join()
        self._make(tensors)
        cuda = any(tensor.is_cuda for tensor in tensors.values())
        for name, tensor in tensors.items():
            self._host[name].copy_(tensor, non_blocking=cuda)
        if not cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _make(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate host memory for tensors that have none yet."""
        gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        with torch.cuda.device(gpu) if gpu else nullcontext():  # a new thread's default is the first GPU
            for name, tensor in tensors.items():
                if name not in self._host:
                    self._host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=gpu is not None)


class CheckpointReader:
    """Reads the tensors in a folder, completely or in part."""

    def __init__(self, folder: str):
        self.index = _read_index(folder)
        files = [safe_open(Path(folder, _file(number)), "pt") for number in range(self.index["shares"])]
        self._parts: dict[str, list[tuple[list[int], Any]]] = {}  # name -> (where it begins, slice of a file)
        for file in files:
            for name, place in file.metadata().items():
                self._parts.setdefault(name, []).append(([int(first) for first in place.split()], file.get_slice(name)))

    @property
    def slots(self) -> list[str]:
        """Of the optimizer, by name."""
        kinds = dict.fromkeys(name.partition("/")[0] for name in self._parts if "/" in name)
        return [kind for kind in kinds if kind != PARAMETERS]

    def names(self, kind: str) -> list[str]:
        """Of all parameters that have a tensor of this kind."""
        return [name.removeprefix(f"{kind}/") for name in self._parts if name.startswith(f"{kind}/")]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """A part of a tensor, or all of it."""
        wanted = slices or tuple(slice(0, end) for end in self._shape(name))
        result = torch.empty([side.stop - side.start for side in wanted])
        for begins, part in self._parts[name]:
            ends = [begin + size for begin, size in zip(begins, part.get_shape(), strict=True)]
            lows = [max(side.start, begin) for side, begin in zip(wanted, begins, strict=True)]
            highs = [min(side.stop, end) for side, end in zip(wanted, ends, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            piece = part[_slices(lows, highs, begins)]
            result = result.to(piece.dtype)
            result[_slices(lows, highs, [side.start for side in wanted])] = piece
        return result  # empty if a process has no part of a small tensor

    def read_shard(self, kind: str, name: str, slices: Slices) -> Tensor:
        """Of a parameter, or of its slot."""
        return self.read(f"{kind}/{name}", slices)

    def _shape(self, name: str) -> list[int]:
        """The shape of the full tensor, which ends where the last part does."""
        ends = [[*map(sum, zip(begins, part.get_shape(), strict=True))] for begins, part in self._parts[name]]
        return [max(sides) for sides in zip(*ends, strict=True)]


def _slices(lows: list[int], highs: list[int], origin: list[int]) -> Slices:
    """From lows to highs, counted from an origin."""
    return tuple(slice(low - zero, high - zero) for low, high, zero in zip(lows, highs, origin, strict=True))


def open_checkpoint(folder: str, heads: int) -> CheckpointReader:
    """A checkpoint of this format or of the previous one, which needs the number of heads."""
    if _read_index(folder).get("format") == FORMAT:
        return CheckpointReader(folder)
    from raygpt.engines.torch.format2 import Format2Reader

    return Format2Reader(folder, heads)


def _read_index(folder: str) -> dict[str, Any]:
    index: dict[str, Any] | None = storage.read_json(storage.join(folder, INDEX), "name another checkpoint")
    if index is None:
        raise RaygptError(f"{folder} is no checkpoint of engine torch: it has no {INDEX}")
    if index.get("format") not in (FORMAT, 2):
        raise RaygptError(f"{folder} is a checkpoint of another version of raygpt; begin a new run: run.name=NAME")
    return index


def read_parameters(folder: str, model: Model, vocab: int) -> dict[str, Any]:
    """The parameters in a checkpoint, as `PlainState` has them; the optimizer's slots are not read."""
    return _arrays(open_checkpoint(folder, model.heads), PARAMETERS, model, vocab)


def read_plain_state(folder: str, model: Model, vocab: int) -> PlainState:
    """A checkpoint in host memory, as arrays that both engines understand."""
    reader = open_checkpoint(folder, model.heads)
    slots = {slot: _arrays(reader, slot, model, vocab) for slot in reader.slots}
    return PlainState(_arrays(reader, PARAMETERS, model, vocab), slots, reader.index["step"])


def _arrays(reader: CheckpointReader, kind: str, model: Model, vocab: int) -> dict[str, Any]:
    tensors = {name: reader.read(f"{kind}/{name}") for name in reader.names(kind)}
    return layout_of(implementation_of(reader), describe(model, vocab)).arrays(tensors)


def implementation_of(reader: CheckpointReader) -> str:
    """Which `model.implementation` wrote a checkpoint. The recipe that reads it may have another one."""
    return "raygpt" if "tokens.weight" in reader.names(PARAMETERS) else "huggingface"


def layout_of(implementation: str, description: Description) -> Layout:
    """How the modules of an implementation hold the parameters, and under which names a checkpoint has them."""
    return OwnLayout(description) if implementation == "raygpt" else HuggingFaceLayout(description)


def _file(number: int) -> str:
    return f"share-{number:05d}.safetensors"
