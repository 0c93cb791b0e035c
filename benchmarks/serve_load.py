"""Minutes of random requests to a served run: is every text what its seed gives alone, and is anything lost?

    raygpt train tiny run.keep=100 training.checkpoint_every=30
    python benchmarks/serve_load.py runs/tiny --minutes 10 --kills 2

Clients send prompts of random lengths, go away in the middle, and send bad requests, to two replicas on Ray Serve.
Meanwhile the run's checkpoints are copied, one after another, into the run that is served with --follow, and replicas
are killed. In the end each text is compared with that of the same request alone, by the checkpoint that it says. Each
replica's memory is read twice a minute: the load is the same all the time, so that what leaks grows to the end.
"""

import argparse
import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import record

from raygpt.runs import checkpoints, open_run
from raygpt.serving.app import Limits, connect, make_app
from raygpt.serving.completions import parse
from raygpt.serving.deployment import Replicas, deployed, listen
from raygpt.serving.model import Options, RunModel
from raygpt.testing.load import Answered, Clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="with several checkpoints")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    arguments = parser.parse_args()
    run = open_run(arguments.run)
    with tempfile.TemporaryDirectory() as home:
        growing = _with_first_checkpoint(run.folder, run.steps[0], Path(home) / run.name)
        clients, memory = asyncio.run(_loaded(run, growing, arguments))
        print(dict(clients.counts), f"{len(clients.answers)} texts to compare", flush=True)
        wrong = asyncio.run(_compare(run.folder, clients.answers))
    figures: dict[str, Any] = {
        "answers": len(clients.answers),
        "wrong texts": wrong,
        "of steps": dict(Counter(told.step for told in clients.answers)),
        "MB of each replica, twice a minute": memory,
        **clients.counts,
    }
    record.show(figures, "serve-load")


async def _loaded(run: Any, growing: Path, arguments: argparse.Namespace) -> tuple[Clients, dict[int, list[int]]]:
    """The clients after their time, and the memory of each replica on the way."""
    import uvicorn

    options = Options(str(growing), slots=8, waiting=16, follow=True)
    with (
        deployed({"load": options}, Replicas(arguments.replicas)) as backends,
        contextlib.closing(listen("127.0.0.1", 0)) as listening,
    ):
        model = await connect("load", backends["load"])
        app = make_app([model], None, Limits())
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        while not server.started:
            await asyncio.sleep(0.01)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        clients = Clients(address, model.vocabulary.context, arguments.clients, 60 * arguments.minutes)
        memory: dict[int, list[int]] = {}  # MB by the number of the process
        watching = asyncio.create_task(_watch(memory))
        await asyncio.gather(clients.run(), _disturb(run, growing, arguments))
        watching.cancel()
        server.should_exit = True
        await asyncio.to_thread(thread.join)
    return clients, memory


async def _disturb(run: Any, growing: Path, arguments: argparse.Namespace) -> None:
    """Add the other checkpoints and kill replicas, evenly over the time."""
    events: list[Any] = [*run.steps[1:]]
    for number in range(arguments.kills):
        events.insert((number + 1) * len(events) // (arguments.kills + 1) + number, "kill")
    for event in events:
        await asyncio.sleep(60 * arguments.minutes / (len(events) + 1))
        if event == "kill":
            next(iter(_replicas())).kill()
        else:
            await asyncio.to_thread(_copy, run.folder, event, growing)


def _with_first_checkpoint(folder: str, step: int, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("step-*", "parts"))
    _copy(folder, step, to)
    return to


def _copy(folder: str, step: int, to: Path) -> None:
    """A checkpoint, which appears when it is whole."""
    source, target = Path(checkpoints.folder_of(folder, step)), Path(checkpoints.folder_of(str(to), step))
    shutil.copytree(source, to / "copying")
    (to / "copying").rename(target)


def _replicas() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "RunModel" in " ".join(child.cmdline())]


async def _watch(memory: dict[int, list[int]]) -> None:
    while True:
        for replica in _replicas():
            memory.setdefault(replica.pid, []).append(replica.memory_info().rss // 2**20)
        print(memory, flush=True)
        await asyncio.sleep(30)


async def _compare(folder: str, answers: list[Answered]) -> int:
    """How many texts differ from those of the same requests alone."""
    wrong = 0
    for step in sorted({told.step for told in answers}):
        alone = RunModel(Options(folder, step, slots=8))
        vocabulary = (await connect("alone", alone)).vocabulary
        for told in (told for told in answers if told.step == step):
            (options,) = parse(told.body, vocabulary).texts
            text = "".join([piece.text async for pieces in alone.stream(options) for piece in pieces])
            wrong += text != told.text
        alone.close()
        print(f"step {step}: compared, {wrong} wrong so far", flush=True)
    return wrong


if __name__ == "__main__":
    main()
