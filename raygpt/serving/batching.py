"""Continuous batching: texts join and leave between tokens, each in a slot with its own position, seed and options.

A turn reads one part of one prompt and takes one step for all texts whose prompt is read, so that a long prompt holds
up nobody. The device is always one turn ahead: while it computes, the tokens of the turn before become text.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.engines.base import Drawn, SlotInputs, Slots
from raygpt.engines.token_sampling import fold_seed
from raygpt.errors import first_line
from raygpt.inference.generate import Sample, part_of
from raygpt.serving.texts import Piece, Text, TextOptions


@dataclass(frozen=True, eq=False)
class Served:
    """A checkpoint on the device. It is freed when the last text that it writes has ended."""

    step: int
    state: Any


class BusyError(Exception):
    """No place is left to wait for a slot."""


class Load(NamedTuple):
    """What a batch is doing."""

    running: int  # texts in slots
    waiting: int
    slots: int


class Batch:
    """Texts in the slots of one model. `submit` and `cancel` may be called from any thread, `turn` from one."""

    def __init__(self, slots: Slots, context: int, tokenizer: Tokenizer, served: Served, most_waiting: int = 64):
        self.served = served  # by which texts are written that get a slot from now on
        self._slots, self._context, self._tokenizer = slots, context, tokenizer
        self._most_waiting = most_waiting
        self._waiting: deque[Text] = deque()
        self._unread: deque[Text] = deque()  # in slots, the prompt not read to its end; in the order in which they came
        self._texts: list[Text | None] = [None] * slots.count
        self._results: deque[Callable[[], None]] = deque()  # of what the device was asked to do
        self._rows = _idle_rows(slots.count, context)
        self._biased: set[int] = set()  # slots
        self._wake = threading.Condition()
        self._closed = False
        self.failures = 0  # turns in succession that ended with an error

    def submit(self, options: TextOptions, on_piece: Callable[[Piece], object]) -> Text:
        """Queue a text. `on_piece` gets its pieces, on the thread that takes turns, until one has a `finish`."""
        text = Text(options, Sample(self._tokenizer, options.stop), on_piece)
        with self._wake:
            if self.load.running + self.load.waiting >= self._slots.count + self._most_waiting:
                raise BusyError
            self._waiting.append(text)
            self._wake.notify()
        return text

    def cancel(self, text: Text) -> None:
        """Free a text's slot, or its place in the queue; nothing more of it is passed on."""
        with self._wake:
            text.is_cancelled = True
            if text in self._waiting:
                self._waiting.remove(text)
            self._wake.notify()

    @property
    def load(self) -> Load:
        """Unfinished texts: the slot of one that has ended is freed in the next turn."""
        with self._wake:
            running = sum(not text.is_ended for text in self._texts if text)
            return Load(running, len(self._waiting), self._slots.count)

    def warm_up(self) -> None:
        """Compile every program of the engine, which on a GPU takes seconds: before a text waits for it."""
        every_kind = TextOptions((0,), 2, top_k=1, bias={0: 1.0}, alternatives=1, score_prompt=True)
        self.submit(every_kind, lambda piece: None)
        while self.turn():
            pass

    def run(self) -> None:
        """Take turns until `close`, and sleep where there is nothing to do."""
        while not self._closed:
            try:
                is_busy = self.turn()
                self.failures = 0
            except Exception as error:  # e.g. out of memory: those texts are lost, the next ones may work
                self.failures += 1
                self._fail_all(first_line(error))
                is_busy = True
            if not is_busy:
                with self._wake:
                    if not self._waiting and not self._closed and not any(self._texts):
                        self._wake.wait()

    def close(self) -> None:
        """End `run`; what has not ended fails."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._fail_all("the model is being stopped")

    def turn(self) -> bool:
        """Let texts in, read a part of a prompt, take a step, and pass on the results of the turn before.

        False if there was nothing to do.
        """
        self._free_slots()
        self._fill_slots()
        earlier = len(self._results)
        is_asked = any([self._read_part(), self._step()])
        for _ in range(earlier):
            self._results.popleft()()
        return is_asked or bool(earlier)

    # Slots

    def _free_slots(self) -> None:
        for slot, text in enumerate(self._texts):
            if text and text.is_ended:
                self._texts[slot] = None

    def _fill_slots(self) -> None:
        free = [slot for slot, text in enumerate(self._texts) if text is None]
        with self._wake:
            while free and self._waiting:
                text = self._waiting.popleft()
                text.slot, text.checkpoint = free.pop(0), self.served
                self._texts[text.slot] = text
                self._unread.append(text)
                self._begin(text)

    def _begin(self, text: Text) -> None:
        """Set a slot's options. It stays idle until the prompt is read."""
        rows, slot, options = self._rows, text.slot, text.options
        rows.seeds[slot] = fold_seed(options.seed)
        rows.temperatures[slot] = options.temperature
        rows.top_ks[slot], rows.top_ps[slot] = options.top_k, options.top_p
        if options.bias or slot in self._biased:
            self._slots.bias(slot, options.bias)
            self._biased.add(slot)

    def _fail_all(self, why: str) -> None:
        with self._wake:
            texts = [text for text in self._texts if text] + list(self._waiting)
            self._waiting.clear()
            self._results.clear()
        for text in texts:
            if not text.is_ended:
                text.fail(why)

    # What the device is asked to do

    def _read_part(self) -> bool:
        """The next part of the prompt that has been in its slot for longest, if there is one."""
        while self._unread and (self._unread[0].is_read or self._unread[0].is_ended):
            self._unread.popleft()
        if not self._unread:
            return False
        text = self._unread[0]
        options = text.options
        ids, start, count = part_of(options.prompt, text.read, self._slots.part, self._context)
        hidden = self._slots.read(text.checkpoint.state, text.slot, ids, start)
        first, text.read = text.read - start, start + count
        if options.score_prompt:
            self._score(text, hidden, start, first, count)
        if text.is_read:
            self._draw_first(text, hidden, count - 1)
        return True

    def _score(self, text: Text, hidden: Any, start: int, first: int, end: int) -> None:
        """Of the tokens that follow numbers `first` to `end` of a part; none follows the prompt's last."""
        following = np.zeros(self._slots.part, np.int32)
        known = text.options.prompt[start + 1 : start + 1 + len(following)]
        following[: len(known)] = known
        scores = self._slots.score(text.checkpoint.state, hidden, following)
        count = min(end, len(known)) - first
        self._results.append(lambda: text.add_scores(self._slots.fetch(scores), first, count))

    def _draw_first(self, text: Text, hidden: Any, last: int) -> None:
        options, rows, slot = text.options, self._rows, text.slot
        if not options.tokens:
            self._results.append(text.finish_unread)
            return
        rows.counts[slot] = 0
        top = bool(options.alternatives)
        drawn = self._slots.begin(text.checkpoint.state, slot, hidden, last, _copied(rows), top)
        text.dispatched = 1
        self._results.append(lambda: text.add(self._slots.fetch(drawn), 0))

    def _step(self) -> bool:
        """One token for every text whose prompt is read: a step for each checkpoint that some are written by."""
        drawing = [text for text in self._texts if text and text.is_drawing]
        for served in dict.fromkeys(text.checkpoint for text in drawing):
            self._step_of(served, [text for text in drawing if text.checkpoint is served])
        return bool(drawing)

    def _step_of(self, served: Served, texts: list[Text]) -> None:
        rows = _copied(self._rows)
        rows.live[:], rows.positions[:] = False, self._context - 1
        for text in texts:
            rows.live[text.slot] = True
            rows.positions[text.slot] = len(text.options.prompt) + text.dispatched - 1
            rows.counts[text.slot] = text.dispatched
            text.dispatched += 1
        others = ~rows.live  # whose options must not cost these anything
        rows.top_ks[others], rows.top_ps[others] = 0, 1
        drawn = self._slots.step(served.state, rows, any(text.options.alternatives for text in texts))
        self._results.append(lambda: self._add(self._slots.fetch(drawn), texts))

    def _add(self, drawn: Drawn, texts: list[Text]) -> None:
        for text in texts:
            text.add(drawn, text.slot)


def _idle_rows(count: int, context: int) -> SlotInputs:
    """An idle slot writes at the context's last position, which no later token reads."""
    ints, floats = np.zeros((4, count), np.int32), np.ones((2, count), np.float32)
    return SlotInputs(ints[0] + context - 1, np.zeros(count, bool), ints[1], ints[2], floats[0], ints[3], floats[1])


def _copied(rows: SlotInputs) -> SlotInputs:
    """What is sent to the device must not change before it gets there."""
    return SlotInputs(*(array.copy() for array in rows))
