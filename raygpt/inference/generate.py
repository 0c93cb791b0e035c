"""Generates text from a prompt, streamed, until a stop string, the end of the document or a maximum length."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from raygpt.corpus.tokenizers import Tokenizer
from raygpt.inference.loaded import LoadedModel
from raygpt.inference.sampling import encode_prompt, stream

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


class Decoder:
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
        self._decoder = Decoder(self.tokenizer)

    def add(self, token: int) -> str:
        """The text that became final with this token."""
        if self.ended:
            return ""
        if token == self.tokenizer.end_of_text:
            self.ended_early = True
            return self.finish()
        self.ids.append(token)
        whole = self._decoder.add(token)
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
        return self._grow(self._decoder.text)

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
    random = np.random.default_rng(options.seed)
    on_context_full = _noted_once(note, loaded.reader.context)
    for done in range(0, samples, GROUP):
        texts = [Sample(loaded.tokenizer, options.stop) for _ in range(min(GROUP, samples - done))]
        drawn = stream(
            loaded.reader,
            loaded.state,
            np.tile(ids, (len(texts), 1)),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=random,
            on_context_full=on_context_full,
        )
        for count, tokens in zip(range(options.tokens), drawn, strict=False):
            shown = [text.add(int(token)) for text, token in zip(texts, tokens, strict=True)]
            show(shown[0])
            progress(done, count + 1)
            if all(text.ended for text in texts):
                break
        rest = [text.finish() for text in texts]
        show(rest[0])
        yield texts


def _noted_once(note: Callable[[str], None], context: int) -> Callable[[int], None]:
    said: list[int] = []

    def on_context_full(kept: int) -> None:
        if not said:
            note(f"the context is {context} tokens; whenever it is full, the last {kept} are read again")
        said.append(kept)

    return on_context_full
