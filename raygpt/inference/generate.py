"""Generates text from a prompt, streamed, until a stop string, the end of the document or a maximum length."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines import make_slots
from raygpt.engines.base import SlotInputs, Slots
from raygpt.inference.loaded import LoadedModel
from raygpt.inference.sampling import encode_prompt, rows_of

GROUP = 64  # texts that are generated together: their key-value caches are in memory at the same time
UNFINISHED = "�"  # what an incomplete UTF-8 character decodes to
WINDOW = 16  # tokens after which a text is decoded from a later token on


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample, and when to stop."""

    tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()


class GrowingText:
    """The text of ids that come one by one.

    Only the last ones are decoded, after a few whose text is known: what a token adds may depend on the one before it,
    and to decode all of a long text for each token would take longer than the model does.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.text = ""
        self._decode = tokenizer.decode
        self._before = ""  # the text of all but the new ids
        self._known: list[int] = []  # the last of those
        self._new: list[int] = []

    def add(self, token: int) -> str:
        """The text of all ids with this one."""
        self._new.append(token)
        tail = self._decode(self._known + self._new)
        self.text = self._before + tail[len(self._decode(self._known)) :]
        if len(self._new) >= WINDOW and not tail.endswith(UNFINISHED):
            self._before, self._known, self._new = self.text, self._new, []
        return self.text


@dataclass
class Sample:
    """One text as it is generated. It ends with the document or at a stop string, which is not part of it."""

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    whole: str = ""  # of all ids, without half a character
    text: str = ""  # final: without what may become a stop string too
    ended: bool = False
    ended_early: bool = False  # before the maximum number of tokens
    at_stop_string: bool = False

    def __post_init__(self) -> None:
        self._growing = GrowingText(self.tokenizer)

    def add(self, token: int) -> str:
        """The text that became final with this token."""
        if self.ended:
            return ""
        if token == self.tokenizer.end_of_text:
            self.ended_early = True
            return self.finish()
        self.ids.append(token)
        whole = self._growing.add(token)
        found = min((place for stop in self.stop if (place := whole.find(stop)) >= 0), default=None)
        if found is not None:
            self.ended = self.ended_early = self.at_stop_string = True
            return self._grow(whole[:found])
        self.whole = whole.rstrip(UNFINISHED)
        return self._grow(self.whole[: len(self.whole) - self._held_back(self.whole)])

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.ended:
            return ""
        self.ended = True
        return self._grow(self._growing.text)

    def _grow(self, text: str) -> str:
        more, self.text = text[len(self.text) :], max(self.text, text, key=len)
        return more

    def _held_back(self, text: str) -> int:
        """How many of the last characters may be the start of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1)
        tails = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in tails if any(stop.startswith(text[-n:]) for stop in self.stop)), 0)


def generate(
    loaded: LoadedModel,
    prompt: str | None,
    options: SamplingOptions,
    samples: int = 1,
    *,
    show: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Sample]:
    """Continue a prompt, or start a new document without one. `show` gets the first sample's text as it comes."""
    groups = generate_in_groups(loaded, prompt, options, samples, show=show, note=note)
    return list(itertools.chain.from_iterable(groups))


def generate_in_groups(
    loaded: LoadedModel,
    prompt: str | None,
    options: SamplingOptions,
    samples: int = 1,
    *,
    show: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda texts, tokens: None,
) -> Iterator[list[Sample]]:
    """The samples of `generate` in groups, each as soon as it is done: all at once may not fit the memory.

    `show` gets the text of each group's first sample as it comes; `progress` gets the number of texts that are done,
    and how many tokens those of the next group have.
    """
    ids = encode_prompt(loaded.tokenizer, prompt)
    on_context_full = _noted_once(note, loaded.reader.context)
    slots = make_slots(loaded.engine, loaded.reader, min(GROUP, samples))
    for done in range(0, samples, GROUP):
        texts = [Sample(loaded.tokenizer, options.stop) for _ in range(min(GROUP, samples - done))]
        own = replace(options, seed=options.seed + done)
        drawn = _draws(loaded, slots, ids.tolist(), own, len(texts), on_context_full)
        for count, tokens in zip(range(options.tokens), drawn, strict=False):
            shown = [text.add(int(token)) for text, token in zip(texts, tokens, strict=True)]
            show(shown[0])
            progress(done, count + 1)
            if all(text.ended for text in texts):
                break
        rest = [text.finish() for text in texts]
        show(rest[0])
        yield texts


def _draws(
    loaded: LoadedModel,
    slots: Slots,
    prompt: list[int],
    options: SamplingOptions,
    samples: int,
    on_context_full: Callable[[int], None],
) -> Iterator[NDArray[np.int32]]:
    """Tokens without end, [samples] at a time, each sample in a slot as `raygpt serve` has them; sample n has seed + n.

    When the context is full, its last half is read again, and `on_context_full` is called with its number of tokens.
    """
    state, context = loaded.state, loaded.reader.context
    half = max(1, context // 2)
    rows = rows_of(slots.count, options.temperature, options.top_k, options.top_p, options.seed)
    seen = [list(prompt) for _ in range(samples)]
    while True:
        if len(seen[0]) > context:
            seen = [ids[-half:] for ids in seen]
            on_context_full(half)
        first = [_begun(slots, state, slot, ids, rows, context) for slot, ids in enumerate(seen)]
        drawn = np.concatenate(first)
        for place in range(len(seen[0]), context + 1):
            yield drawn
            seen = [[*ids, int(token)] for ids, token in zip(seen, drawn, strict=True)]
            rows = rows._replace(positions=rows.positions * 0 + place, counts=rows.counts + 1)
            if place < context:
                drawn = slots.fetch(slots.step(state, rows, False)).tokens[:samples]


def _begun(slots: Slots, state: Any, slot: int, prompt: list[int], rows: SlotInputs, context: int) -> NDArray[np.int32]:
    """The first token, [1], after a prompt, which is read in parts."""
    read = 0
    while read < len(prompt):
        ids, start, count = part_of(prompt, read, slots.part, context)
        hidden, read = slots.read(state, slot, ids, start), start + count
    tokens: NDArray[np.int32] = slots.fetch(slots.begin(state, slot, hidden, count - 1, rows, False)).tokens
    return tokens


def part_of(prompt: Sequence[int], read: int, size: int, context: int) -> tuple[NDArray[np.int32], int, int]:
    """The part [size] of a prompt that comes after its first `read` tokens, padded; its start and number of tokens.

    Parts begin at multiples of their size, whatever the prompt. Only where the context ends before a part would, the
    part begins within the one before.
    """
    start = min(read, context - size)
    tokens, ids = prompt[start : start + size], np.zeros(size, np.int32)
    ids[: len(tokens)] = tokens
    return ids, start, len(tokens)


def _noted_once(note: Callable[[str], None], context: int) -> Callable[[int], None]:
    said: list[int] = []

    def on_context_full(kept: int) -> None:
        if not said:
            note(f"the context is {context} tokens; whenever it is full, the last {kept} are read again")
        said.append(kept)

    return on_context_full
