"""The command line's options of `raygpt serve`, checked."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raygpt.errors import RaygptError
from raygpt.host import is_loopback
from raygpt.runs import open_run, split_step
from raygpt.serving.model import Options

SHORTEST_KEY = 8


def models_of(given: Sequence[str], follow: bool, **options: Any) -> dict[str, Options]:
    """Models by name, of RUN, NAME=RUN, RUN@STEP or both."""
    models: dict[str, Options] = {}
    for one in given:
        name, folder, step = _parts(one)
        if follow and step is not None:
            raise RaygptError(f"--follow: {one} names a step; leave one of the two out")
        run = open_run(folder)
        if not follow:
            run.pick(step)
        name = name or (run.name if step is None else f"{run.name}@{step}")
        if name in models:
            raise RaygptError(f"two models are called {name}; give one another name: NAME={one}")
        models[name] = Options(run.folder, step, follow=follow, **options)
    return models


def _parts(one: str) -> tuple[str, str, int | None]:
    """Name, folder and step of NAME=RUN@STEP."""
    name, equals, rest = one.partition("=")
    if not equals or "/" in name:
        name, rest = "", one
    return name, *split_step(rest)


def api_key(host: str, file: str | None) -> str | None:
    """The API key of a file or of RAYGPT_API_KEY. Whoever is not on this machine needs one."""
    key = os.environ.get("RAYGPT_API_KEY", "").strip() or None
    if file:
        try:
            key = Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RaygptError(f"--api-key-file: {file} cannot be read ({error}); name a text file") from error
    if key is not None and (len(key) < SHORTEST_KEY or not key.isascii()):
        where = f"--api-key-file: {file}" if file else "RAYGPT_API_KEY"
        raise RaygptError(
            f"{where}: a key must have {SHORTEST_KEY} ASCII characters or more; make one: openssl rand -hex 16"
        )
    if key is None and not is_loopback(host):
        raise RaygptError(f"--host {host}: others could use the model; set RAYGPT_API_KEY or --api-key-file first")
    return key
