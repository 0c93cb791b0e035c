"""What the training loop asks of an engine. JAX and PyTorch each answer it; what is not arithmetic is written once."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Windows = NDArray[np.int32]  # [rows, context + 1]
Numbers = NDArray[np.floating[Any]]


class Engine(Protocol):
    """A recipe's model on the devices of all workers. State, batch and cache are the engine's own affair."""

    context: int

    @property
    def rows(self) -> Sequence[int]:
        """The rows of a batch that this process needs."""
        ...

    def start(self) -> Any:
        """The state before step 0."""
        ...

    def save(self, state: Any, folder: str) -> None:
        """Begin to write a state into a folder; training goes on meanwhile."""
        ...

    def wait_for_save(self) -> None:
        """Until it is written; raises what went wrong."""
        ...

    def restore(self, folder: str) -> Any:
        """The state that was saved in a folder, by any number of processes on any mesh."""
        ...

    def put(self, windows: Windows) -> Any:
        """The windows of those rows, on the devices."""
        ...

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Train on a batch: the new state, and metrics that are still on the device. The old state is used up."""
        ...

    def read(self, metrics: Any) -> dict[str, float]:
        """Wait for a step's metrics: loss, grad_norm and lr."""
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

    def describe(self) -> dict[str, str]:
        """Device, number of devices, precision and kernels in use, for people."""
        ...
