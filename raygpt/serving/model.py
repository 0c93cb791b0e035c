"""A run's model that answers requests: its batch in a thread, and new checkpoints as they are saved.

A replica of Ray Serve holds one (deployment.py); it can as well be used in one process without Ray.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from raygpt import host
from raygpt.engines import devices_of, make_slots
from raygpt.errors import first_line
from raygpt.inference.loaded import LoadedModel, load, read
from raygpt.models import describe
from raygpt.runs import OpenRun, open_run
from raygpt.runs.metrics import Line
from raygpt.runs.metrics import read as read_metrics
from raygpt.serving import memory
from raygpt.serving.batching import Batch, BusyError, Served
from raygpt.serving.texts import BUSY, Piece, TextOptions

log = logging.getLogger("raygpt")
POINTS = 300  # of a curve on the page
MOST_FAILURES = 3  # in succession, after which a replica is given up


@dataclass(frozen=True)
class Options:
    """How one model is served."""

    folder: str  # of its run
    step: int | None = None  # of the checkpoint; by default the best, or the newest with `follow`
    slots: int | None = None  # texts that are generated at once; by default as memory.py says
    waiting: int = 64  # texts that may wait for a slot
    follow: bool = False  # load every new checkpoint
    poll_s: float = 2.0  # how often to look for one
    gpu_share: float = 1.0  # of the GPU's memory, where it has one


class RunModel:
    """Answers are streams of pieces; see `Batch`."""

    def __init__(self, options: Options):
        self.options, self._started = options, time.time()
        run = open_run(options.folder)
        devices_of(run.recipe.engine).limit_memory(options.gpu_share)
        loaded = _wait_for_first(run, options) if options.follow else load(run, options.step)
        self._run, self._reader = loaded.run, loaded.reader  # not its state: the batch has it until a newer one comes
        slots = make_slots(loaded.engine, loaded.reader, _count_slots(loaded, options))
        served = Served(loaded.checkpoint.step, loaded.state)
        self._batch = Batch(slots, loaded.reader.context, loaded.tokenizer, served, options.waiting)
        if devices_of(loaded.engine).is_accelerated():
            self._batch.warm_up()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._batch.run, name="batch", daemon=True)]
        if options.follow:
            self._threads.append(threading.Thread(target=self._follow, name="follow", daemon=True))
        for thread in self._threads:
            thread.start()

    async def stream(self, options: TextOptions) -> AsyncIterator[list[Piece]]:
        """The answer as it comes, several pieces at once if they came meanwhile. To leave the iteration ends the text.

        If too many are waiting it is one piece: an exception of a replica would be printed by Ray, too.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Piece]()
        try:
            text = self._batch.submit(options, lambda piece: loop.call_soon_threadsafe(queue.put_nowait, piece))
        except BusyError:
            yield [Piece(finish=BUSY)]
            return
        try:
            while True:
                pieces = [await queue.get()]
                while not queue.empty():
                    pieces.append(queue.get_nowait())
                yield pieces
                if pieces[-1].finish:
                    return
        finally:
            self._batch.cancel(text)

    async def describe(self) -> dict[str, Any]:
        """What does not change while it is served; plain values."""
        run, reader = self._run, self._reader
        return {
            "run": run.folder,
            "created": int(self._started),
            "context": reader.context,
            "parameters": describe(run.recipe.model, run.tokenizer.vocab).count,
            "follow": self.options.follow,
            "slots": self._batch.load.slots,
            "most_waiting": self.options.waiting,
            "tokenizer": run.tokenizer.describe(),
            **reader.describe(),
        }

    async def status(self) -> dict[str, Any]:
        """The checkpoint that new texts come from, and the load."""
        return {"step": self._batch.served.step, **self._batch.load._asdict()}

    async def losses(self) -> dict[str, Any]:
        """The run's training and validation losses so far, [[step, loss], …], thinned; and how many steps it takes."""
        lines = await asyncio.to_thread(read_metrics, self._run.folder)
        return {name: _thinned(lines, name) for name in ("loss", "val_loss")} | {"steps": self._run.total_steps}

    def check_health(self) -> None:
        """Ray Serve calls it now and then, and starts another replica in place of one for which it raises."""
        if self._batch.failures >= MOST_FAILURES:
            raise RuntimeError(f"the last {self._batch.failures} turns failed")

    def close(self) -> None:
        """End its threads."""
        self._closing.set()
        self._batch.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def _follow(self) -> None:
        """Load every new checkpoint. The one before stays for as long as a text is written by it."""
        said = None
        while not self._closing.wait(self.options.poll_s):
            try:
                self._load_newer()
                said = None
            except Exception as error:  # e.g. storage that does not answer, a checkpoint that was deleted since
                if (why := first_line(error)) != said:
                    log.warning("%s: no newer checkpoint can be loaded (%s); trying again", self._run.folder, why)
                said = why

    def _load_newer(self) -> None:
        run = open_run(self.options.folder)
        if run.steps and run.steps[-1] > self._batch.served.step:
            found = read(run, run.steps[-1])
            self._batch.served = Served(run.steps[-1], self._reader.load(found.parameters))


def _count_slots(loaded: LoadedModel, options: Options) -> int:
    each = memory.slot_bytes(describe(loaded.model, loaded.tokenizer.vocab), loaded.reader.describe()["precision"])
    on_gpu = devices_of(loaded.engine).free_bytes(options.gpu_share)
    free, kind = (host.free_memory(), "cpu") if on_gpu is None else (on_gpu, "gpu")
    return memory.count_slots(options.slots, each, free, kind)


def _wait_for_first(run: OpenRun, options: Options) -> LoadedModel:
    """The newest checkpoint, as soon as there is one."""
    while not run.steps:
        time.sleep(options.poll_s)
        run = open_run(options.folder)
    return load(run, best=False)


def _thinned(lines: Sequence[Line], metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, every so many lines and the last."""
    points = [(line["step"], line[metric]) for line in lines if metric in line and math.isfinite(line[metric])]
    every = -(-len(points) // POINTS) or 1
    return points[:-1:every] + points[-1:]
