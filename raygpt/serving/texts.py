"""The options of a text, and the text as it is generated, token by token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raygpt.engines.base import Drawn
from raygpt.inference.generate import Sample


@dataclass(frozen=True)
class TextOptions:
    """How one text is to be generated; a request may ask for several. The values have been checked."""

    prompt: tuple[int, ...]
    tokens: int  # the most to draw
    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)  # of tokens' logits
    alternatives: int | None = None  # likeliest tokens to give at each place; None: no log-probabilities in the answer
    score_prompt: bool = False  # give the log-probabilities of the prompt's tokens too


BUSY = "busy"  # the `finish` of a text that was not let in: as many are waiting as may


class Token(NamedTuple):
    """A token, its log-probability and the likeliest ones in its place, the first of a text without either."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), the likeliest first


class Piece(NamedTuple):
    """A part of an answer, as it becomes final."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()  # in the first piece, with `score_prompt`
    finish: str | None = None  # "stop" or "length" in the last one, BUSY or "error: …" if it came to an end otherwise
    step: int = 0  # of the checkpoint that all of it comes from
    drawn: int = 0  # tokens so far, with those of a stop string


@dataclass(eq=False)
class Text:
    """A text that is being generated in a slot, or waits for one."""

    options: TextOptions
    sample: Sample
    on_piece: Callable[[Piece], object]
    checkpoint: Any = None  # whose weights it is generated with, from its first part to its last token
    slot: int = -1
    read: int = 0  # tokens of the prompt that were sent to the device
    dispatched: int = 0  # tokens that were drawn, or are being drawn
    drawn: int = 0  # tokens that came back
    prompt_scores: list[Token] = field(default_factory=list)
    held: list[tuple[int, Token]] = field(default_factory=list)  # tokens of text that is not final, by their place
    is_cancelled: bool = False

    @property
    def is_ended(self) -> bool:
        return self.sample.ended or self.is_cancelled

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt was sent to the device."""
        return self.read >= len(self.options.prompt)

    @property
    def is_drawing(self) -> bool:
        """Whether it takes part in the next step."""
        return self.is_read and not self.is_ended and self.dispatched < self.options.tokens

    def add_scores(self, drawn: Drawn, first: int, count: int) -> None:
        """What the model thought of `count` tokens of the prompt, whose numbers in `drawn` begin at `first`."""
        if not self.prompt_scores:
            self.prompt_scores.append(Token(self.options.prompt[0], None))
        self.prompt_scores += [self._token(drawn, row) for row in range(first, first + count)]

    def add(self, drawn: Drawn, row: int) -> None:
        """A token came back: pass on the text that is final with it."""
        if self.is_ended:
            return
        self.drawn += 1
        token, place, before = self._token(drawn, row), len(self.sample.whole), len(self.sample.ids)
        grown = self.sample.add(token.id)
        if len(self.sample.ids) > before:  # not the end of the document
            self.held.append((place, token))
        if self.drawn == self.options.tokens:
            grown += self.sample.finish()
        self._pass_on(grown)

    def finish_unread(self) -> None:
        """End a text of no tokens."""
        self.sample.finish()
        self._pass_on("")

    def fail(self, why: str) -> None:
        """End it with an error."""
        self.is_cancelled = True
        self.on_piece(Piece(finish=f"error: {why}", drawn=self.drawn))

    def _pass_on(self, grown: str) -> None:
        final, ended = len(self.sample.text), self.sample.ended
        is_all = ended and not self.sample.at_stop_string
        out = [token for place, token in self.held if is_all or place < final]
        self.held = [(place, token) for place, token in self.held if place >= final]
        finish = ("stop" if self.sample.ended_early else "length") if ended else None
        if not (grown or out or finish):
            return
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        self.on_piece(Piece(grown, tuple(out), scores, finish, self.checkpoint.step, self.drawn))

    def _token(self, drawn: Drawn, row: int) -> Token:
        identity, logprob = int(drawn.tokens[row]), float(drawn.logprobs[row])
        wanted = self.options.alternatives
        if not wanted:
            return Token(identity, logprob)
        top = zip(_numbers(drawn.top_ids[row][:wanted]), _numbers(drawn.top_logprobs[row][:wanted]), strict=True)
        return Token(identity, logprob, tuple((int(other), value) for other, value in top))


def _numbers(array: NDArray[np.generic]) -> list[Any]:
    numbers: list[Any] = array.tolist()
    return numbers
