"""Load for a server: clients that send random requests, some bad, and some of whom go away; and their answers."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

BAD: tuple[dict[str, Any], ...] = (
    {"prompt": 5},
    {"prompt": [10**9]},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "top_p": 2},
    {"nonsense": True},
)


@dataclass(frozen=True)
class Answered:
    """A request that was answered in full: what it asked for, the text, and the checkpoint that it came from."""

    body: dict[str, Any]
    text: str
    step: int


@dataclass
class Clients:
    """So many at once, for some seconds. `answers` has every text, `counts` how requests ended."""

    address: str
    context: int
    count: int = 50
    seconds: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.answers: list[Answered] = []
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until the time is over and each has its last answer."""
        self._end = time.monotonic() + self.seconds
        limits = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(600)) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.count)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        acts: list[Callable[..., Any]] = [self._ask, self._stream, self._bad, self._leave]
        while time.monotonic() < self._end:
            (act,) = chance.choices(acts, [4, 4, 1, 2])
            try:
                self.counts[await act(session, self._body(chance), chance)] += 1
            except aiohttp.ClientError as error:
                self.counts[f"no answer: {type(error).__name__}"] += 1

    def _body(self, chance: random.Random) -> dict[str, Any]:
        length = chance.randint(1, self.context - 2)
        return {
            "prompt": "".join(chance.choices("abc def. xyz", k=length)),
            "max_tokens": chance.randint(1, min(24, self.context - length)),
            "seed": chance.randint(0, 2**31),
            "temperature": chance.choice([0, 0.7, 1.0]),
            "top_p": chance.choice([1.0, 0.9]),
            "top_k": chance.choice([0, 20]),
        }

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], chance: random.Random) -> str:
        async with session.post(f"{self.address}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return await self._refused(answer)
            choice = (await answer.json())["choices"][0]
            self.answers.append(Answered(body, choice["text"], choice["step"]))
            return "answered"

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any], chance: random.Random) -> str:
        async with session.post(f"{self.address}/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status != 200:
                return await self._refused(answer)
            text, step = "", -1
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    message = json.loads(line[6:])
                    if "error" in message:
                        return f"broken off: {message['error']['type']}"
                    text += message["choices"][0]["text"]
                    step = message["choices"][0]["step"]
            self.answers.append(Answered(body, text, step))
            return "streamed"

    async def _leave(self, session: aiohttp.ClientSession, body: dict[str, Any], chance: random.Random) -> str:
        """Go away after the first event, or before."""
        async with session.post(f"{self.address}/v1/completions", json={**body, "stream": True}) as answer:
            if chance.random() < 0.5:
                await answer.content.readline()
        return "left"

    async def _bad(self, session: aiohttp.ClientSession, body: dict[str, Any], chance: random.Random) -> str:
        async with session.post(f"{self.address}/v1/completions", json=chance.choice(BAD)) as answer:
            refusal = await answer.json()
            is_clear = 400 <= answer.status < 500 and "\n" not in refusal["error"]["message"]
            return "refused a bad request" if is_clear else f"a bad request got {answer.status}"

    async def _refused(self, answer: aiohttp.ClientResponse) -> str:
        refusal = await answer.json()
        await asyncio.sleep(float(answer.headers.get("Retry-After", 0.2)))
        return f"refused: {answer.status} {refusal['error']['type']}"
