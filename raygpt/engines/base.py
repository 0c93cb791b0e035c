"""The interface of an engine, which JAX and PyTorch each implement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Windows = NDArray[np.int32]  # [rows, context + 1]
Numbers = NDArray[np.floating[Any]]
Arrays = Mapping[str, NDArray[Any]]
Positions = int | NDArray[np.int32]  # one for all rows, or one of each row


@dataclass(frozen=True)
class Devices:
    """The devices of all workers."""

    count: int
    memory_bytes: int  # of each
    number_bytes: int  # of an activation: 2 in bf16, 4 in fp32
    keeps_scores: bool  # attention's, [heads, context, context]; fused kernels do not
    platform: str = "cpu"  # or gpu, tpu
    fused: bool = False  # whether JAX computes with its own kernels


@dataclass(frozen=True)
class PlainState:
    """A state that both engines understand: plain arrays with the names and axes of the description.

    The vocabulary has no padding; a tied head has no separate array.
    """

    parameters: Arrays
    slots: Mapping[str, Arrays] = field(default_factory=dict)
    """The optimizer's: AdamW's `means` and `squares`, Muon's `momentum`, each of the parameters that have it."""
    step: int = 0


class TokenScorer(Protocol):
    """Computes the log-probability of each token of a text."""

    context: int

    def token_logprobs(self, state: Any, windows: Windows) -> tuple[Numbers, NDArray[np.bool_]]:
        """For windows [rows, time + 1]: every token's log-probability given those before it, and whether it is the
        likeliest; both [rows, time]. If there are several processes, each passes and gets all rows."""
        ...


class Engine(TokenScorer, Protocol):
    """A recipe's model on the devices of all workers. State, batch and cache are opaque to callers."""

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch, over all devices."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """The rows of a batch that this process needs."""
        ...

    def start(self) -> Any:
        """The state before step 0."""
        ...

    def save(self, state: Any, folder: str) -> None:
        """Start to save this process's part of a state to a folder of its own; training can continue at once."""
        ...

    def wait_for_save(self) -> None:
        """Wait until that part is written; raises its error. Called by the save thread."""
        ...

    def restore(self, folder: str) -> Any:
        """The state whose parts are in a folder, saved by any number of processes on any mesh."""
        ...

    def load(self, plain: PlainState) -> Any:
        """A state with these parameters; slots that are not given are zero, as before step 0."""
        ...

    def put(self, windows: Windows, weights: Numbers | None = None) -> Any:
        """Copy the windows of this process's rows to the devices. `weights` [rows, context] weight each target in the
        loss, which is divided by their sum; by default each is 1."""
        ...

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Train on a batch. Returns the new state, and metrics still on the device. The old state becomes invalid."""
        ...

    def read(self, metrics: Any) -> dict[str, float]:
        """Wait for a step's metrics: loss, grad_norm, lr, and the numbers of skipped steps and of spikes so far."""
        ...

    def spikes(self, state: Any) -> float:
        """How many spikes a state has counted."""
        ...

    def window_losses(self, state: Any, windows: Windows) -> Numbers:
        """The mean loss of each window. Every process passes and gets all of them."""
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
        """Device, number of devices, precision and kernels in use, for the console."""
        ...


class Reader(TokenScorer, Protocol):
    """A trained model for inference: in this process, on one device, without an optimizer."""

    vocab: int

    def load(self, parameters: Arrays) -> Any:
        """The parameters, as `PlainState` has them, on the device."""
        ...

    def prefill(self, state: Any, ids: NDArray[np.int32]) -> tuple[Numbers, Any]:
        """Read prompts [rows, time]: logits [rows, vocabulary] of what follows, and a cache."""
        ...

    def decode(self, state: Any, ids: NDArray[np.int32], start: Positions, cache: Any) -> tuple[Numbers, Any]:
        """The same for one id a row, [rows, 1], that follows `start` earlier ones."""
        ...

    def describe(self) -> dict[str, str]:
        """Device and precision, for the console."""
        ...


class SlotInputs(NamedTuple):
    """Inputs of a step by slot: arrays [slots], of NumPy or on the device."""

    positions: Any  # int32, of the token that is read; the context's last one where a slot is idle
    live: Any  # bool
    seeds: Any  # int32
    counts: Any  # int32, tokens of the text that were drawn before
    temperatures: Any  # fp32; 0 takes the likeliest token
    top_ks: Any  # int32; 0 keeps all
    top_ps: Any  # fp32; 1 keeps all

    def of(self, slot: int) -> "SlotInputs":
        """Those of one slot, each [1]."""
        return SlotInputs(*(array[slot : slot + 1] for array in self))

    @property
    def limited(self) -> Any:
        """Which of them draw from a part of the vocabulary only: bool [slots]."""
        return (self.top_ks > 0) | (self.top_ps < 1)

    def packed(self) -> NDArray[np.int32]:
        """All of them as one array to send to the device, int32 [fields, slots]; fp32 bit for bit."""
        return np.stack([a.view(np.int32) if a.dtype == np.float32 else a.astype(np.int32) for a in self])

    @classmethod
    def unpacked(cls, numbers: Any, float32: Any) -> "SlotInputs":
        """Of what `packed` gave, on the device, whose library calls fp32 `float32`."""
        rows = cls(*numbers)
        floats = {name: getattr(rows, name).view(float32) for name in ("temperatures", "top_ps")}
        return rows._replace(live=rows.live > 0, **floats)


class Drawn(NamedTuple):
    """Tokens that were drawn, or read, with their log-probabilities."""

    tokens: Any  # [rows]
    logprobs: Any  # [rows]
    top_ids: Any  # [rows, ALTERNATIVES], the likeliest first; None unless requested
    top_logprobs: Any


PART = {"cpu": 32, "gpu": 256}  # tokens of a prompt that are read between two steps: about as long as a few of those
ALTERNATIVES = 20  # likeliest tokens that are known at each place of a text


class Slots(Protocol):
    """Texts that are generated side by side: each slot has a part of the key-value cache, a position, a seed.

    Shapes are fixed and rows are computed alike, so that a text depends on its own prompt, seed and options only: never
    on its slot, nor on the other texts. Calls return before the device has computed, with what `fetch` waits for.
    """

    count: int
    part: int  # prompts are read in parts of so many tokens

    def read(self, state: Any, slot: int, ids: NDArray[np.int32], start: int) -> Any:
        """Read a part of a prompt, [part], after `start` earlier tokens: its hidden states."""
        ...

    def score(self, state: Any, hidden: Any, following: NDArray[np.int32]) -> Any:
        """The log-probabilities of the tokens [part] that follow those of a part."""
        ...

    def begin(self, state: Any, slot: int, hidden: Any, last: int, rows: SlotInputs, top: bool) -> Any:
        """Draw a text's first token, [1], after number `last` of its prompt's last part."""
        ...

    def step(self, state: Any, rows: SlotInputs, top: bool) -> Any:
        """Read the last token of every live slot and draw the next one, [slots]; `top` asks for alternatives."""
        ...

    def bias(self, slot: int, values: Mapping[int, float]) -> None:
        """What is added to the logits of a slot's tokens, from now on."""
        ...

    def fetch(self, drawn: Any) -> Drawn:
        """What a call drew or read, as NumPy arrays."""
        ...
