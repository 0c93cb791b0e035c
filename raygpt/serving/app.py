"""The HTTP server: OpenAI's completions, tokens, health, metrics and the page, for models by name.

It knows nothing of Ray: a model is anything with `Backend`'s methods.
"""

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raygpt.corpus import tokenizers
from raygpt.errors import first_line
from raygpt.serving.completions import (
    Choice,
    Completion,
    Json,
    RefusedError,
    Vocabulary,
    checked_ids,
    encoded,
    parse,
    refuse_unknown,
    usage,
)
from raygpt.serving.guard import Guard, refusal
from raygpt.serving.meters import Meters, RequestMeter
from raygpt.serving.texts import BUSY, Piece, TextOptions

T = TypeVar("T")

RETRY_AFTER_S = 1
CLIENT_GONE = 499  # nginx's status of a client that went away
ASSETS = {  # by path: the file in the package, and its type
    "": ("serving/assets/page.html", "text/html"),
    "page.js": ("serving/assets/page.js", "text/javascript"),
    "models.js": ("serving/assets/models.js", "text/javascript"),
    "page.css": ("serving/assets/page.css", "text/css"),
    "colours.css": ("assets/colours.css", "text/css"),  # those of the reports
}


class Backend(Protocol):
    """A model: `RunModel` in this process, or replicas of it on Ray Serve."""

    async def describe(self) -> Json: ...

    async def status(self) -> Json: ...

    async def losses(self) -> Json: ...

    def stream(self, options: TextOptions) -> AsyncIterator[list[Piece]]: ...


@dataclass(frozen=True)
class Limits:
    """What one request may take."""

    body_bytes: int = 4 * 2**20
    body_s: float = 30.0  # within which a body must have come
    answer_s: float = 600.0


@dataclass(frozen=True)
class Model:
    """A backend and what is known of it."""

    name: str
    backend: Backend
    facts: Json
    vocabulary: Vocabulary

    @property
    def most_texts(self) -> int:
        """That its replicas can have at once, in slots and waiting."""
        each: int = self.facts["slots"] + self.facts["most_waiting"]
        return each * int(self.facts.get("replicas", 1))


async def connect(name: str, backend: Backend) -> Model:
    """Ask a backend what it is."""
    facts = await backend.describe()
    tokenizer = tokenizers.from_description(facts.pop("tokenizer"), name)
    return Model(name, backend, facts, Vocabulary(tokenizer, facts["context"]))


def make_app(models: Sequence[Model], key: str | None = None, limits: Limits | None = None) -> Starlette:
    """The server of these models; the first answers requests that name none. With a key, only who has it is served."""
    server = Server({model.name: model for model in models}, limits or Limits())
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/tokenizer_info", server.tokenizer_info),
        Route("/losses", server.losses),
        Route("/metrics", server.metrics),
        Route("/health", server.health),
        *(Route(f"/{name}", _asset(*asset)) for name, asset in ASSETS.items()),
    ]
    handlers: dict[Any, Any] = {RefusedError: _refused, HTTPException: _http_error, ClientDisconnect: _client_gone}
    app = Starlette(routes=routes, exception_handlers=handlers | {Exception: _failed})
    app.add_middleware(Guard, key=key, open_paths=frozenset({*ASSETS, "health"}))
    return app


class Server:
    """Answers each route."""

    def __init__(self, models: Mapping[str, Model], limits: Limits):
        self._models, self._limits, self._meters = models, limits, Meters()

    async def completions(self, http: HttpRequest) -> Response:
        model, completion = await self._asked(http)
        answer = CompletionAnswer(model, completion, RequestMeter(self._meters, model.name), self._limits.answer_s)
        if not completion.stream:
            return JSONResponse(await _unless_gone(http, answer.whole()))
        events = answer.events()
        try:
            first = await _unless_gone(http, anext(events))  # a refusal is a status, not an event
        except ClientDisconnect:
            await events.aclose()
            raise
        return StreamingResponse(_chained(first, events), media_type="text/event-stream", headers=NO_CACHE)

    async def _asked(self, http: HttpRequest) -> tuple[Model, Completion]:
        """The model of a request and the texts that it asks for; what is refused is counted."""
        name = ""
        try:
            body = await self._body(http)
            model = self._named(body)
            name = model.name
            # In a thread: a long text takes seconds, in which the texts of others go on.
            completion = await asyncio.to_thread(parse, body, model.vocabulary)
            if len(completion.texts) > model.most_texts:
                raise RefusedError(
                    400,
                    f"{len(completion.texts)} texts at once are more than this server takes, {model.most_texts}; "
                    "ask for fewer",
                    "n",
                )
        except RefusedError as error:
            self._meters.requests.labels(name, str(error.status)).inc()
            raise
        return model, completion

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse(
            {"object": "list", "data": [_listed(model, await _status(model)) for model in self._models.values()]}
        )

    async def model(self, http: HttpRequest) -> Response:
        model = self._named({"model": http.path_params["name"]})
        return JSONResponse(_listed(model, await _answered(model.backend.status())))

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        vocabulary, text = self._named(body).vocabulary, _field(body, "prompt", str, "a text")
        refuse_unknown(body, {"model", "prompt"}, {"add_special_tokens": False})
        if text == tokenizers.END_OF_TEXT:
            ids = [vocabulary.tokenizer.end_of_text]
        else:
            ids = await asyncio.to_thread(encoded, text, vocabulary) if text else []
        return JSONResponse({"count": len(ids), "max_model_len": vocabulary.context, "tokens": ids})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        vocabulary, ids = self._named(body).vocabulary, _field(body, "tokens", list, "a list of token ids")
        refuse_unknown(body, {"model", "tokens"}, {})
        return JSONResponse({"prompt": vocabulary.tokenizer.decode(checked_ids(ids, vocabulary, "tokens"))})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        vocabulary = self._named(dict(http.query_params)).vocabulary
        end = {f"{name}_token": tokenizers.END_OF_TEXT for name in ("bos", "eos", "pad")}
        sizes = {"vocab_size": vocabulary.tokenizer.vocab, "model_max_length": vocabulary.context}
        return JSONResponse({"tokenizer_class": "raygpt", **end, **sizes, "chat_template": None})

    async def losses(self, http: HttpRequest) -> Response:
        return JSONResponse(await _answered(self._named(dict(http.query_params)).backend.losses()))

    async def health(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, http: HttpRequest) -> Response:
        for model in self._models.values():
            status = await _status(model)
            for name in ("running", "waiting", "slots", "step"):
                getattr(self._meters, name).labels(model.name).set(status.get(name, math.nan))
        return Response(self._meters.text(), media_type="text/plain; version=0.0.4")

    def _named(self, body: Any) -> Model:
        name = body.get("model") if isinstance(body, dict) else None
        if name is None:
            return next(iter(self._models.values()))
        if not isinstance(name, str) or name not in self._models:
            known = ", ".join(self._models)
            raise RefusedError(404, f"no model {str(name)[:100]!r} is served here; there is {known}", "model")
        return self._models[name]

    async def _body(self, http: HttpRequest) -> Any:
        """The JSON of a request, within the limits."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body must be JSON; send the header Content-Type: application/json")
        try:
            async with asyncio.timeout(self._limits.body_s):
                raw = await self._bytes(http)
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {self._limits.body_s:g} s") from None
        return _parsed(raw)

    async def _bytes(self, http: HttpRequest) -> bytes:
        parts, size, most = [], 0, self._limits.body_bytes
        async for part in http.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise RefusedError(413, f"the body is larger than {most:,} bytes; send less at once")
        return b"".join(parts)


class CompletionAnswer:
    """The texts of one request, generated at the same time."""

    def __init__(self, model: Model, completion: Completion, meter: RequestMeter, limit_s: float):
        self._model, self._completion, self._meter, self._limit_s = model, completion, meter, limit_s
        self._deadline = time.monotonic() + limit_s
        pairs = enumerate(zip(completion.texts, completion.echoed, strict=True))
        self._choices = [Choice(n, options, echoed, model.vocabulary) for n, (options, echoed) in pairs]
        self._about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}

    async def whole(self) -> Json:
        """As one object."""
        pieces: dict[int, list[Piece]] = {choice.index: [] for choice in self._choices}
        async for index, more in self._pieces():
            pieces[index] += more
        made = [choice.as_json(pieces[choice.index]) for choice in self._choices]
        return self._message(made) | {"usage": usage(self._completion, self._choices)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As server-sent events. An error after the first is an event too: the status has been sent."""
        is_begun = False
        try:
            async for index, pieces in self._pieces():
                yield _event(self._message([self._choices[index].as_json(pieces)]))
                is_begun = True
            if self._completion.usage_in_stream:
                message = self._message([]) | {"system_fingerprint": self._mark(self._choices[-1].step)}
                yield _event(message | {"usage": usage(self._completion, self._choices)})
        except RefusedError as error:
            if not is_begun:
                raise
            yield _event(error.as_json())
        yield b"data: [DONE]\n\n"

    def _message(self, choices: list[Json]) -> Json:
        mark = self._mark(max((choice["step"] for choice in choices), default=0))
        return {**self._about, "model": self._model.name, "system_fingerprint": mark, "choices": choices}

    def _mark(self, step: int) -> str:
        return f"{self._model.name}@{step}"

    async def _pieces(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """(choice, its next pieces) until all have ended. To leave the iteration ends the texts."""
        queue: asyncio.Queue[tuple[int, list[Piece]] | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(self._collect(choice, queue)) for choice in self._choices]
        unfinished, status = len(tasks), CLIENT_GONE
        try:
            while unfinished:
                left = self._deadline - time.monotonic()
                if left <= 0:  # also where pieces are waiting, for which no timeout comes
                    raise TimeoutError
                # Not wait_for, which in Python 3.11 ignores a cancellation that comes together with a result.
                async with asyncio.timeout(left):
                    found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                self._meter.token()
                unfinished -= found[1][-1].finish is not None
                yield found
            status = 200
        except TimeoutError:
            status = 504
            raise RefusedError(504, f"the answer took longer than {self._limit_s:g} s; ask for less") from None
        except RefusedError as error:
            status = error.status
            raise
        finally:
            prompt = usage(self._completion, self._choices)["prompt_tokens"]
            # Before any `await`, each of which is cancelled where the client of a stream has left.
            self._meter.end(prompt, sum(choice.drawn for choice in self._choices), status)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their slots are free before the client hears of it

    async def _collect(self, choice: Choice, queue: "asyncio.Queue[Any]") -> None:
        try:
            async with contextlib.aclosing(self._model.backend.stream(choice.options)) as stream:  # type: ignore[type-var]
                async for pieces in stream:
                    choice.drawn = pieces[-1].drawn
                    finish = pieces[-1].finish or ""
                    if finish == BUSY:
                        message = "too many texts are waiting; try again later"
                        raise RefusedError(429, message, headers={"Retry-After": str(RETRY_AFTER_S)})
                    if finish.startswith("error: "):
                        raise RefusedError(500, f"the model failed: {finish}; try again")
                    await queue.put((choice.index, pieces))
        except RefusedError as error:
            await queue.put(error)
        except Exception as error:  # this text is lost, the next ones are served
            await queue.put(_not_there(error))


NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def _asset(file: str, kind: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def serve(http: HttpRequest) -> Response:
        text = (resources.files("raygpt") / file).read_text("utf-8")
        return Response(text, media_type=kind, headers=SAFE)

    return serve


def _listed(model: Model, status: Json) -> Json:
    """A model as `/v1/models` lists it, with what the page shows of it."""
    about = {"id": model.name, "object": "model", "owned_by": "raygpt", "max_model_len": model.vocabulary.context}
    return {**about, **model.facts, **status}


async def _status(model: Model) -> Json:
    """What a model is doing; nothing while it is not there: the others are."""
    try:
        return await _answered(model.backend.status())
    except RefusedError:
        return {}


async def _answered(call: Awaitable[Json]) -> Json:
    """A backend's answer; refuses in one line where it has none."""
    try:
        return await call
    except Exception as error:
        raise _not_there(error) from None


def _not_there(error: Exception) -> RefusedError:
    """Of Ray's errors, e.g. for a replica that died: another is started."""
    return RefusedError(503, f"the model is not there: {first_line(error)[:200]}; try again")


def _field(body: Any, key: str, kind: type, meant: str) -> Any:
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise RefusedError(400, f"{key} must be {meant}", key)
    return value


def _parsed(raw: bytes) -> Any:
    """The JSON of a body."""
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\ud" in raw.lower():  # an escape, perhaps of half a character
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise RefusedError(400, "the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise RefusedError(400, "the body has half of a surrogate pair, which is no character; send both") from None
    except RecursionError:
        raise RefusedError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RefusedError(400, f"the body is not JSON: {first_line(error)[:120]}") from None
    except ValueError as error:
        why = "a number has too many digits" if "integer string" in str(error) else first_line(error)[:120]
        raise RefusedError(400, f"the body is not JSON: {why}") from None
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


async def _unless_gone(http: HttpRequest, awaited: Awaitable[T]) -> T:
    """The result of what is awaited, which is cancelled if the client goes away."""
    task = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(_gone(http))
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise ClientDisconnect
    return task.result()


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _event(message: Json) -> bytes:
    return b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\n\n"


async def _refused(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return refusal(error)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return refusal(RefusedError(500, f"the server failed: {first_line(error)[:200]}"))  # it is logged as well


async def _client_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # which nobody reads; without it the error would be printed


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "GET /, /v1/models, /tokenizer_info, /health, /metrics; POST /v1/completions, /tokenize, /detokenize"
    message = f"{http.method} {http.url.path[:100]} is not here; there is {known}"
    return refusal(RefusedError(error.status_code, message, headers=error.headers))
