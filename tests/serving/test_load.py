"""Under load, with clients that go away and bad requests, every text is what its seed gives alone."""

import asyncio
import time

import httpx
import pytest
from local_server import LocalModel, serving
from small_model import CONTEXT, served

from raygpt.testing.load import Clients


@pytest.mark.extended
def test_under_load_every_text_is_what_its_seed_gives_alone_and_no_slot_is_lost(compiled_quickly):
    model = LocalModel(slots=3, waiting=4)
    checkpoints = {7: model._batch.served, 9: served(model.reader, seed=2, step=9)}
    clients = Clients("", CONTEXT, count=12, seconds=4.0)

    async def reload():
        for step in (9, 7, 9):
            await asyncio.sleep(clients.seconds / 4)
            model._batch.served = checkpoints[step]

    async def everything():
        await asyncio.gather(clients.run(), reload())

    try:
        with serving({"small": model}) as clients.address:
            asyncio.run(everything())
            known = {"answered", "streamed", "left", "refused a bad request", "refused: 429 rate_limit_error"}
            assert set(clients.counts) <= known, clients.counts
            assert clients.counts["refused a bad request"] > 0
            assert clients.counts["left"] > 0
            assert {answer.step for answer in clients.answers} == {7, 9}
            deadline = time.monotonic() + 60  # the server has yet to notice the last client that left
            while (model._batch.load.running, model._batch.load.waiting) != (0, 0):
                assert time.monotonic() < deadline, "a slot is lost"
                time.sleep(0.01)
            for answer in clients.answers:
                model._batch.served = checkpoints[answer.step]
                alone = httpx.post(f"{clients.address}/v1/completions", json=answer.body, timeout=60).json()
                assert alone["choices"][0]["text"] == answer.text
    finally:
        model.close()
