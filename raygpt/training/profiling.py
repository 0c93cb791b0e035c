"""A profile of some steps, by the engine's own profiler: RUN/profile/steps-20-25.json.gz opens in ui.perfetto.dev.

    profile = Profile(20, 25, run_folder, "jax")
    for each step: profile.before(step); …; profile.after(step, wait for the device)

What the profiler writes goes to a folder of this machine first: a run may lie on s3.
"""

import importlib
import re
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from raygpt import storage
from raygpt.errors import RaygptError

FOLDER = "profile"


def parse_steps(text: str) -> tuple[int, int]:
    """'20:25' -> (20, 25): the first and the last step."""
    ends = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text.strip())
    if not ends or not 1 <= int(ends[1]) <= int(ends[2]):
        raise RaygptError(f"--profile {text!r} is not FIRST:LAST, two steps from 1 on; write e.g. --profile 20:25")
    return int(ends[1]), int(ends[2])


class Profile:
    """Begins before the first of its steps that comes, ends after the last."""

    def __init__(self, first: int, last: int, run_folder: str, engine: str):
        self._first, self._last, self._run_folder = first, last, run_folder
        self._engine = engine
        self._aside: tempfile.TemporaryDirectory[str] | None = None

    def before(self, step: int) -> None:
        """A run that is resumed among the steps is traced from there."""
        if self._first <= step <= self._last and self._aside is None:
            self._aside = tempfile.TemporaryDirectory(prefix="raygpt-profile-")
            self._tracer.start(Path(self._aside.name))

    def after(self, step: int, wait: Callable[[], object] = lambda: None) -> str | None:
        """The file, once it is written. `wait` ends when the device has done the step, which the host runs ahead of."""
        if self._aside is None or step < self._last:
            return None
        wait()
        return self.close()

    def close(self) -> str | None:
        """End it and keep what there is; nothing where it never began or has ended."""
        if self._aside is None:
            return None
        aside, self._aside = self._aside, None
        with aside as name:
            folder = Path(name)
            opened_by_perfetto = self._tracer.stop(folder)
            file = storage.join(self._run_folder, FOLDER, f"steps-{self._first}-{self._last}.json.gz")
            storage.write_bytes(file, opened_by_perfetto.read_bytes())
            self._keep_the_rest(folder, opened_by_perfetto)
        return file

    @cached_property
    def _tracer(self) -> Any:
        return importlib.import_module(f"raygpt.engines.{self._engine}.trace")

    def _keep_the_rest(self, folder: Path, but: Path) -> None:
        """What TensorBoard's profile plugin reads, in the folders where it looks for it."""
        for path in folder.rglob("*"):
            if path.is_file() and path != but:
                storage.write_bytes(
                    storage.join(self._run_folder, FOLDER, path.relative_to(folder).as_posix()), path.read_bytes()
                )
