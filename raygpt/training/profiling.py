"""Profiles some steps with the engine's profiler: RUN/profile/steps-20-25.json.gz opens in ui.perfetto.dev.

    profile = Profile(20, 25, run_folder, "jax")
    for each step: profile.before(step); …; profile.after(step, wait for the device)

The profiler writes to a local folder first, because a run may be on s3.
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
    """Profiles a range of steps."""

    def __init__(self, first: int, last: int, run_folder: str, engine: str):
        self._first, self._last, self._run_folder = first, last, run_folder
        self._engine = engine
        self._aside: tempfile.TemporaryDirectory[str] | None = None

    def before(self, step: int) -> None:
        """Start, if the step is in the range: a run that is resumed within it is profiled from there."""
        if self._first <= step <= self._last and self._aside is None:
            self._aside = tempfile.TemporaryDirectory(prefix="raygpt-profile-")
            self._tracer.start(Path(self._aside.name))

    def after(self, step: int, wait: Callable[[], object] = lambda: None) -> str | None:
        """Return the file once it is written. `wait` blocks until the device has finished the step."""
        if self._aside is None or step < self._last:
            return None
        wait()
        return self.close()

    def close(self) -> str | None:
        """Stop and keep what was recorded; does nothing if it never started or has stopped."""
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
        """Keep the files of TensorBoard's profile plugin, in the folders where it expects them."""
        for path in folder.rglob("*"):
            if path.is_file() and path != but:
                storage.write_bytes(
                    storage.join(self._run_folder, FOLDER, path.relative_to(folder).as_posix()), path.read_bytes()
                )
