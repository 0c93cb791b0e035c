"""What every worker of a run does: make the engine for the devices that there are, and run the loop."""

import logging
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.config import Recipe
from raygpt.engines import engine_of
from raygpt.engines.base import Engine
from raygpt.training.loop import Loop, Task
from raygpt.training.plan import split_batch
from raygpt.training.session import RaySession, Session

LOGS = "logs"


def work(config: dict[str, Any]) -> None:
    """The function that Ray Train runs in each worker."""
    task: Task = config["task"]
    session = RaySession(task.run_folder, config["mailbox"])
    log_to(task.run_folder, f"worker-{session.rank}.log")
    engine = make_engine(task.recipe, task.tokenizer.vocab, session)
    Loop(task, engine, session).run()


def make_engine(recipe: Recipe, vocab: int, session: Session) -> Engine:
    """The recipe's engine; a batch is cut so that it fits, and every worker cuts it alike."""
    module = engine_of(recipe.engine)
    module.set_up()
    split = split_batch(recipe, vocab, module.find_devices(recipe))
    session.emit({"event": "split", "text": str(split)})
    engine: Engine = module.Engine(recipe, vocab, accumulation=session.agree(split.accumulation))
    return engine


def log_to(run_folder: str, name: str) -> None:
    """What libraries have to say goes into the run's logs, not between its lines."""
    if storage.is_remote(run_folder):
        return  # a file on s3 cannot be appended to; Ray keeps a log of each worker
    path = Path(run_folder, LOGS, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
