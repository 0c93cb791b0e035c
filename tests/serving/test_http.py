"""The HTTP server: the official client works, and a bad request gets one clear message."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import pytest
from local_server import LocalModel, serving, two_models
from small_model import CONTEXT, VOCAB, text

from raygpt.serving import app
from raygpt.serving.app import CompletionAnswer, connect
from raygpt.serving.completions import parse
from raygpt.serving.meters import Meters, RequestMeter
from raygpt.serving.texts import Piece, TextOptions, Token

pytest.importorskip("uvicorn", reason="needs the extra serve")
ASCII = {str(n): -100 for n in range(128, VOCAB)}
JSON = {"Content-Type": "application/json"}


def post(address, body, path="/v1/completions", **more):
    return httpx.post(address + path, json=body, timeout=60, **more)


@pytest.fixture(scope="module")
def local_models():
    with two_models() as made:
        yield made


@pytest.fixture(scope="module")
def address(local_models):
    with serving(local_models, body_bytes=100_000, body_s=1.0) as url:
        yield url


@pytest.fixture(scope="module")
def client(address):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


# The official client


def test_a_completion_is_what_the_batch_writes(client, local_models):
    got = client.completions.create(model="one", prompt="abc", max_tokens=12, seed=5, temperature=0.9, logit_bias=ASCII)
    bias = {int(key): -100.0 for key in ASCII}
    expected = TextOptions(tuple(b"abc"), 12, temperature=0.9, seed=5, bias=bias)
    alone = text(answers_of(local_models["one"], expected))
    assert got.choices[0].text == alone
    assert (got.choices[0].finish_reason, got.choices[0].step, got.system_fingerprint) == ("length", 7, "one@7")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 12, 15)


def answers_of(model, options):
    import threading

    pieces, done = [], threading.Event()
    model._batch.submit(options, lambda piece: (pieces.append(piece), piece.finish and done.set()))
    assert done.wait(60)
    return pieces


def test_a_stream_is_the_same_text_and_ends_with_usage(client, local_models, monkeypatch):
    batch = local_models["one"]._batch
    # Tokens that come faster than the server sends them are sent together.
    monkeypatch.setattr(batch, "turn", lambda turn=batch.turn: (turn(), time.sleep(0.01))[0])
    options = {"model": "one", "prompt": "abc", "max_tokens": 20, "seed": 1, "logit_bias": ASCII}
    whole = client.completions.create(**options)
    parts = list(
        client.completions.create(
            **options, stream=True, stream_options={"include_usage": True, "include_obfuscation": False}
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert len(parts) > 3
    assert parts[-1].usage == whole.usage
    assert {part.system_fingerprint for part in parts} == {"one@7"}
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == "length"


def test_prompts_may_be_texts_or_ids_one_or_several(client):
    options = {"model": "one", "max_tokens": 6, "seed": 3, "temperature": 0.8}
    as_text, as_ids = (client.completions.create(prompt=p, **options) for p in ("hello", list(b"hello")))
    assert as_text.choices[0].text == as_ids.choices[0].text
    several = client.completions.create(prompt=["hello", "world"], **options)
    of_ids = client.completions.create(prompt=[list(b"hello"), list(b"world")], **options)
    assert [c.text for c in several.choices] == [c.text for c in of_ids.choices]
    assert several.choices[0].text == as_text.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1]


def test_each_of_n_texts_has_the_next_seed(client):
    three = client.completions.create(model="one", prompt="x", max_tokens=8, n=3, seed=10)
    assert len({choice.text for choice in three.choices}) == 3
    assert three.usage.prompt_tokens == 1
    last = client.completions.create(model="one", prompt="x", max_tokens=8, seed=12)
    assert last.choices[0].text == three.choices[2].text


def test_echo_with_log_probabilities_scores_the_prompt(client):
    got = client.completions.create(model="one", prompt="abcd", max_tokens=1, echo=True, logprobs=3, temperature=0)
    told = got.choices[0].logprobs
    assert got.choices[0].text.startswith("abcd")
    assert told.tokens[:4] == ["a", "b", "c", "d"]
    assert told.text_offset[:4] == [0, 1, 2, 3]
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:])
    assert told.token_logprobs[-1] == max(told.top_logprobs[-1].values()), "greedy is the likeliest, exactly"
    assert all(told.tokens[n] in told.top_logprobs[n] for n in range(1, 5))


def test_max_tokens_of_zero_only_scores(client):
    got = client.completions.create(model="one", prompt="abcd", max_tokens=0, echo=True, logprobs=0)
    assert (got.choices[0].text, len(got.choices[0].logprobs.tokens)) == ("abcd", 4)


def test_models_are_listed_and_each_answers_by_its_name(client):
    assert [model.id for model in client.models.list()] == ["one", "two"]
    options = {"prompt": "abc", "max_tokens": 10, "seed": 1}
    assert (
        client.completions.create(model="one", **options).choices[0].text
        != client.completions.create(model="two", **options).choices[0].text
    )
    assert client.models.retrieve("two").max_model_len == CONTEXT


# Tokens, health, metrics


def test_tokens_lead_there_and_back(address):
    told = post(address, {"prompt": "héllo", "add_special_tokens": False}, "/tokenize").json()  # as lm-eval asks
    assert told == {"count": 6, "max_model_len": CONTEXT, "tokens": list("héllo".encode())}
    assert post(address, {"tokens": told["tokens"]}, "/detokenize").json() == {"prompt": "héllo"}
    info = httpx.get(address + "/tokenizer_info").json()
    assert post(address, {"prompt": info["eos_token"]}, "/tokenize").json()["tokens"] == [VOCAB - 1]
    assert post(address, {"prompt": ""}, "/tokenize").json()["count"] == 0
    assert post(address, {"tokens": []}, "/detokenize").json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": "a", "model": "one", "text": "b"}, "unknown key 'text'"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens is not supported"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate pair"),
        ("/detokenize", {"tokens": [VOCAB]}, f"tokens has {VOCAB}, and token ids go from 0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must have whole numbers"),
    ],
)
def test_what_cannot_be_tokens_is_refused(address, path, body, message):
    got = httpx.post(address + path, content=json.dumps(body), headers=JSON)
    assert (got.status_code, message in got.json()["error"]["message"]) == (400, True)


def test_prometheus_reads_requests_first_tokens_batch_and_queue(address):
    post(address, {"prompt": "a", "max_tokens": 3})
    assert httpx.get(address + "/health").json() == {"status": "ok"}
    post(address, {"prompt": 5})
    told = httpx.get(address + "/metrics").text
    for status in (200, 400):
        assert f'raygpt_requests_total{{model="one",status="{status}"}}' in told
    for name in ("time_to_first_token_seconds_count", "generated_tokens_total", "batch_size", "waiting_texts"):
        assert f'raygpt_{name}{{model="one"}}' in told


# Bad requests

BAD = {
    "a list": ([], "the body must be a JSON object"),
    "a prompt that is a number": ({"prompt": 5}, "prompt must be"),
    "a prompt of nothing": ({"prompt": ""}, "prompt is empty"),
    "an empty list": ({"prompt": []}, "empty list"),
    "an empty list of ids": ({"prompt": [[]]}, "empty list of token ids"),
    "mixed prompts": ({"prompt": ["a", 5]}, "not both mixed"),
    "an id beyond the vocabulary": ({"prompt": [1, VOCAB]}, f"token ids go from 0 to {VOCAB - 1}"),
    "a negative id": ({"prompt": [-1]}, "ids go from 0"),
    "an id of many digits": ({"prompt": [10**400]}, "more than 30 digits"),
    "a fraction as an id": ({"prompt": [1.5]}, "prompt must be a text, token ids, or a list of either, not a number"),
    "true as an id": ({"prompt": [True]}, "prompt must be"),
    "half a surrogate pair": ({"prompt": "\udcff"}, "surrogate pair"),
    "a key that is half a surrogate pair": ({"\ud800": 1}, "surrogate pair"),
    "more texts than slots and places to wait": ({"prompt": "x", "n": 69}, "more than this server takes, 68"),
    "an id beside a text": ({"prompt": [5, "a"]}, "not both mixed"),
    "Arabic digits": ({"prompt": "x", "logit_bias": {"\u0663": 1}}, "token ids go from"),
    "a bias of null": ({"prompt": "x", "logit_bias": {"5": None}}, "of token 5: logit_bias must be a number"),
    "an unknown option of streams": ({"prompt": "x", "stream_options": {"usage": True}}, "unknown key 'usage'"),
    "a prompt longer than the context": ({"prompt": "x" * (CONTEXT + 1)}, f"the model sees {CONTEXT}"),
    "more tokens than the context": ({"prompt": "x", "max_tokens": CONTEXT}, f"the model sees {CONTEXT}"),
    "no tokens": ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
    "negative tokens": ({"prompt": "x", "max_tokens": -3}, "max_tokens is -3"),
    "a text for tokens": ({"prompt": "x", "max_tokens": "5"}, "max_tokens must be a whole number"),
    "a huge number": ({"prompt": "x", "max_tokens": 10**300}, "max_tokens is a number of more than 30 digits"),
    "a negative temperature": ({"prompt": "x", "temperature": -1}, "temperature is -1"),
    "a hot temperature": ({"prompt": "x", "temperature": 1e9}, "temperature is"),
    "a temperature of text": ({"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
    "no probability": ({"prompt": "x", "top_p": 0}, "top_p is 0, and must be above 0 and at most 1"),
    "too much probability": ({"prompt": "x", "top_p": 1.5}, "top_p is 1.5"),
    "a fraction of tokens": ({"prompt": "x", "top_k": 2.5}, "top_k must be a whole number, not 2.5"),
    "too many texts": ({"prompt": "x", "n": 1000}, "n is 1000"),
    "many prompts times n": ({"prompt": ["x"] * 100, "n": 2}, "more than 128 texts"),
    "too many alternatives": ({"prompt": "x", "logprobs": 100}, "logprobs is 100"),
    "true as a number": ({"prompt": "x", "logprobs": True}, "logprobs must be a whole number"),
    "stops that are numbers": ({"prompt": "x", "stop": [1]}, "stop must be"),
    "too many stops": ({"prompt": "x", "stop": ["s"] * 50}, "stop may have"),
    "a bias that is a list": ({"prompt": "x", "logit_bias": [1]}, "logit_bias must be"),
    "a bias of a word": ({"prompt": "x", "logit_bias": {"the": 1}}, "token ids go from"),
    "a bias beyond the vocabulary": ({"prompt": "x", "logit_bias": {"99999": 1}}, "token ids go from"),
    "a bias that is too large": ({"prompt": "x", "logit_bias": {"5": 1e9}}, "logit_bias is"),
    "a seed of text": ({"prompt": "x", "seed": "s"}, "seed must be a whole number"),
    "a huge seed": ({"prompt": "x", "seed": 2**200}, "seed is"),
    "a stream of yes": ({"prompt": "x", "stream": "yes"}, "stream must be true or false"),
    "wrong stream options": ({"prompt": "x", "stream_options": 5}, "stream_options must be an object"),
    "a misspelt key": ({"prompt": "x", "temprature": 1}, "did you mean temperature?"),
    "a penalty": ({"prompt": "x", "presence_penalty": 1}, "presence_penalty is not supported"),
    "the best of many": ({"prompt": "x", "best_of": 5}, "best_of is not supported"),
    "another model": ({"prompt": "x", "model": "gpt-4"}, "no model 'gpt-4'"),
    "a model of numbers": ({"prompt": "x", "model": 5}, "no model '5'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_gets_one_clear_message(address, kind):
    body, message = BAD[kind]
    got = httpx.post(
        address + "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=60
    )
    error = got.json()["error"]
    assert got.status_code == (404 if "model" in kind and "beyond" not in kind else 400)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b'{"prompt": ', JSON, 400, "not JSON"),
        (b'{"prompt": "\xff"}', JSON, 400, "not UTF-8"),
        (b'{"temperature": NaN}', JSON, 400, "NaN is no JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", JSON, 400, "a number has too many digits"),
        (b"[" * 50_000, JSON, 400, "nested too deeply"),
        (b"", JSON, 400, "not JSON"),
        (b"x" * 100_001, JSON, 413, "larger than 100,000 bytes"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "must be JSON"),
        (b"{}", {**JSON, "Host": "evil.example"}, 403, "only localhost"),
    ],
)
def test_a_body_that_cannot_be_read_gets_one_clear_message(address, content, headers, status, message):
    got = httpx.post(address + "/v1/completions", content=content, headers=headers, timeout=60)
    assert (got.status_code, message in got.json()["error"]["message"]) == (status, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8000")),
        *(
            (host, 403)
            for host in ("testserver", "evil.example", "localhost.evil.example", "10.0.0.1", "[::2]:8000", "")
        ),
    ],
)
def test_without_a_key_only_the_hosts_that_need_none_are_served(address, host, status):
    assert httpx.get(address + "/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/chat", 404)])
def test_a_wrong_path_is_answered_with_those_there_are(address, method, path, status):
    got = httpx.request(method, address + path)
    assert (got.status_code, "/v1/completions" in got.json()["error"]["message"]) == (status, True)


def test_half_a_request_is_given_up(address):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        half.sendall(b'Content-Length: 50\r\n\r\n{"prompt"')
        half.settimeout(30)
        assert b"408" in half.recv(1000)


def test_after_all_that_the_next_request_is_served(address, client):
    assert client.completions.create(model="one", prompt="abc", max_tokens=2).usage.completion_tokens <= 2


# Limits


def test_a_client_that_goes_away_frees_its_slot(address, local_models, caplog):
    batch = local_models["one"]._batch
    never = {"logit_bias": {str(VOCAB - 1): -100}, "max_tokens": CONTEXT - 1, "prompt": "a", "n": 4, "stream": True}
    for stream in (True, False):
        with httpx.Client(timeout=60) as client:
            if stream:
                with client.stream("POST", address + "/v1/completions", json=never) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(address + "/v1/completions", json={**never, "stream": False}, timeout=0.01)
        deadline = time.monotonic() + 60
        while (batch.load.running or batch.load.waiting) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (batch.load.running, batch.load.waiting) == (0, 0)
    assert post(address, {"prompt": "a", "max_tokens": 1}).status_code == 200  # after it, the other has ended
    assert "ClientDisconnect" not in caplog.text
    told = httpx.get(address + "/metrics").text
    assert 'raygpt_requests_in_flight{model="one"} 0.0' in told
    assert 'raygpt_requests_total{model="one",status="499"} 2.0' in told


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_before_the_first_token_gives_up_its_place(monkeypatch, stream):
    model = LocalModel()
    monkeypatch.setattr(model._batch, "turn", lambda: time.sleep(0.01) or True)  # no token ever comes

    def until(waiting):
        deadline = time.monotonic() + 20
        while model._batch.load.waiting != waiting:
            assert time.monotonic() < deadline, model._batch.load
            time.sleep(0.01)

    try:
        with serving({"stuck": model}) as address:
            host, port = address.removeprefix("http://").split(":")
            body = json.dumps({"prompt": "a", "n": 3, "stream": stream}).encode()
            with socket.create_connection((host, int(port))) as leaves:
                leaves.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                )
                leaves.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                until(3)
            until(0)
            told = httpx.get(address + "/metrics").text
            assert 'raygpt_requests_in_flight{model="stuck"} 0.0' in told
            assert 'raygpt_requests_total{model="stuck",status="499"} 1.0' in told
    finally:
        model.close()


def test_an_answer_that_is_given_up_ends_whatever_comes_at_that_moment(local_models):
    never = {"logit_bias": {str(VOCAB - 1): -100}, "max_tokens": CONTEXT - 1, "prompt": "a"}

    class Quick:
        async def stream(self, options):
            for drawn in range(1, 10_000):
                yield [Piece("x", (Token(1, -1.0),), drawn=drawn)]
                await asyncio.sleep(0)

    async def give_up(turns):
        model = await connect("one", local_models["one"])
        quick = dataclasses.replace(model, backend=Quick())
        answer = CompletionAnswer(quick, parse(never, model.vocabulary), RequestMeter(Meters(), "one"), 60)
        task = asyncio.create_task(answer.whole())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for turns in range(1, 30):
        asyncio.run(give_up(turns))


def test_others_are_served_while_a_long_text_is_encoded(address, monkeypatch):
    others_came, parsed = threading.Event(), app.parse

    def slow(body, vocabulary):
        assert others_came.wait(30)
        return parsed(body, vocabulary)

    monkeypatch.setattr(app, "parse", slow)
    with ThreadPoolExecutor() as pool:
        slowly = pool.submit(post, address, {"prompt": "a", "max_tokens": 1})
        assert httpx.get(address + "/health", timeout=20).status_code == 200
        others_came.set()
        assert slowly.result().status_code == 200


SERVES = """
import sys
from local_server import LocalModel
from raygpt.serving.app import Limits
from raygpt.serving.deployment import listen, run
made = LocalModel()
socket = listen("127.0.0.1", 0)
print(socket.getsockname()[1], flush=True)
run({"one": made}, [socket], None, Limits(), lambda text: print(text, file=sys.stderr, flush=True))
made.close()
"""


def test_the_first_interrupt_says_what_it_waits_for_and_the_second_ends_it_quietly():
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVES], env=environment, **pipes) as server:
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        never = {
            "logit_bias": {str(VOCAB - 1): -100},
            "max_tokens": CONTEXT - 1,
            "prompt": "a",
            "n": 60,
            "stream": True,
        }
        transport = httpx.HTTPTransport(retries=20)
        with (
            httpx.Client(transport=transport, timeout=60) as client,
            client.stream("POST", address + "/v1/completions", json=never) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            said = server.stderr.readline()
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.HTTPError):
                list(lines)
        rest = server.stderr.read()
        assert server.wait(30) == 0
    assert "finishing the requests that are being answered (1)" in said
    assert "Traceback" not in rest


@pytest.mark.parametrize("path", ["/v1/models/one", "/losses"])
def test_a_model_that_is_not_there_is_said_in_one_line(address, local_models, path, monkeypatch, caplog):
    async def die():
        raise RuntimeError("The actor died.\nMore lines")

    for method in ("status", "losses"):
        monkeypatch.setattr(local_models["one"], method, die)
    got = httpx.get(address + path)
    message = "the model is not there: The actor died.; try again"
    assert (got.status_code, got.json()["error"]["message"], caplog.text) == (503, message, "")


def test_a_model_that_is_not_there_takes_nothing_from_the_others(address, local_models, monkeypatch):
    async def die():
        raise RuntimeError("The actor died.")

    monkeypatch.setattr(local_models["one"], "status", die)
    one, two = (model for model in httpx.get(address + "/v1/models").json()["data"])
    assert (one["id"], "step" in one, two["id"], "step" in two) == ("one", False, "two", True)
    told = httpx.get(address + "/metrics").text
    assert 'raygpt_slots{model="one"} NaN' in told
    assert 'raygpt_slots{model="two"} 4.0' in told


def test_too_many_requests_at_once_are_told_when_to_come_back(monkeypatch):
    model, begin = LocalModel(slots=1, waiting=0), threading.Event()
    monkeypatch.setattr(model._batch, "turn", lambda turn=model._batch.turn: begin.wait(60) and turn())
    body = {"prompt": "a", "max_tokens": 4}
    try:
        with serving({"small": model}) as address, ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(post, address, {**body, "stream": stream}) for stream in (True, False, True, False)]
            refused = [one.result() for one in itertools.islice(as_completed(asked, 60), 3)]
            begin.set()
            assert sorted(one.result().status_code for one in asked) == [200, 429, 429, 429]
            for answer in refused:  # at least one of a stream, and one that is not
                assert answer.headers["Retry-After"] == "1"
                assert answer.json()["error"]["type"] == "rate_limit_error"
            assert post(address, body).status_code == 200
            never = post(address, {**body, "n": 2})
            assert (never.status_code, "more than this server takes, 1" in never.text) == (400, True)
    finally:
        begin.set()
        model.close()


def test_an_answer_that_takes_too_long_is_given_up(local_models):
    with serving(local_models, answer_s=0.0) as address:
        got = post(address, {"prompt": "a", "max_tokens": 30})
        assert (got.status_code, "took longer than 0 s" in got.json()["error"]["message"]) == (504, True)


def test_with_a_key_only_who_has_it_is_served(local_models):
    with serving(local_models, key="the-secret-key") as address:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}):
            got = post(address, body, headers={key: value.encode("latin-1") for key, value in headers.items()})
            assert got.status_code == 401
            assert got.json()["error"]["type"] == "authentication_error"
        given = {"Authorization": "Bearer the-secret-key", "Host": "some.host"}
        assert post(address, body, headers=given).status_code == 200
        assert httpx.get(address + "/health").status_code == 200
        assert httpx.get(address + "/").status_code == 200
