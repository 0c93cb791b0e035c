"""Models on Ray Serve, a deployment each, and the HTTP server in front of them.

The server runs in the command's process: it is the one place that a client talks to, and it refuses bad requests before
they reach a replica. Serve starts replicas, spreads texts over them, and starts another where one has died.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raygpt.cluster import alive_nodes, connected, has_autoscaler
from raygpt.errors import RaygptError
from raygpt.formatting import network_address
from raygpt.host import cores
from raygpt.resources import Resources
from raygpt.serving.app import Backend, Limits, connect, make_app
from raygpt.serving.memory import MOST
from raygpt.serving.model import Options, RunModel
from raygpt.serving.room import ensure_room
from raygpt.serving.texts import Piece, TextOptions


@dataclass(frozen=True)
class Replicas:
    """How a model runs on the cluster."""

    count: int = 1
    gpus: float | None = None  # of each; None: one if the cluster has any
    cpus: int = 1  # reserved for each; the threads of a CPU are shared


class ServeModel:
    """A model's replicas, as the HTTP server calls them."""

    def __init__(self, handle: Any, replicas: int):
        self._handle, self._replicas = handle, replicas

    async def describe(self) -> dict[str, Any]:
        return {**await self._handle.describe.remote(), "replicas": self._replicas}

    async def status(self) -> dict[str, Any]:
        return await self._handle.status.remote()  # type: ignore[no-any-return]

    async def losses(self) -> dict[str, Any]:
        return await self._handle.losses.remote()  # type: ignore[no-any-return]

    async def stream(self, options: TextOptions) -> AsyncIterator[list[Piece]]:
        answer = self._handle.options(stream=True).stream.remote(options)
        try:
            async for pieces in answer:
                yield pieces
        finally:
            answer.cancel()  # frees the slot of a client that went away; does nothing at the end


@contextlib.contextmanager
def deployed(
    models: Mapping[str, Options], replicas: Replicas, note: Callable[[str], None] = lambda text: None
) -> Iterator[dict[str, Backend]]:
    """Inside the block each model has its replicas on the cluster of RAY_ADDRESS, or on a local one."""
    serve = _ray_serve()
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # someone waits for each token; Ray's 15 is for work that can wait
    names = {model: f"raygpt-{os.getpid()}-{model}" for model in models}
    with connected(cpus=max(cores(), len(models) * replicas.count * replicas.cpus + 1)):
        resources = _resources(replicas)
        ensure_room(len(models), replicas.count, resources, _nodes(), has_autoscaler, note)
        serve.start(proxy_location="Disabled")  # the HTTP server is ours
        try:
            yield {
                model: _deploy(serve, names[model], options, replicas.count, resources)
                for model, options in models.items()
            }
        finally:
            for name in names.values():
                serve.delete(name)  # and nothing else that Serve may run on this cluster


def _deploy(serve: Any, name: str, options: Options, count: int, each: Resources) -> Backend:
    # Ray would set as many threads as CPUs are reserved, and hides no GPU from replicas that asked for none.
    environment = {} if each["GPU"] else {"OMP_NUM_THREADS": str(cores()), "CUDA_VISIBLE_DEVICES": ""}
    deployment = serve.deployment(RunModel).options(
        num_replicas=count,
        max_ongoing_requests=(options.slots or max(MOST.values())) + options.waiting + 16,  # the model refuses more
        ray_actor_options={"num_cpus": each["CPU"], "num_gpus": each["GPU"], "runtime_env": {"env_vars": environment}},
        logging_config={"log_level": "ERROR"},
    )
    try:
        return ServeModel(serve.run(deployment.bind(options), name=name, route_prefix=None), count)
    except RuntimeError as error:  # Serve's, whose message has the replica's traceback
        cause = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
        raise RaygptError(f"{options.folder} cannot be served: {cause[:300]}") from error


def _resources(replicas: Replicas) -> Resources:
    """Of each replica: a GPU by default, if the cluster has any."""
    gpus = float(any(node.get("GPU") for node in _nodes())) if replicas.gpus is None else replicas.gpus
    return {"CPU": replicas.cpus, "GPU": gpus}


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in alive_nodes()]


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise RaygptError(
            f"raygpt serve needs Ray Serve ({error.name} is missing); pip install 'raygpt[serve]'"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return serve


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; one that is taken is refused before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        other = "--host" if isinstance(error, socket.gaierror) else "--port"
        at = network_address(host, port)
        raise RaygptError(f"{at} cannot be listened on ({error.strerror}); choose another {other}") from error
    return made


def run(
    backends: Mapping[str, Backend],
    listening: Sequence[socket.socket],
    key: str | None,
    limits: Limits,
    note: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C: the first lets requests end, and notes how many; the second does not."""
    import uvicorn

    class Server(uvicorn.Server):
        serving: asyncio.Task[None]

        def handle_exit(self, sig: int, frame: Any) -> None:
            unfinished = len(self.server_state.tasks)
            if self.should_exit:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what is broken off has no traceback
                # Not uvicorn's `force_exit`, which from Python 3.12 on still waits for every connection.
                self.serving.get_loop().call_soon_threadsafe(self.serving.cancel)
            elif unfinished:
                note(f"finishing the requests that are being answered ({unfinished}); Ctrl-C again breaks them off")
            self.should_exit = True

    async def main() -> None:
        models = [await connect(name, backend) for name, backend in backends.items()]
        config = uvicorn.Config(make_app(models, key, limits), log_level="warning", lifespan="off", server_header=False)
        server = Server(config)
        server.serving = asyncio.create_task(server.serve(sockets=list(listening)))
        with contextlib.suppress(asyncio.CancelledError):
            await server.serving

    asyncio.run(main())
