"""What the training loop asks of an engine. JAX and PyTorch each answer it; what is not arithmetic is written once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Windows = NDArray[np.int32]  # [rows, context + 1]
Numbers = NDArray[np.floating[Any]]
Arrays = Mapping[str, NDArray[Any]]
SPIKE_STEPS = 50  # before which nothing is called a spike: too little is known of what is usual
SPIKE_MEMORY = 100  # steps that the usual loss and gradient norm look back


@dataclass(frozen=True)
class Devices:
    """What computes, over all workers."""

    count: int
    memory_bytes: int  # of each
    number_bytes: int  # of an activation: 2 in bf16, 4 in fp32
    keeps_scores: bool  # attention's, [heads, context, context]; fused kernels do not


@dataclass(frozen=True)
class Weights:
    """A state as both engines and the outside world understand it: plain arrays under Hugging Face's names.

    Kernels are [in, out], as its Conv1D has them; the vocabulary has no padding; a tied head has no array of its own.
    """

    parameters: Arrays
    means: Arrays = field(default_factory=dict)  # AdamW's averages of the gradients, and of their squares;
    squares: Arrays = field(default_factory=dict)  # empty where only parameters are known
    step: int = 0


class Grader(Protocol):
    """What can say how likely a model finds each token of a text."""

    context: int

    def grade(self, state: Any, windows: Windows) -> tuple[Numbers, NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability after those before it, and whether it is the
        likeliest: both [rows, time]. Where there are several processes, each gives and gets all of them."""
        ...


class Engine(Grader, Protocol):
    """A recipe's model on the devices of all workers. State, batch and cache are the engine's own affair."""

    @property
    def micro_rows(self) -> int:
        """Rows that are computed at a time, over all devices."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """The rows of a batch that this process needs."""
        ...

    def start(self) -> Any:
        """The state before step 0."""
        ...

    def save(self, state: Any, folder: str) -> None:
        """Begin to take this process's part of a state off the devices, for a folder of its own; training goes on."""
        ...

    def wait_for_save(self) -> None:
        """Until that part is written; raises what went wrong. Called by the thread of a save."""
        ...

    def restore(self, folder: str) -> Any:
        """The state whose parts are together in a folder, saved by any number of processes on any mesh."""
        ...

    def load(self, weights: Weights) -> Any:
        """A state with those parameters; averages that are not given are zero, as before step 0."""
        ...

    def put(self, windows: Windows) -> Any:
        """The windows of those rows, on the devices."""
        ...

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Train on a batch: the new state, and metrics that are still on the device. The old state is used up."""
        ...

    def read(self, metrics: Any) -> dict[str, float]:
        """Wait for a step's metrics: loss, grad_norm, lr, and how many steps were skipped, and were spikes, so far."""
        ...

    def score(self, state: Any, windows: Windows) -> Numbers:
        """The loss of each window, a mean over its tokens. Every process gives and gets all of them."""
        ...

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Numbers, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: int, cache: Any) -> tuple[Numbers, Any]:
        """The same for ids [rows, time] that follow `start` earlier ones."""
        ...

    @property
    def device_count(self) -> int:
        """How many devices compute, over all workers."""
        ...

    def describe(self) -> dict[str, str]:
        """Device, number of devices, precision and kernels in use, for people."""
        ...


class Reader(Grader, Protocol):
    """A trained model that is only read: it scores and writes, in this process, on one device, without an optimizer."""

    vocab: int

    def load(self, parameters: Arrays) -> Any:
        """The parameters, under Hugging Face's names, on the device."""
        ...

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Numbers, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: int, cache: Any) -> tuple[Numbers, Any]:
        """The same for one id a row, [rows, 1], that follows `start` earlier ones."""
        ...

    def describe(self) -> dict[str, str]:
        """Device and precision, for people."""
        ...


SHORTEST = 128  # of the lengths that a model is compiled for


def fill(windows: Windows, longest: int, multiple: int = 1) -> Windows:
    """Windows [rows, time + 1] filled up with zeros: the rows to a power of two, the time to a bucket.

    What fills up stands behind or below the rest, which does not see it.
    """
    rows, time = len(windows), windows.shape[1] - 1
    filled = -(-(1 << (rows - 1).bit_length()) // multiple) * multiple
    return np.pad(windows, ((0, filled - rows), (0, bucket(time, longest) - time)))


def bucket(length: int, longest: int) -> int:
    """The length to compile for: a power of two, so that texts of all lengths share a few programs."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)
