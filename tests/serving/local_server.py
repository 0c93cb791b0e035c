"""The HTTP server of small random models in this process, on a real socket of loopback."""

import asyncio
import contextlib
import dataclasses
import threading
import time

from small_model import batch_of, reader_of, served

from raygpt.corpus.tokenizers import Bytes
from raygpt.serving.app import Limits, connect, make_app
from raygpt.serving.model import RunModel


class LocalModel(RunModel):
    """As of a run, but random."""

    def __init__(self, engine="jax", seed=0, slots=4, waiting=64):
        self.reader = reader_of(engine)
        self._batch = batch_of(engine, self.reader, served(self.reader, seed), slots, most_waiting=waiting)
        self._most_waiting = waiting
        self._closing, self.curve = threading.Event(), [[1, 5.0], [2, 4.0]]
        self._threads = [threading.Thread(target=self._batch.run, daemon=True)]
        self._threads[0].start()

    async def describe(self):
        about = {"run": "here", "created": 1, "context": self.reader.context, "parameters": 1000, "follow": True}
        room = {"slots": self._batch.load.slots, "most_waiting": self._most_waiting}
        return {**about, **room, "tokenizer": Bytes().describe(), **self.reader.describe()}

    async def losses(self):
        return {"loss": self.curve, "val_loss": [], "steps": 10}


@contextlib.contextmanager
def serving(models, key=None, **limits):
    """The address of a server that runs in a thread."""
    import uvicorn

    from raygpt.serving.deployment import listen

    made = [asyncio.run(connect(name, model)) for name, model in models.items()]
    app = make_app(made, key, dataclasses.replace(Limits(), **limits))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with contextlib.closing(listen("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@contextlib.contextmanager
def two_models():
    """By name."""
    made = {"one": LocalModel(), "two": LocalModel(seed=1)}
    try:
        yield made
    finally:
        for model in made.values():
            model.close()
