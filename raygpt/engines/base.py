"""What the training loop asks of an engine. JAX and PyTorch each answer it; what is not arithmetic is written once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Windows = NDArray[np.int32]  # [rows, context + 1]
Numbers = NDArray[np.floating[Any]]
Arrays = Mapping[str, NDArray[Any]]
Positions = int | NDArray[np.int32]  # one for all rows, or one of each row


@dataclass(frozen=True)
class Devices:
    """What computes, over all workers."""

    count: int
    memory_bytes: int  # of each
    number_bytes: int  # of an activation: 2 in bf16, 4 in fp32
    keeps_scores: bool  # attention's, [heads, context, context]; fused kernels do not


@dataclass(frozen=True)
class Weights:
    """A state as both engines understand it: plain arrays under the names, and with the axes, of the description.

    The vocabulary has no padding; a tied head has no array of its own.
    """

    parameters: Arrays
    slots: Mapping[str, Arrays] = field(default_factory=dict)  # the optimizer's: `means` and `squares` for AdamW
    step: int = 0


class TokenScorer(Protocol):
    """What can say how likely a model finds each token of a text."""

    context: int

    def token_logprobs(self, state: Any, windows: Windows) -> tuple[Numbers, NDArray[np.bool_]]:
        """Of windows [rows, time + 1] every token's log-probability after those before it, and whether it is the
        likeliest: both [rows, time]. Where there are several processes, each gives and gets all of them."""
        ...


class Engine(TokenScorer, Protocol):
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
        """A state with those parameters; slots that are not given are zero, as before step 0."""
        ...

    def put(self, windows: Windows, weights: Numbers | None = None) -> Any:
        """The windows of those rows, on the devices. `weights` [rows, context] say how much each target counts in the
        loss, which is divided by the sum of all; by default each counts 1."""
        ...

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Train on a batch: the new state, and metrics that are still on the device. The old state is used up."""
        ...

    def read(self, metrics: Any) -> dict[str, float]:
        """Wait for a step's metrics: loss, grad_norm, lr, and how many steps were skipped, and were spikes, so far."""
        ...

    def window_losses(self, state: Any, windows: Windows) -> Numbers:
        """The loss of each window, a mean over its tokens. Every process gives and gets all of them."""
        ...

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Numbers, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: Positions, cache: Any) -> tuple[Numbers, Any]:
        """The same for ids [rows, time] that follow `start` earlier ones."""
        ...

    @property
    def device_count(self) -> int:
        """How many devices compute, over all workers."""
        ...

    def describe(self) -> dict[str, str]:
        """Device, number of devices, precision and kernels in use, for people."""
        ...


class Reader(TokenScorer, Protocol):
    """A trained model that is only read: it scores and writes, in this process, on one device, without an optimizer."""

    vocab: int

    def load(self, parameters: Arrays) -> Any:
        """The parameters, as `Weights` has them, on the device."""
        ...

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Numbers, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: Positions, cache: Any) -> tuple[Numbers, Any]:
        """The same for one id a row, [rows, 1], that follows `start` earlier ones."""
        ...

    def describe(self) -> dict[str, str]:
        """Device and precision, for people."""
        ...
