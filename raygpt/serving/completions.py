"""OpenAI's `/v1/completions`: a request body checked and made into texts to generate, and their answers in its form."""

import difflib
import math
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from raygpt.corpus.tokenizers import END_OF_TEXT, Tokenizer
from raygpt.engines.base import ALTERNATIVES
from raygpt.errors import RaygptError
from raygpt.inference.generate import UNFINISHED, GrowingText
from raygpt.inference.sampling import encode_prompt
from raygpt.serving.texts import Piece, TextOptions, Token

Json = dict[str, Any]
MOST_CHOICES = 128  # texts of one request
MOST_BIASES = 300
MOST_STOPS, LONGEST_STOP = 16, 200  # characters
DEFAULT_TOKENS = 16  # OpenAI's


class RefusedError(Exception):
    """A request that is not served: the HTTP status, what is wrong, and the key that is."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})

    def as_json(self) -> Json:
        """In OpenAI's form."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}


KINDS = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Vocabulary:
    """What a request is checked against."""

    tokenizer: Tokenizer
    context: int

    def name(self, token: int) -> str:
        """A token's text, or its number where it is a part of a character."""
        if token == self.tokenizer.end_of_text:
            return END_OF_TEXT
        text = self.tokenizer.decode([token])
        return f"token_id:{token}" if UNFINISHED in text else text


@dataclass(frozen=True)
class Completion:
    """A checked request: the texts to generate, the prompt's text of each where it is echoed, and how to answer."""

    texts: tuple[TextOptions, ...]
    echoed: tuple[str, ...]
    number: int  # of choices for each prompt
    stream: bool
    usage_in_stream: bool


# From a body to texts


def parse(body: Any, vocabulary: Vocabulary) -> Completion:
    """Refuses a body that asks for what cannot be, in one sentence."""
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body must be a JSON object, not {_kind(body)}")
    refuse_unknown(body, KNOWN, NEUTRAL)
    prompts = _prompts(body.get("prompt"), vocabulary)
    number, echo = _whole(body, "n", 1, 1, MOST_CHOICES), _flag(body, "echo")
    if len(prompts) * number > MOST_CHOICES:
        raise RefusedError(400, f"{len(prompts)} prompts times n={number} is more than {MOST_CHOICES} texts", "n")
    alternatives = _whole(body, "logprobs", None, 0, ALTERNATIVES)
    seed = _whole(body, "seed", None, -(2**63), 2**64 - 1)
    seed = secrets.randbelow(2**31) if seed is None else seed
    options: Json = {
        "temperature": _number(body, "temperature", 1.0, 0, 100),
        "top_k": _top_k(body),
        "top_p": _number(body, "top_p", 1.0, 0, 1, above=True),
        "stop": _stops(body.get("stop")),
        "bias": _biases(body.get("logit_bias"), vocabulary.tokenizer.vocab),
        "alternatives": alternatives,
        "score_prompt": echo and alternatives is not None,
    }
    if body.get("best_of") not in (None, number):
        raise RefusedError(400, "best_of is not supported beyond n; leave it out", "best_of")
    made = [
        (ids, _tokens(body, len(ids), echo, vocabulary), seed + choice) for ids in prompts for choice in range(number)
    ]
    return Completion(
        tuple(TextOptions(tuple(ids), tokens, seed=own, **options) for ids, tokens, own in made),
        tuple(vocabulary.tokenizer.decode(ids) if echo else "" for ids, _, _ in made),
        number,
        _flag(body, "stream"),
        _include_usage(body.get("stream_options")),
    )


KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "echo", "logprobs"),
    *("stream", "stream_options", "logit_bias", "user", "best_of"),
}
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "suffix": ""}


def refuse_unknown(body: Json, known: Set[str], neutral: Mapping[str, Any]) -> None:
    """Refuses a key that would have no effect. `neutral` are keys that other servers know, each with the value that
    changes nothing, which is accepted."""
    for key, value in body.items():
        if key in neutral:
            if value not in (None, neutral[key]):
                raise RefusedError(400, f"{key} is not supported; leave it out", key)
        elif key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise RefusedError(400, f"unknown key {key[:100]!r}; {hint}", key[:100])


def _prompts(given: Any, vocabulary: Vocabulary) -> list[list[int]]:
    """Ids of each prompt: a text, several, ids, or lists of ids; without one a document begins."""
    if given is None:
        return [[vocabulary.tokenizer.end_of_text]]
    if isinstance(given, str):
        return [encoded(given, vocabulary)]
    if not isinstance(given, list):
        raise RefusedError(400, f"prompt must be a text, token ids, or a list of either, not {_kind(given)}", "prompt")
    if not given:
        raise RefusedError(400, "prompt is an empty list; leave it out to begin a document", "prompt")
    if len(given) > MOST_CHOICES and not _is_whole(given[0]):
        raise RefusedError(400, f"{len(given)} prompts are more than {MOST_CHOICES}; send several requests", "prompt")
    if _is_whole(given[0]):
        return [_prompt_ids(given, vocabulary)]
    return [encoded(part, vocabulary) if isinstance(part, str) else _prompt_ids(part, vocabulary) for part in given]


def encoded(text: str, vocabulary: Vocabulary) -> list[int]:
    """The ids of a prompt."""
    try:
        ids: list[int] = encode_prompt(vocabulary.tokenizer, text, "prompt").tolist()
    except RaygptError as error:
        raise RefusedError(400, str(error), "prompt") from None
    return ids


def _prompt_ids(given: Any, vocabulary: Vocabulary) -> list[int]:
    if not isinstance(given, list):
        kind = "both mixed" if _is_whole(given) else _kind(given)
        raise RefusedError(400, f"prompt must be a text, token ids, or a list of either, not {kind}", "prompt")
    if not given:
        raise RefusedError(400, "prompt has an empty list of token ids; leave it out", "prompt")
    return checked_ids(given, vocabulary, "prompt")


def checked_ids(given: Sequence[Any], vocabulary: Vocabulary, key: str) -> list[int]:
    """Token ids, each of which must be one of the vocabulary."""
    vocab = vocabulary.tokenizer.vocab
    for number in given:
        if not _is_whole(number):
            kind = "a text: not both mixed" if isinstance(number, str) else _kind(number)
            raise RefusedError(400, f"{key} must have whole numbers as token ids, not {kind}", key)
        if not 0 <= number < vocab:
            raise RefusedError(400, f"{key} has {_short(number)}, and token ids go from 0 to {vocab - 1}", key)
    return list(given)


def _tokens(body: Json, length: int, echo: bool, vocabulary: Vocabulary) -> int:
    """The most tokens to draw after a prompt."""
    context = vocabulary.context
    least = 0 if echo else 1
    asked = _whole(body, "max_tokens", None, least, 10**9)
    wanted = asked if asked is not None else min(DEFAULT_TOKENS, context - length)
    if length + wanted > context or wanted < least:
        said = f"the prompt has {length} token{'s' if length != 1 else ''}"
        said += f" and max_tokens is {asked}" if asked else ""
        key = "max_tokens" if asked and length < context else "prompt"
        raise RefusedError(400, f"{said}, and the model sees {context}; shorten the prompt or the answer", key)
    return wanted


def _top_k(body: Json) -> int:
    given = _whole(body, "top_k", 0, -1, 2**31 - 1)
    return max(0, given or 0)  # -1 is what vLLM's clients write for all


def _stops(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RefusedError(400, "stop must be a text or a list of texts", "stop")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        most = f"up to {MOST_STOPS} texts of up to {LONGEST_STOP} characters"
        raise RefusedError(400, f"stop may have {most}", "stop")
    return tuple(stop for stop in stops if stop)


def _biases(given: Any, vocab: int) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > MOST_BIASES:
        raise RefusedError(
            400, f"logit_bias must be an object of up to {MOST_BIASES} token ids and numbers", "logit_bias"
        )
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) >= vocab:
            raise RefusedError(
                400, f"logit_bias has {_short(key)}, and token ids go from 0 to {vocab - 1}", "logit_bias"
            )
        found[int(key)] = _bias(key, value)
    return found


def _bias(token: str, value: Any) -> float:
    try:
        if value is None:
            raise RefusedError(400, "logit_bias must be a number, not null", "logit_bias")
        return _number({"logit_bias": value}, "logit_bias", 0.0, -100, 100)
    except RefusedError as error:
        raise RefusedError(400, f"of token {token}: {error.message}", "logit_bias") from None


def _include_usage(given: Any) -> bool:
    if given is None:
        return False
    if not isinstance(given, dict):
        raise RefusedError(400, f"stream_options must be an object, not {_kind(given)}", "stream_options")
    refuse_unknown(given, {"include_usage"}, {"include_obfuscation": False})
    return _flag(given, "include_usage")


def _whole(body: Json, key: str, default: int | None, least: int, most: int) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not _is_whole(value):
        raise RefusedError(400, f"{key} must be a whole number, not {_said(value)}", key)
    if not least <= value <= most:
        raise RefusedError(400, f"{key} is {_short(value)}, and must be between {least} and {most}", key)
    return value


def _number(body: Json, key: str, default: float, least: float, most: float, above: bool = False) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError(400, f"{key} must be a number, not {_kind(value)}", key)
    if not least <= value <= most or (above and value == least) or not math.isfinite(value):
        limits = f"above {least} and at most {most}" if above else f"from {least} to {most}"
        raise RefusedError(400, f"{key} is {_short(value)}, and must be {limits}", key)
    return float(value)


def _flag(body: Json, key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(400, f"{key} must be true or false, not {_kind(value)}", key)
    return bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _said(value: Any) -> str:
    """A fraction as it is, other values by their kind."""
    return _short(value) if isinstance(value, float) else _kind(value)


def _short(value: Any) -> str:
    """A value as text; Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    return repr(value)[:60]


# From pieces to answers


@dataclass
class Choice:
    """One text of an answer, as its pieces come."""

    index: int
    options: TextOptions
    echoed: str
    vocabulary: Vocabulary
    drawn: int = 0
    step: int = 0
    is_begun: bool = False

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.vocabulary.tokenizer)

    def as_json(self, pieces: Sequence[Piece]) -> Json:
        """The pieces, joined, as a choice of OpenAI's."""
        first = "" if self.is_begun else self.echoed
        self.is_begun = True
        tokens = [token for piece in pieces for token in (*piece.prompt, *piece.tokens)]
        logprobs = None if self.options.alternatives is None else self._logprobs(tokens)
        text = first + "".join(piece.text for piece in pieces)
        self.drawn, self.step = pieces[-1].drawn, pieces[-1].step
        finish = pieces[-1].finish
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish, "step": self.step}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        names, offsets = [self.vocabulary.name(token.id) for token in tokens], []
        for token in tokens:
            offsets.append(len(self.growing.text.rstrip(UNFINISHED)))  # a part of a character is where that begins
            self.growing.add(token.id)
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, value in (*token.top, (token.id, token.logprob)):
            found.setdefault(self.vocabulary.name(other), value)
        return found


def usage(completion: Completion, choices: Sequence[Choice]) -> Json:
    """Tokens read and drawn; a prompt counts once, however many choices follow it."""
    prompt = sum(len(options.prompt) for options in completion.texts[:: completion.number])
    drawn = sum(choice.drawn for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
