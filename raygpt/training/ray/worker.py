"""What every worker of a run does: create the engine for its devices, and run the loop."""

import contextlib
import logging
import socket
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray.train

from raygpt import storage
from raygpt.config import Recipe
from raygpt.engines import devices_of, engine_of
from raygpt.engines.base import Engine
from raygpt.errors import RaygptError, StorageError
from raygpt.formatting import size
from raygpt.planning.corpus import Corpus
from raygpt.planning.forecast import forecast
from raygpt.planning.micro_batch_size import split_batch
from raygpt.planning.target import found_target
from raygpt.runs import RECIPE, records
from raygpt.training.events import BatchSplit
from raygpt.training.loop import Loop
from raygpt.training.ray.metrics import RayMetrics
from raygpt.training.ray.scaling import not_shared
from raygpt.training.ray.session import RaySession
from raygpt.training.session import Session, write_or_warn
from raygpt.training.spec import RunSpec
from raygpt.training.tracking import start_tracking
from raygpt.training.watchdog import Watchdog

LOGS = "logs"


def work(config: dict[str, Any]) -> None:
    """The function that Ray Train runs in each worker."""
    spec: RunSpec = config["spec"]
    _find_run(spec.run_folder)
    log = log_to(spec.run_folder, f"worker-{ray.train.get_context().get_world_rank()}.log")
    watchdog = Watchdog(spec.recipe.training.hang_after, log)
    session = RaySession(spec.run_folder, config["mailbox"], watchdog)
    if session.rank == 0:
        others = {"Ray metrics": partial(RayMetrics, spec.run_folder)}
        session.listen(start_tracking(spec.recipe, spec.run_folder, session.warn, others))
    engine = make_engine(spec.recipe, spec.tokenizer.vocab, session)
    write_or_warn(session, "its plan", lambda: keep_plan(spec, engine.describe(), _node_count()))
    try:
        Loop(spec, engine, session).run()
        if session.rank == 0:
            with contextlib.suppress(OSError, RaygptError):
                records.write_peak(spec.run_folder, devices_of(spec.recipe.engine).peak_bytes())
    except BaseException:
        session.fail()
        raise


def _node_count() -> int:
    context = ray.train.get_context()
    return -(-int(context.get_world_size()) // int(context.get_local_world_size()))


def _find_run(run_folder: str) -> None:
    """Fail if this node, which may have joined later, does not share the run's storage."""
    if not storage.exists(storage.join(run_folder, RECIPE)):
        raise StorageError(not_shared(run_folder, socket.gethostname()))  # retried: a mount may take a while


def make_engine(recipe: Recipe, vocab: int, session: Session) -> Engine:
    """The recipe's engine, with a batch split so that it fits; the same in every worker."""
    module = engine_of(recipe.engine)
    module.set_up(recipe)
    split = split_batch(recipe, vocab, module.find_devices(recipe))
    session.emit(BatchSplit(f"{split}; about {size(split.memory_bytes)} per device"))
    engine: Engine = module.Engine(recipe, vocab, accumulation=session.decide(lambda: split.accumulation))
    return engine


def keep_plan(spec: RunSpec, about: Mapping[str, str], nodes: int) -> None:
    """Record what is to be expected of a run on the devices that an engine describes, if they are known."""
    target = found_target(about, nodes, spec.recipe.cluster.topology)
    if target:
        home = spec.run_folder.rstrip("/").rpartition("/")[0]
        recipe = spec.recipe.model_copy(update={"run": spec.recipe.run.model_copy(update={"storage": home})})
        corpus = Corpus(spec.tokenizer.vocab, None, sum(map(len, spec.val)))
        devices = engine_of(spec.recipe.engine).find_devices(spec.recipe)
        records.write_plan(spec.run_folder, forecast(recipe, target, corpus, devices).as_dict())


def log_to(run_folder: str, name: str) -> Path:
    """Send the log messages of libraries to the run's logs, not to the console.

    A file on s3 cannot be appended to: the log stays on the node, and what an earlier worker left there is uploaded.
    """
    if storage.is_remote(run_folder):
        path = Path(tempfile.gettempdir(), "raygpt-logs", storage.digest(run_folder), name)
        if path.exists():
            with contextlib.suppress(StorageError):
                storage.write_bytes(storage.join(run_folder, LOGS, name), path.read_bytes())
    else:
        path = Path(run_folder, LOGS, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    return path
